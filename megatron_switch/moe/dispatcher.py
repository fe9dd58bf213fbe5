"""Dispatch and combine: tokens travel to their experts, and outputs back, in slots already decided.

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

Dispatchers hold process groups and sizes, no state: two micro-batches may be in flight at a time.

Shape letters:

    T  tokens on this rank    D  model    R  rows computed by this rank's experts
    E, e  experts, local experts    C  slots per expert and group    G  capacity groups
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.dispatch_plan import (
    DispatchPlan,
    ExchangeChunk,
    ExpertGrid,
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
from megatron_switch.moe.routing import RoutedTokens

Experts = Callable[..., tuple[Tensor, Tensor | None]]
"""Megatron's ``ExpertsInterface``: ``(rows_RD, tokens_per_expert_e, gate_R)``, and ``key_R=`` where
the tokens have keys, to ``(out_RD, None)``."""

_Columns = list[Tensor | None]
"""Rows of one chunk: tokens (R, D), gates (R,) and, where experts draw noise, keys (R,)."""


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
            pg_collection: Megatron's groups; ``ep``, ``expt_tp``, ``tp_ep`` and ``tp_cp`` are read.
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
    def _plan(self, routed: RoutedTokens, num_chunks: int) -> DispatchPlan:
        """Decide which row goes where."""

    def _gather_shards(self, x: Tensor) -> Tensor:
        """Return the rows that the plan packs, from this rank's."""
        return x

    def _scatter_shards(self, x: Tensor) -> Tensor:
        """Return this rank's rows, the transpose of :meth:`_gather_shards`."""
        return x

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
        # Popped as they go: a list would keep rows alive after their last use.
        waiting = deque(zip(self._pack(x_TD, routed, plan), plan.chunks, strict=True))
        in_flight = deque([self._send(*waiting.popleft())])
        returning = []
        for chunk in plan.chunks:
            if waiting:  # one chunk ahead: it travels while the experts work on this one
                in_flight.append(self._send(*waiting.popleft()))
            y_RD = self._compute(in_flight.popleft(), chunk, experts)
            rows = y_RD if chunk.sort is None else scatter_rows(y_RD, chunk.sort)
            returning.append(Exchange.start(rows, self.group, chunk.receive, chunk.send))
        received = [exchange.wait() for exchange in returning]
        rows = received[0] if len(received) == 1 else torch.cat(received)
        return self._scatter_shards(scatter_rows(rows, plan.pack))

    def _pack(self, x_TD: Tensor, routed: RoutedTokens, plan: DispatchPlan) -> list[_Columns]:
        """Return for each chunk its rows to send: tokens, gates, keys."""
        sizes = [sum(chunk.send) for chunk in plan.chunks]
        columns: list[Any] = []
        key_T = routed.key_T if self.send_keys else None
        for column in (x_TD, routed.routing.gate_T, key_T):
            if column is None:
                columns.append([None] * len(sizes))
            else:
                packed = gather_rows(self._gather_shards(column), plan.pack)
                columns.append(torch.split(packed, sizes))
        return [list(rows) for rows in zip(*columns, strict=True)]

    def _send(self, columns: _Columns, chunk: ExchangeChunk) -> list[Exchange | None]:
        return [
            None if rows is None else Exchange.start(rows, self.group, chunk.send, chunk.receive)
            for rows in columns
        ]

    def _compute(
        self, in_flight: list[Exchange | None], chunk: ExchangeChunk, experts: Experts
    ) -> Tensor:
        """Wait for a chunk and return its experts' outputs, in the order of their rows: (R, D)."""

        def received(exchange: Exchange | None) -> Tensor | None:
            if exchange is None or chunk.sort is None:
                return None if exchange is None else exchange.wait()
            return gather_rows(exchange.wait(), chunk.sort)

        tokens_RD, gate_R, key_R = map(received, in_flight)
        # Passed only where there are any: Transformer Engine's experts take no keys.
        keys = {} if key_R is None else {"key_R": key_R}
        output_RD, bias = experts(tokens_RD, chunk.tokens_per_expert_e, gate_R, **keys)
        assert bias is None, "experts have no bias"
        return output_RD


class PackedDispatcher(Dispatcher):
    """Only kept tokens travel; serves every capacity group, ``ep`` included."""

    def _plan(self, routed: RoutedTokens, num_chunks: int) -> DispatchPlan:
        routing, grid = routed.routing, self.grid
        sizes = {"num_experts": grid.num_experts, "num_chunks": num_chunks}
        key_T = packed_keys(routing.expert_T, routing.slot_T, routing.kept_T, **sizes)
        counts_WE = count_keys(key_T, **sizes)
        return packed_plan(key_T, counts_WE, self._exchange_counts(counts_WE), grid=grid)

    def _exchange_counts(self, counts_WE: Tensor) -> Tensor:
        """Return how many rows every peer will send to this rank's experts: shape (N, W, e)."""
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

    def _plan(self, routed: RoutedTokens, num_chunks: int) -> DispatchPlan:
        routing = routed.routing
        capacity = max(1, routed.capacity)  # one empty slot, so that no buffer has zero rows
        # All slots of the layer in one line: expert, then group, then slot.
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

    def _gather_shards(self, x: Tensor) -> Tensor:
        return all_gather_rows(x, self.shards)

    def _scatter_shards(self, x: Tensor) -> Tensor:
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
