"""Collective trace of one rank: every collective that torch issues, with its group and its bytes.

Collectives are recorded where torch calls its back end, below every wrapper and alias of
``torch.distributed``, so that none is missed, and in the same way in a rehearsal and a real run.

The bytes of a call are the larger of its input and its output on this rank, which nccl-tests calls
``size``: a whole gathered tensor, a whole tensor before it is scattered.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_switch.layout.nodes import spread_of
from megatron_switch.upstream.process_groups import MEGATRON_GROUPS

_OPS = torch.ops.c10d

COLLECTIVES: Mapping[Any, str] = {
    _OPS.allreduce_.default: "all-reduce",
    _OPS.allreduce_coalesced_.default: "all-reduce",
    _OPS.allgather_.default: "all-gather",
    _OPS.allgather_coalesced_.default: "all-gather",
    _OPS.allgather_into_tensor_coalesced_.default: "all-gather",
    _OPS._allgather_base_.default: "all-gather",
    _OPS.reduce_scatter_.default: "reduce-scatter",
    _OPS.reduce_scatter_tensor_coalesced_.default: "reduce-scatter",
    _OPS._reduce_scatter_base_.default: "reduce-scatter",
    _OPS.alltoall_.default: "all-to-all",
    _OPS.alltoall_base_.default: "all-to-all",
    _OPS.broadcast_.default: "broadcast",
    _OPS.reduce_.default: "reduce",
    _OPS.gather_.default: "gather",
    _OPS.scatter_.default: "scatter",
    _OPS.send.default: "send",
    _OPS.recv_.default: "receive",
    _OPS.recv_any_source_.default: "receive",
    _OPS.barrier.default: "barrier",
}
"""The reported name of every operator of torch's back ends."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as this rank issued it.

    Attributes:
        kind: A value of :data:`COLLECTIVES`.
        group: Name of the group, as in :data:`megatron_switch.layout.grid.GROUP_NAMES`.
        members: Global ranks of the group, ascending.
        num_bytes: The larger of input and output on this rank.
    """

    kind: str
    group: str
    members: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class CollectiveTotal:
    """All calls of one kind over one group.

    Attributes:
        kind: A value of :data:`COLLECTIVES`.
        group: Name of the group.
        num_members: Ranks in the group.
        num_nodes: Nodes on which they run: 1 is inside a node, more is across nodes.
        count: Calls.
        num_bytes: Sum of the calls' bytes.
    """

    kind: str
    group: str
    num_members: int
    num_nodes: int
    count: int
    num_bytes: int


class CollectiveTrace:
    """Collectives in the order in which this rank issued them."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}

    def add(self, op: Any, args: Sequence[Any]) -> None:
        """Record one call of an operator in :data:`COLLECTIVES`."""
        # The tensors of a call stand in front of its group.
        place = next(i for i, each in enumerate(args) if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(args[place])
        name, members = self._describe(group)
        num_bytes = max(sum(map(_bytes, _tensors(each))) for each in args[:place])
        self.calls.append(CollectiveCall(COLLECTIVES[op], name, members, num_bytes))

    def _describe(self, group: Any) -> tuple[str, tuple[int, ...]]:
        key = str(group.group_name)
        if key not in self._groups:
            members = tuple(sorted(dist.get_process_group_ranks(group)))
            self._groups[key] = (_name(group, members), members)
        return self._groups[key]


def totals(calls: Sequence[CollectiveCall], ranks_per_node: int) -> list[CollectiveTotal]:
    """Return calls summed by kind and group, most bytes first.

    Groups of one rank are left out: nothing is sent there.

    Args:
        calls: What a rank issued.
        ranks_per_node: Ranks on each node; ranks fill nodes one after another.
    """
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sums: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for call in calls:
        if len(call.members) > 1:
            key = (call.kind, call.group, call.members)
            counts[key] += 1
            sums[key] += call.num_bytes
    rows = [
        CollectiveTotal(
            kind,
            group,
            len(members),
            spread_of(members, ranks_per_node).nodes,
            counts[kind, group, members],
            sums[kind, group, members],
        )
        for kind, group, members in counts
    ]
    return sorted(rows, key=lambda row: (-row.num_bytes, row.kind, row.group))


def _name(group: Any, members: tuple[int, ...]) -> str:
    """Return our name of a group: that of the same Megatron group, or of one with its members."""
    if group is dist.group.WORLD:
        return "world"
    known = {name: get() for name, get in MEGATRON_GROUPS.items()}
    for name, other in known.items():
        if other is not None and other.group_name == group.group_name:
            return name
    for name, other in known.items():
        if other is not None and tuple(sorted(dist.get_process_group_ranks(other))) == members:
            return name
    return str(group.group_desc).lower()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tensor, a list of them, or a list of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
