"""Sends tokens to their experts and brings the outputs back, in first-come slots already decided.

Two modes with the same results, drops and gradients:

* :class:`PackedDispatcher`: only kept tokens travel. Counts go ahead in one small all-to-all, and
  are read by the host once.
* :class:`PaddedDispatcher`: every slot travels, filled or not. No counts, no host read, static
  shapes: for CUDA graphs, and for rehearsal with tensors that hold no data.

Guaranteed in both: one all-to-all each way for tokens, forward and backward, over the ranks that
hold (shards of) experts; a dropped token's output is exactly zero; a rank without tokens takes part
in every collective; for backward only integers are kept, O(T) of them (padded: O(slots)). Gates
(float32) and random keys travel beside the tokens, and experts multiply the gate in, so that no
expert output is kept for its gradient.

Dispatchers hold process groups and sizes, no state: two micro-batches may be under way at a time.

Shape letters:

    T  tokens on this rank    D  model    R  rows computed by this rank's experts
    E, e  experts, local experts    C  slots per expert and group    G  capacity groups
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.dispatch_plan import (
    Chunk,
    ExpertGrid,
    Plan,
    count_keys,
    packed_keys,
    packed_plan,
    padded_plan,
)
from megatron_switch.moe.exchange import (
    Exchange,
    all_gather_rows,
    gather_rows,
    reduce_scatter_rows,
    scatter_rows,
)
from megatron_switch.moe.routed_tokens import RoutedTokens

Experts = Callable[..., tuple[Tensor, Tensor | None]]
"""Megatron's ``ExpertsInterface``: ``(rows_RD, tokens_per_expert_e, gate_R)``, and ``key_R=`` where
the tokens have keys, to ``(out_RD, None)``."""


@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, ordered by expert, and the way back."""

    tokens_RD: Tensor
    tokens_per_expert_e: Tensor
    """Rows of each local expert, int64, on the CPU."""
    gate_R: Tensor
    """Router probability of each row, float32, differentiable; 0 for an empty slot."""
    key_R: Tensor | None
    """Random key of each row, int64; None where tokens have none."""
    plan: Plan


@dataclass(frozen=True)
class _Shipment:
    """One chunk of rows under way to the experts."""

    tokens: Exchange
    gates: Exchange
    keys: Exchange | None


class Dispatcher(ABC):
    """What both modes share: all but the plan."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        overlap_chunks: int = 1,
        send_keys: bool = True,
    ) -> None:
        """Note the groups; nothing is allocated or communicated.

        Args:
            config: Megatron's transformer configuration; the number of experts is read.
            pg_collection: Megatron's groups; ``ep``, ``expt_tp``, ``tp_ep`` and ``tp_cp`` are
                read.
            overlap_chunks: Pieces into which :meth:`run` splits an exchange
                (``--switch-overlap-chunks``).
            send_keys: Whether experts take random keys (expert dropout); where tokens have none,
                none are sent.
        """
        self.group: dist.ProcessGroup = pg_collection.tp_ep
        self.grid = ExpertGrid(
            num_experts=config.num_moe_experts,
            expert_parallel=pg_collection.ep.size(),
            expert_tensor_parallel=pg_collection.expt_tp.size(),
        )
        self.shards: dist.ProcessGroup = pg_collection.tp_cp
        self.overlap_chunks = overlap_chunks
        self.send_keys = send_keys
        assert self.group.size() == self.grid.peers, "tp_ep is not the product of ep and expt_tp"

    @abstractmethod
    def _plan(self, routed: RoutedTokens, num_chunks: int) -> Plan:
        """Decide which row goes where."""

    def _share(self, x: Tensor) -> Tensor:
        """Return the rows that the plan packs, from this rank's."""
        return x

    def _keep(self, x: Tensor) -> Tensor:
        """Return this rank's rows, the transpose of :meth:`_share`."""
        return x

    def dispatch(self, x_TD: Tensor, routed: RoutedTokens) -> Dispatched:
        """Send tokens to the ranks of their experts.

        Args:
            x_TD: Tokens, shape (T, D), batch-major.
            routed: Where they go.

        Returns:
            The rows for this rank's experts.
        """
        plan = self._plan(routed, num_chunks=1)
        (rows,) = self._pack(x_TD, routed, plan)
        return self._unload(self._ship(rows, plan.chunks[0]), plan.chunks[0], plan)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the experts' outputs back to their tokens.

        Args:
            y_RD: Outputs in the order of ``dispatched.tokens_RD``, gate applied.
            dispatched: What :meth:`dispatch` returned.

        Returns:
            Shape (T, D); exactly zero for a token without a slot.
        """
        (chunk,) = dispatched.plan.chunks
        return self._unpack([self._ship_back(y_RD, chunk)], dispatched.plan)

    def run(self, x_TD: Tensor, routed: RoutedTokens, experts: Experts) -> Tensor:
        """Dispatch, compute and combine; with several chunks, the next one travels meanwhile.

        Args:
            x_TD: Tokens, shape (T, D), batch-major.
            routed: Where they go.
            experts: This rank's experts.

        Returns:
            Shape (T, D); exactly zero for a token without a slot.
        """
        plan = self._plan(routed, self.overlap_chunks)
        # Popped as they go: a list would keep rows alive that nobody needs any more.
        waiting = deque(zip(self._pack(x_TD, routed, plan), plan.chunks, strict=True))
        under_way = deque([self._ship(*waiting.popleft())])
        returning = []
        for chunk in plan.chunks:
            if waiting:
                under_way.append(self._ship(*waiting.popleft()))
            rows = self._unload(under_way.popleft(), chunk, plan)
            returning.append(self._ship_back(apply_experts(experts, rows), chunk))
        return self._unpack(returning, plan)

    def _pack(self, x_TD: Tensor, routed: RoutedTokens, plan: Plan) -> list[list[Tensor | None]]:
        """Return for each chunk its rows to send: tokens, gates, keys."""
        sizes = [sum(chunk.send) for chunk in plan.chunks]
        columns: list[Any] = []
        key_T = routed.key_T if self.send_keys else None
        for column in (x_TD, routed.routing.gate_T, key_T):
            if column is None:
                columns.append([None] * len(sizes))
            else:
                columns.append(torch.split(gather_rows(self._share(column), plan.pack), sizes))
        return [list(rows) for rows in zip(*columns, strict=True)]

    def _ship(self, rows: list[Tensor | None], chunk: Chunk) -> _Shipment:
        tokens, gates, keys = (
            None if part is None else Exchange.start(part, self.group, chunk.send, chunk.receive)
            for part in rows
        )
        assert tokens is not None
        assert gates is not None
        return _Shipment(tokens, gates, keys)

    def _unload(self, shipment: _Shipment, chunk: Chunk, plan: Plan) -> Dispatched:
        def arrive(exchange: Exchange) -> Tensor:
            rows = exchange.arrive()
            return rows if chunk.sort is None else gather_rows(rows, chunk.sort)

        return Dispatched(
            tokens_RD=arrive(shipment.tokens),
            tokens_per_expert_e=chunk.tokens_per_expert_e,
            gate_R=arrive(shipment.gates),
            key_R=None if shipment.keys is None else arrive(shipment.keys),
            plan=plan,
        )

    def _ship_back(self, y_RD: Tensor, chunk: Chunk) -> Exchange:
        rows = y_RD if chunk.sort is None else scatter_rows(y_RD, chunk.sort)
        return Exchange.start(rows, self.group, chunk.receive, chunk.send)

    def _unpack(self, returning: list[Exchange], plan: Plan) -> Tensor:
        rows = [exchange.arrive() for exchange in returning]
        return self._keep(scatter_rows(rows[0] if len(rows) == 1 else torch.cat(rows), plan.pack))


class PackedDispatcher(Dispatcher):
    """Only kept tokens travel; serves every capacity group, ``ep`` included."""

    def _plan(self, routed: RoutedTokens, num_chunks: int) -> Plan:
        routing, grid = routed.routing, self.grid
        sizes = {"num_experts": grid.num_experts, "num_chunks": num_chunks}
        key_T = packed_keys(routing.expert_T, routing.slot_T, routing.kept_T, **sizes)
        counts_WE = count_keys(key_T, **sizes)
        return packed_plan(key_T, counts_WE, self._exchange_counts(counts_WE), grid=grid)

    def _exchange_counts(self, counts_WE: Tensor) -> Tensor:
        """Return what every peer will send to this rank's experts: shape (N, W, e)."""
        grid, num_chunks = self.grid, len(counts_WE)
        counts_NWe = (
            counts_WE.view(num_chunks, grid.expert_parallel, grid.local_experts)
            .transpose(0, 1)
            .repeat_interleave(grid.expert_tensor_parallel, dim=0)
        )
        if grid.peers == 1:
            return counts_NWe
        received_NWe = torch.empty_like(counts_NWe, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received_NWe, counts_NWe.contiguous(), group=self.group)
        return received_NWe


