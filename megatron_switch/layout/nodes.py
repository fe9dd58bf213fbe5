"""Which node a rank is on, and expert groups cut at the edges of nodes.

Ranks fill nodes one after another (SLURM's block distribution, torchrun's node rank), so that
node = rank // ranks per node.

An expert-parallel group that spans nodes is a rectangle, nodes x ranks inside a node. Its
*inside-node* groups are the rows, its *across-node* groups the columns: an all-to-all over the
whole group is one over a row followed by one over a column, which sends fewer and larger
messages between nodes. A group that is no rectangle (a different number of members on each
node) is refused.
"""

from dataclasses import dataclass

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import FLAGS


@dataclass(frozen=True)
class NodeGroups:
    """Expert-parallel groups cut at the edges of nodes.

    Attributes:
        inside: Groups whose members share a node, each a list of ascending ranks.
        across: Groups with one member on each node of an expert-parallel group.
    """

    inside: list[list[int]]
    across: list[list[int]]


def node_of(rank: int, ranks_per_node: int) -> int:
    """Return the node, counted from 0, on which ``rank`` runs."""
    return rank // ranks_per_node


def nodes_spanned(ranks: list[int], ranks_per_node: int) -> int:
    """Return on how many nodes ``ranks`` run."""
    return len({node_of(rank, ranks_per_node) for rank in ranks})


def expert_node_groups(layout: Layout, ranks_per_node: int) -> NodeGroups:
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
        across += [list(column) for column in zip(*rows, strict=True)]
    return NodeGroups(inside, across)


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
