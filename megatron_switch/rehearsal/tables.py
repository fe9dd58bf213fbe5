"""A rehearsal as text: parameters, memory, groups and collectives of each rank, in tables."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_switch.rehearsal.report import RankReport
from megatron_switch.utils.units import gigabytes

_MB = 10**6
_TERA = 10**12
_SHOWN = 4  # members of a group, before the last

CAVEAT = (
    "Memory is the sum of live tensor storages at the peak of a step: without CUDA context, "
    "communicators and fragmentation. Kernels are torch's for the CPU; core attention keeps "
    "what a fused kernel keeps. Transformer Engine's and Apex's kernels are not rehearsed."
)


def show(reports: Sequence[RankReport], console: Console) -> None:
    """Print the reports, memory side by side, and how the numbers are counted."""
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        console.print(note, highlight=False)
    console.print(_memory(reports))
    for report in reports:
        console.print(_head(report), highlight=False)
        console.print(_groups(report))
        console.print(_collectives(report))
    console.print(CAVEAT, highlight=False)


def _head(report: RankReport) -> str:
    place = ", ".join(f"{axis} {at}" for axis, at in report.coordinates.items())
    experts = ""
    if report.experts is not None:
        first, last = report.experts
        experts = f"; experts {first} to {last}" if last > first else f"; expert {first}"
    return f"Rank {report.rank}: {place}{experts}"


def _memory(reports: Sequence[RankReport]) -> Table:
    table = _table("", *(f"rank {report.rank}" for report in reports))
    for part in ("dense", "expert"):
        table.add_row(f"{part} parameters", *(f"{r.parameters[part]:,}" for r in reports))
    for name in ("forward", "backward"):
        flops = [getattr(report, f"{name}_flops") / _TERA for report in reports]
        table.add_row(f"{name} TFLOP a step", *(f"{each:,.3f}" for each in flops))
    table.add_section()
    for kind in reports[0].peak_bytes:
        sizes = [report.peak_bytes[kind] for report in reports]
        if any(sizes):
            table.add_row(f"GB {kind}", *(gigabytes(size, 3) for size in sizes))
    table.add_section()
    table.add_row("GB at the peak", *(gigabytes(report.peak, 3) for report in reports))
    if any(report.host_bytes for report in reports):
        table.add_row("GB on the host", *(gigabytes(report.host_bytes, 3) for report in reports))
    return table


def _groups(report: RankReport) -> Table:
    table = _table("group", "ranks", "members", last_left=True)
    for name, members in report.groups.items():
        if len(members) > 1:
            table.add_row(name, str(len(members)), _members(members))
    return table


def _collectives(report: RankReport) -> Table:
    table = _table("collective", "group", "ranks", "nodes", "calls", "MB a step")
    for row in report.collectives:
        where = "inside 1" if row.num_nodes == 1 else f"across {row.num_nodes}"
        table.add_row(
            row.kind,
            row.group,
            str(row.num_members),
            where,
            f"{row.count:,}",
            f"{row.num_bytes / _MB:,.3f}",
        )
    return table


def _table(*headers: str, last_left: bool = False) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for place, header in enumerate(headers):
        left = place == 0 or header in ("group", "nodes") or (last_left and header == headers[-1])
        table.add_column(header, justify="left" if left else "right", no_wrap=True)
    return table


def _members(members: Sequence[int]) -> str:
    if len(members) <= _SHOWN + 1:
        return ", ".join(map(str, members))
    return f"{', '.join(map(str, members[:_SHOWN]))}, ... {members[-1]}"