class PaddedDispatcher(Dispatcher):
    """Every slot travels; shapes are static and the host reads nothing.

    Where a capacity group spans n tensor- and context-parallel ranks, any one of them may hold all
    the winners. So their tokens are gathered, rank r serves slots [r * ceil(C / n),
    (r + 1) * ceil(C / n)) of every expert and group, and outputs return by reduce-scatter.
    """

    def _plan(self, routed: RoutedTokens, num_chunks: int) -> Plan:
        routing = routed.routing
        capacity = max(1, routed.capacity)  # one empty slot where there is room for nobody
        block_T = routing.expert_T * routed.num_groups + routed.group_T
        place_T = torch.where(routing.kept_T, block_T * capacity + routing.slot_T, -1)
        return padded_plan(
            all_gather_rows(place_T, self.shards),
            capacity=capacity,
            num_groups=routed.num_groups,
            shard=self.shards.rank(),
            num_shards=self.shards.size(),
            num_chunks=num_chunks,
            grid=self.grid,
        )

    def _share(self, x: Tensor) -> Tensor:
        return all_gather_rows(x, self.shards)

    def _keep(self, x: Tensor) -> Tensor:
        return reduce_scatter_rows(x, self.shards)


def build_dispatcher(
    config: TransformerConfig, switch: SwitchConfig, pg_collection: ProcessGroupCollection
) -> Dispatcher:
    """Return the dispatcher that the settings ask for.

    Args:
        config: Megatron's transformer configuration.
        switch: Switch settings, with ``dispatch`` resolved to packed or padded.
        pg_collection: Process groups.
    """
    kinds: dict[str, type[Dispatcher]] = {"packed": PackedDispatcher, "padded": PaddedDispatcher}
    assert switch.dispatch in kinds, f"--switch-dispatch {switch.dispatch} was not resolved"
    return kinds[switch.dispatch](
        config,
        pg_collection,
        overlap_chunks=switch.overlap_chunks,
        send_keys=switch.expert_dropout > 0.0,
    )


def apply_experts(experts: Experts, dispatched: Dispatched) -> Tensor:
    """Return the outputs of this rank's experts, in the order of their rows: shape (R, D).

    Keys are passed only where there are any, because Transformer Engine's experts take none.
    """
    keys = {} if dispatched.key_R is None else {"key_R": dispatched.key_R}
    output_RD, bias = experts(
        dispatched.tokens_RD, dispatched.tokens_per_expert_e, dispatched.gate_R, **keys
    )
    assert bias is None, "experts have no bias"
    return output_RD
