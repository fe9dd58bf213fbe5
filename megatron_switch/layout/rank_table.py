"""The rank table as text: the coordinates of each rank, and the experts that it holds.

Start-up prints :func:`start_up_text`, the run folder keeps :func:`table_as_csv`. Everything here
is a pure function from a layout to a string.
"""

import csv
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import node_of, spread_of

_COLUMNS = ("rank", "node", "tp", "cp", "pp", "dp", "etp", "ep", "edp", "experts")
_AXES = ("tp", "cp", "pp", "dp", "etp", "ep", "edp")
_ROWS_AT_START = 8
_MEMBERS_SHOWN = 8
_WIDE = 200  # columns, so that no row is wrapped


def start_up_text(
    layout: Layout,
    *,
    num_experts: int | None,
    ranks_per_node: int,
    nodes_per_leaf: int | None = None,
) -> str:
    """Return what start-up prints: the first rows, a line per axis, and where experts live.

    Args:
        layout: The ranks.
        num_experts: Experts of an MoE layer; None for a dense model.
        ranks_per_node: Ranks on each node.
        nodes_per_leaf: Nodes under each leaf switch, where they are known.
    """
    shown = min(_ROWS_AT_START, layout.world_size)
    rows = _rows(layout, num_experts, ranks_per_node, shown)
    text = _table_text(_COLUMNS, rows)
    if shown < layout.world_size:
        text += f"\n... and {layout.world_size - shown} more ranks"
    axes = axis_summary(layout, ranks_per_node, nodes_per_leaf)
    return "\n\n".join((text, axes, describe_experts(layout, num_experts)))


def table_as_csv(
    layout: Layout, *, num_experts: int | None, ranks_per_node: int, hosts: Sequence[str]
) -> str:
    """Return the table of all ranks as comma-separated values with a header.

    Args:
        layout: The ranks.
        num_experts: Experts of an MoE layer; None for a dense model.
        ranks_per_node: Ranks on each node.
        hosts: The host of each rank.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_COLUMNS, "host"])
    rows = _rows(layout, num_experts, ranks_per_node, layout.world_size)
    writer.writerows([*row, host] for row, host in zip(rows, hosts, strict=True))
    return buffer.getvalue()


def axis_summary(layout: Layout, ranks_per_node: int, nodes_per_leaf: int | None = None) -> str:
    """Return a line per axis: its size, nodes (and leaves) spanned, members of its first group."""
    leaves = [] if nodes_per_leaf is None else ["leaves"]
    columns = ["axis", "size", "groups", "nodes", *leaves, "first group"]
    rows = []
    for axis in _AXES:
        groups = layout.groups(axis)
        spreads = [spread_of(group, ranks_per_node, nodes_per_leaf) for group in groups]
        spans = [_range({spread.nodes for spread in spreads})]
        if nodes_per_leaf is not None:
            spans.append(_range({spread.leaves for spread in spreads}))
        size = str(len(groups[0]))
        rows.append([axis.upper(), size, str(len(groups)), *spans, _members(groups[0])])
    return _table_text(columns, rows)


def _range(counts: set[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(max(counts))


def describe_experts(layout: Layout, num_experts: int | None) -> str:
    """Return in words whether ETP equals TP or 1, and what that means for where experts live."""
    if num_experts is None:
        return "No experts: every layer is dense."
    held = len(layout.experts_of(0, num_experts))
    replicas = (
        f"each is held {layout.edp} times (EDP {layout.edp})"
        if layout.edp > 1
        else "no expert is held twice (EDP 1)"
    )
    spread = f"{num_experts} experts over EP {layout.ep}, {held} on a rank; {replicas}."
    return f"{_expert_cut(layout)}\n{spread}"


def _expert_cut(layout: Layout) -> str:
    tp, etp = layout.tp, layout.etp
    if etp == 1 and tp == 1:
        return "ETP = TP = 1: every expert lives whole on one rank."
    if etp == 1:
        return (
            f"ETP = 1 with TP = {tp}: every expert lives whole on one rank. Dense layers are cut "
            f"over {tp} ranks, experts are not, and the expert-parallel group of rank 0 is "
            f"{_members(layout.group('ep', 0))}."
        )
    stride = layout.expert.strides["etp"]
    where = "neighbouring ranks" if stride == 1 else f"ranks {stride} apart"
    cut = (
        f"every expert is cut into {etp} parts, which live on {where}; "
        f"rank 0's experts are on {_members(layout.group('etp', 0))}."
    )
    if etp == tp:
        return f"ETP = TP = {tp}: {cut} Dense layers are cut over the same number of ranks."
    return f"ETP = {etp} with TP = {tp}: {cut} Dense layers are cut over {tp} ranks."


def _rows(
    layout: Layout, num_experts: int | None, ranks_per_node: int, count: int
) -> list[list[str]]:
    rows = []
    for rank in range(count):
        at = layout.coordinates(rank)
        places = [str(getattr(at, axis)) for axis in _AXES]
        node = str(node_of(rank, ranks_per_node))
        rows.append([str(rank), node, *places, _experts(layout, rank, num_experts)])
    return rows


def _experts(layout: Layout, rank: int, num_experts: int | None) -> str:
    if num_experts is None:
        return "-"
    held = layout.experts_of(rank, num_experts)
    span = str(held[0]) if len(held) == 1 else f"{held[0]}-{held[-1]}"
    if layout.etp == 1:
        return span
    return f"{span} part {layout.coordinates(rank).etp + 1}/{layout.etp}"


def _members(ranks: list[int]) -> str:
    """Return ranks as words, the middle of a long list left out."""
    if len(ranks) <= _MEMBERS_SHOWN:
        return f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}"


def _table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text; numbers to the right, the last column to the left."""
    table = Table(box=None, pad_edge=False)
    for name in columns[:-1]:
        table.add_column(name, justify="right")
    table.add_column(columns[-1])
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=_WIDE)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
