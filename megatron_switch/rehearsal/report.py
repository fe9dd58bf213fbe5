"""The report of a rehearsed rank, as plain values that are passed between processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from megatron_switch import parallel_state
from megatron_switch.layout.grid import GROUP_NAMES
from megatron_switch.rehearsal.collective_trace import CollectiveCall, CollectiveTotal, totals
from megatron_switch.rehearsal.observer import Observation

SCHEMA = "megatron-switch/rehearsal/1"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank.

    Attributes:
        rank: Its number.
        coordinates: Its coordinates on the dense and the expert grid.
        groups: Members of each of its groups, by our name, this rank among them.
        experts: First and last of the experts that it holds in a sparse layer; None without any.
        parameters: Number of parameters, by kind.
        state_bytes: Bytes that outlive a step, by kind.
        peak_bytes: Bytes at the peak of a step, by kind.
        host_bytes: Most bytes of what was moved to the host.
        forward_flops: Operations of matrix products in forward passes of a step.
        backward_flops: The same in backward passes.
        collectives: Calls of a step, by kind and group.
        calls: The same one by one, in order.
        notes: What the session printed about the flags.
    """

    rank: int
    coordinates: Mapping[str, int]
    groups: Mapping[str, Sequence[int]]
    experts: tuple[int, int] | None
    parameters: Mapping[str, int]
    state_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    host_bytes: int
    forward_flops: int
    backward_flops: int
    collectives: Sequence[CollectiveTotal]
    calls: Sequence[CollectiveCall]
    notes: Sequence[str]

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak_bytes.values())


def rank_report(
    observation: Observation,
    *,
    ranks_per_node: int,
    num_experts: int | None,
    notes: Sequence[str] = (),
) -> RankReport:
    """Return the report of this rank; its groups exist.

    Args:
        observation: Of its step.
        ranks_per_node: Ranks on each node.
        num_experts: Experts of a sparse layer; None for a dense model.
        notes: What the session printed about the flags.
    """
    layout, rank = parallel_state.get_layout(), dist.get_rank()
    members = {name: layout.group(name, rank) for name in GROUP_NAMES}
    held = None if num_experts is None else layout.experts_of(rank, num_experts)
    return RankReport(
        rank=rank,
        coordinates=asdict(layout.coordinates(rank)),
        groups={name: ranks for name, ranks in members.items() if ranks},
        experts=None if held is None else (held[0], held[-1]),
        parameters=observation.parameters,
        state_bytes=observation.state,
        peak_bytes=observation.peak.by_kind,
        host_bytes=observation.peak.host,
        forward_flops=observation.forward_flops,
        backward_flops=observation.backward_flops,
        collectives=totals(observation.calls, ranks_per_node),
        calls=observation.calls,
        notes=tuple(notes),
    )


def as_json(
    reports: Sequence[RankReport], *, world_size: int, ranks_per_node: int, flags: Sequence[str]
) -> dict[str, Any]:
    """Return a rehearsal as JSON values; every size is in bytes.

    Args:
        reports: The ranks that were rehearsed.
        world_size: Ranks of the launch.
        ranks_per_node: Ranks on each node.
        flags: Flags of the launch.
    """
    ranks = []
    for report in reports:
        values = asdict(report)
        del values["calls"]  # only for comparisons
        ranks.append(values | {"total_peak_bytes": report.peak})
    return {
        "schema": SCHEMA,
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "flags": list(flags),
        "ranks": ranks,
    }
