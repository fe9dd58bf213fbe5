"""Nodes and leaf switches of ranks: how far a group is spread, and expert groups cut by node.

Ranks fill nodes one after another (SLURM's block distribution, torchrun's node rank), and nodes
fill leaf switches in the order in which the launcher lists them
(:mod:`megatron_switch.planner.hardware.node_order` finds an order in which groups stay under one
leaf). So node = rank // ranks of a node, and leaf = node // nodes of a leaf.

An expert-parallel group that spans nodes is a rectangle, nodes x ranks inside a node. Its
*inside-node* groups are the rows, its *across-node* groups the columns: an all-to-all over the
whole group is one over a row followed by one over a column, which sends fewer and larger messages
between nodes. A group that is no rectangle (a different number of members on each node) is refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import FLAGS


@dataclass(frozen=True)
class GroupSpread:
    """Where the members of a group run.

    Attributes:
        members: Ranks in the group.
        per_node: Most members on one node.
        nodes: Nodes with a member.
        leaves: Leaf switches with a member.
    """

    members: int
    per_node: int
    nodes: int
    leaves: int


@dataclass(frozen=True)
class NodeExpertGroups[Group]:
    """The expert-parallel group cut at the edges of nodes; the two parts' product is that group.

    Attributes:
        inside: Ranks of the expert-parallel group that share a node.
        across: One rank of the expert-parallel group on each of its nodes.
    """

    inside: Group
    across: Group


def node_of(rank: int, ranks_per_node: int) -> int:
    """Return the node, counted from 0, on which ``rank`` runs."""
    return rank // ranks_per_node


def spread_of(
    ranks: Sequence[int], ranks_per_node: int, nodes_per_leaf: int | None = None
) -> GroupSpread:
    """Return where ``ranks`` run.

    Args:
        ranks: Members of the group.
        ranks_per_node: Ranks on each node.
        nodes_per_leaf: Nodes under each leaf switch; None counts all nodes as under one.
    """
    on_node = Counter(node_of(rank, ranks_per_node) for rank in ranks)
    leaves = {0 if nodes_per_leaf is None else node // nodes_per_leaf for node in on_node}
    return GroupSpread(len(ranks), max(on_node.values(), default=0), len(on_node), len(leaves))


def group_spread(
    layout: Layout, axes: tuple[str, ...], ranks_per_node: int, nodes_per_leaf: int
) -> GroupSpread:
    """Return where the group of rank 0 along ``axes`` runs.

    Args:
        layout: The ranks.
        axes: Axes of the dense grid, or of the expert grid where one of them is ``etp``, ``ep`` or
            ``edp``.
        ranks_per_node: Ranks on each node.
        nodes_per_leaf: Nodes under each leaf switch.
    """
    grid = layout.expert if {"etp", "ep", "edp"} & set(axes) else layout.dense
    steps = tuple((grid.strides[axis], grid.sizes[axis]) for axis in grid.sizes if axis in axes)
    return _spread_of_steps(steps, ranks_per_node, nodes_per_leaf)


@lru_cache(maxsize=16384)  # layouts of one plan have few different groups
def _spread_of_steps(
    steps: tuple[tuple[int, int], ...], ranks_per_node: int, nodes_per_leaf: int
) -> GroupSpread:
    ranks = [0]
    for stride, size in steps:
        ranks = [place * stride + low for place in range(size) for low in ranks]
    return spread_of(ranks, ranks_per_node, nodes_per_leaf)


def expert_node_groups(layout: Layout, ranks_per_node: int) -> NodeExpertGroups[list[list[int]]]:
    """Cut every expert-parallel group of ``layout`` at the edges of nodes.

    Args:
        layout: The ranks.
        ranks_per_node: Ranks on each node; the last node may hold fewer.

    Returns:
        Groups in an order that is the same on every rank. Each rank is in one group of each kind.

    Raises:
        LayoutError: If an expert-parallel group has different numbers of ranks on its nodes.
    """
    if ranks_per_node < 1:
        raise LayoutError(
            f"A node holds at least 1 rank, but ranks per node is {ranks_per_node}. "
            "Set it to the number of processes started on each node (LOCAL_WORLD_SIZE)."
        )
    inside: list[list[int]] = []
    across: list[list[int]] = []
    for group in layout.groups("ep"):
        rows = _rows(group, ranks_per_node)
        inside += rows
        across += [list(column) for column in zip(*rows, strict=True)]  # the transpose
    return NodeExpertGroups(inside, across)


def _rows(group: list[int], ranks_per_node: int) -> list[list[int]]:
    """Return the members of ``group`` on each node, nodes ascending."""
    rows: dict[int, list[int]] = {}
    for rank in group:
        rows.setdefault(node_of(rank, ranks_per_node), []).append(rank)
    counts = {node: len(members) for node, members in rows.items()}
    if len(set(counts.values())) > 1:
        on_nodes = ", ".join(f"{count} on node {node}" for node, count in counts.items())
        raise LayoutError(
            "An expert-parallel group needs the same number of ranks on each of its nodes to be "
            f"cut there, but the group from rank {group[0]} to {group[-1]} has {on_nodes} "
            f"({ranks_per_node} ranks a node). Set {FLAGS['ep']} so that it and the ranks of a "
            "node divide one another."
        )
    return list(rows.values())
