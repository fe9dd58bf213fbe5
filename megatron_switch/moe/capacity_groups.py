"""Routing over whole capacity groups, whichever ranks hold their tokens.

Capacity is counted over a group of tokens: one micro-batch, one sequence of it, or all
micro-batches of the ranks that share the experts. Sequence and context parallelism spread the
tokens of a group over ranks, so a rank cannot number its slots alone. :class:`CapacityGroups`
gathers the rest:

* first come, first served: int32 counts of tokens per (sequence, chunk, expert), in one all-gather;
  a rank adds up those of earlier chunks (:mod:`megatron_switch.moe.sequence_shards`);
* by probability: the tokens themselves in index form, because counts do not show whose gate is
  larger.

Where one rank holds whole groups nothing is gathered. The host never reads a value.

Shape letters:

    S  positions of a sequence on this rank    B  sequences in the micro-batch
    T  tokens on this rank, T = B * S          E  experts
    K  chunks of a sequence on a rank          N  ranks that share a capacity group
    G  groups over which balance is measured: sequences where capacity is counted over them, else
       the micro-batch
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.moe.routing import (
    SwitchRouting,
    assign_slots,
    count_tokens,
    route_probs,
    shift_slots,
)
from megatron_switch.moe.sequence_shards import SequenceShards, earlier_counts


@dataclass(frozen=True)
class Rows:
    """This rank's rows: their sequence, their capacity group, and which are padding."""

    num_sequences: int
    length: int
    """Positions of a sequence on this rank."""
    sequence_T: Tensor
    """Sequence of each row, int64 in [0, num_sequences)."""
    group_T: Tensor
    """Capacity group of each row inside its micro-batch, int64 in [0, num_groups)."""
    num_groups: int
    padding_T: Tensor | None


@dataclass(frozen=True)
class _Positions:
    """Positions of this rank's part of a sequence in the whole one, on the rows' device."""

    length: int
    num_chunks: int
    chunk_S: Tensor
    """Chunk of each position, int64 in [0, num_chunks)."""
    position_S: Tensor
    """Position in the whole sequence of each local position, int64."""
    order_NK: Tensor
    """Flat (rank, chunk) indices of all chunks of a sequence, earliest first, int64."""


