"""Over how many nodes and leaf switches a group of ranks is spread.

Ranks fill nodes one after another, and nodes fill leaves in the order in which the launcher lists
them (:mod:`megatron_switch.planner.hardware.node_order` puts them into an order in which groups
stay under one leaf). So node = rank // ranks of a node and leaf = node // nodes of a leaf.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_switch.layout.grid import Grid, Layout


@dataclass(frozen=True)
class Spread:
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


def spread_of(ranks: Sequence[int], ranks_per_node: int, nodes_per_leaf: int) -> Spread:
    """Return where ``ranks`` run."""
    nodes: dict[int, int] = {}
    for rank in ranks:
        node = rank // ranks_per_node
        nodes[node] = nodes.get(node, 0) + 1
    leaves = {node // nodes_per_leaf for node in nodes}
    return Spread(len(ranks), max(nodes.values(), default=0), len(nodes), len(leaves))


def group_spread(
    layout: Layout, axes: tuple[str, ...], ranks_per_node: int, nodes_per_leaf: int
) -> Spread:
    """Return where the group of rank 0 along ``axes`` runs.

    Args:
        layout: The ranks.
        axes: Axes of the dense grid, or of the expert grid where one of them is ``etp``, ``ep`` or
            ``edp``.
        ranks_per_node: Ranks on each node.
        nodes_per_leaf: Nodes under each leaf switch.
    """
    grid: Grid = layout.expert if {"etp", "ep", "edp"} & set(axes) else layout.dense
    steps = tuple((grid.strides[axis], grid.sizes[axis]) for axis in grid.sizes if axis in axes)
    return _spread_of_steps(steps, ranks_per_node, nodes_per_leaf)


@lru_cache(maxsize=16384)
def _spread_of_steps(
    steps: tuple[tuple[int, int], ...], ranks_per_node: int, nodes_per_leaf: int
) -> Spread:
    ranks = [0]
    for stride, size in steps:
        ranks = [place * stride + low for place in range(size) for low in ranks]
    return spread_of(ranks, ranks_per_node, nodes_per_leaf)