class CapacityGroups:
    """Numbers slots over the capacity groups that this rank has tokens of.

    Args:
        kind: ``--switch-capacity-group``.
        pg_collection: Process groups; tensor, context, tensor-and-context are read, and the ranks
            that share all experts.

    Raises:
        LayoutError: If ``ep`` is asked for, and the ranks that share the experts do not hold whole
            micro-batches.
    """

    def __init__(
        self, kind: Literal["microbatch", "sequence", "ep"], pg_collection: ProcessGroupCollection
    ) -> None:
        self._kind = kind
        self._tensor_size: int = pg_collection.tp.size()
        self._context_size: int = pg_collection.cp.size()
        self._shards: dist.ProcessGroup = pg_collection.tp_cp
        self._ranks: dist.ProcessGroup = (
            pg_collection.tp_ep if kind == "ep" else pg_collection.tp_cp
        )
        self._positions: _Positions | None = None
        if self._ranks.size() % self._shards.size():
            raise LayoutError(
                "--switch-capacity-group ep counts whole micro-batches, so the "
                f"{self._ranks.size()} ranks that share all experts must be a multiple of the "
                f"{self._shards.size()} that share one micro-batch. Raise "
                "--expert-model-parallel-size, or use --switch-capacity-group microbatch."
            )

    def rows(self, x_BSD: Tensor, padding_BS: Tensor | None) -> Rows:
        """Describe the rows of this rank's tokens, batch-major.

        Args:
            x_BSD: Tokens, shape (B, S, D).
            padding_BS: True for padding, shape (B, S), bool; None without padding.

        Raises:
            ConfigError: If the mask has another shape.
        """
        num_sequences, length = x_BSD.shape[:2]
        if padding_BS is not None and padding_BS.shape != (num_sequences, length):
            raise ConfigError(
                "A padding mask has one entry for each token of this rank, sequences first: shape "
                f"{(num_sequences, length)}, got {tuple(padding_BS.shape)}."
            )
        sequence_B1 = torch.arange(num_sequences, device=x_BSD.device).unsqueeze(1)
        sequence_T = sequence_B1.expand(-1, length).reshape(-1)
        num_groups = self.count(num_sequences)
        return Rows(
            num_sequences=num_sequences,
            length=length,
            sequence_T=sequence_T,
            group_T=sequence_T if num_groups > 1 else torch.zeros_like(sequence_T),
            num_groups=num_groups,
            padding_T=None if padding_BS is None else padding_BS.flatten(),
        )

    def count(self, num_sequences: int) -> int:
        """Return how many capacity groups a micro-batch of so many sequences has tokens of."""
        return num_sequences if self._kind == "sequence" else 1

    def size(self, num_sequences: int, length: int) -> int:
        """Return the tokens of one capacity group over all ranks, padding included.

        Args:
            num_sequences: Sequences in the micro-batch.
            length: Positions of a sequence on this rank.
        """
        return num_sequences * length * self._ranks.size() // self.count(num_sequences)

    def positions(self, rows: Rows) -> Tensor:
        """Return each row's index in the whole micro-batch: int64 (T,), batch-major over shards."""
        whole_length = rows.length * self._shards.size()
        position_S = self._positions_of(rows).position_S
        return rows.sequence_T * whole_length + position_S.repeat(rows.num_sequences)

    def route(
        self,
        probs_TE: Tensor,
        rows: Rows,
        *,
        capacity: int,
        order: Literal["first_come", "probability"],
    ) -> tuple[SwitchRouting, Tensor]:
        """Route this rank's tokens, with slots numbered over whole capacity groups.

        Args:
            probs_TE: Router probabilities, shape (T, E).
            rows: Sequence, capacity group and padding of each.
            capacity: Slots per expert and capacity group.
            order: ``--switch-drop-order``.

        Returns:
            The routing, and the tokens of *all* ranks of this micro-batch that chose each expert,
            before any drop: integers (G, E).
        """
        if self._ranks.size() == 1:
            routing = route_probs(
                probs_TE,
                capacity=capacity,
                group_T=rows.group_T if rows.num_groups > 1 else None,
                padding_T=rows.padding_T,
                order=order,
            )
            if rows.num_groups == 1:
                return routing, routing.tokens_per_expert_E.unsqueeze(0)
            return routing, _count(routing, rows.group_T, rows.num_groups, rows.padding_T)
        held = self._positions_of(rows)
        chunk_T = rows.sequence_T * held.num_chunks + held.chunk_S.repeat(rows.num_sequences)
        # Slots are counted within each local chunk, then shifted by the counts of earlier ones.
        routing = route_probs(
            probs_TE, capacity=capacity, group_T=chunk_T, padding_T=rows.padding_T
        )
        num_chunks = rows.num_sequences * held.num_chunks
        counts_GE = _count(routing, chunk_T, num_chunks, rows.padding_T)
        counts_NBKE = _gathered(counts_GE.int(), self._ranks).view(
            self._ranks.size(), rows.num_sequences, held.num_chunks, -1
        )
        if order == "probability":
            routing = self._numbered_by_probability(routing, rows, capacity)
        else:
            earlier_BKE = earlier_counts(
                counts_NBKE, held.order_NK, rank=self._ranks.rank(), group=self._kind
            )
            routing = shift_slots(
                routing, earlier_GE=earlier_BKE.flatten(0, 1), group_T=chunk_T, capacity=capacity
            )
        return routing, self._of_this_micro_batch(counts_NBKE, rows)

    def _of_this_micro_batch(self, counts_NBKE: Tensor, rows: Rows) -> Tensor:
        """Sum counts over the shards of this rank's micro-batch: shape (G, E)."""
        num_shards = self._shards.size()
        first = self._ranks.rank() // num_shards * num_shards
        counts_BE = counts_NBKE[first : first + num_shards].sum(dim=(0, 2))
        return counts_BE if rows.num_groups > 1 else counts_BE.sum(dim=0, keepdim=True)

    def _numbered_by_probability(
        self, routing: SwitchRouting, rows: Rows, capacity: int
    ) -> SwitchRouting:
        ranks, num_shards = self._ranks, self._shards.size()
        real_T = routing.slot_T >= 0
        local = (routing.expert_T, rows.group_T, real_T.long(), routing.gate_T.detach())
        expert, group, real, gate = (_gathered(part, ranks) for part in local)
        # Equal gates go to the earlier token, so rows are sorted into the order of the whole group.
        micro_batch = ranks.rank() // num_shards
        position_T = self.positions(rows) + micro_batch * num_shards * real_T.numel()
        place = _gathered(position_T, ranks).argsort()
        slot_in_order = assign_slots(
            expert[place],
            num_experts=routing.tokens_per_expert_E.numel(),
            group_T=group[place],
            padding_T=real[place] == 0,
            gate_T=gate[place],
        )
        slots = torch.empty_like(slot_in_order).scatter_(0, place, slot_in_order)
        slot_T = slots.view(ranks.size(), -1)[ranks.rank()]
        return replace(
            routing, slot_T=slot_T, kept_T=real_T & (slot_T < capacity), capacity=capacity
        )

    def _positions_of(self, rows: Rows) -> _Positions:
        """Return the rows' positions; cached, because a copy to the device would wait for it."""
        device = rows.sequence_T.device
        held = self._positions
        if held is None or held.length != rows.length or held.chunk_S.device != device:
            shards = SequenceShards.of(
                rows.length, tensor_size=self._tensor_size, context_size=self._context_size
            )
            rank = self._shards.rank()
            held = self._positions = _Positions(
                length=rows.length,
                num_chunks=shards.num_chunks,
                chunk_S=shards.chunk_of_position(rank).to(device),
                position_S=shards.positions(rank).to(device),
                order_NK=shards.order().to(device),
            )
        return held


def _count(
    routing: SwitchRouting, group_T: Tensor, num_groups: int, padding_T: Tensor | None
) -> Tensor:
    return count_tokens(
        routing.expert_T,
        num_experts=routing.tokens_per_expert_E.numel(),
        num_groups=num_groups,
        group_T=group_T,
        padding_T=padding_T,
    )


def _gathered(values: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Return the values of all ranks, concatenated along the first dim."""
    gathered = values.new_empty((ranks.size() * values.shape[0], *values.shape[1:]))
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=ranks)
    return gathered
