"""The order of nodes in which as many expert groups as can be stay under one leaf switch.

Ranks fill nodes in the order in which the launcher lists them, so that placement is an order of
nodes. An expert group takes a block of consecutive nodes. Blocks are cut out of leaves whole, the
fullest leaf first; what is left of the leaves makes blocks that span several, last. Which experts a
rank holds follows from its place in the block (Megatron deals them out in order), so that moving
nodes moves experts.

Leaves come from a SLURM ``topology.conf``; lines of switches above the leaves are skipped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.errors import ConfigError

_LEAF = re.compile(r"^\s*SwitchName=(\S+)\s+.*?\bNodes=(\S+)", re.IGNORECASE)
_BRACKETS = re.compile(r"^(.*?)\[([0-9,\-]+)\](.*)$")


@dataclass(frozen=True)
class NodeOrder:
    """Nodes in the order in which ranks should fill them.

    Attributes:
        nodes: Names, first to last.
        whole: Blocks that stay under one leaf.
        blocks: Blocks in all.
    """

    nodes: tuple[str, ...]
    whole: int
    blocks: int


def order_nodes(leaf_of: Mapping[str, str], nodes_per_block: int) -> NodeOrder:
    """Return an order in which blocks of nodes stay under one leaf where they can.

    Args:
        leaf_of: Leaf switch of each node, in the order in which nodes are listed now.
        nodes_per_block: Nodes of an expert group.

    Raises:
        ConfigError: If the nodes are no multiple of a block.
    """
    if nodes_per_block < 1 or len(leaf_of) % nodes_per_block:
        raise ConfigError(
            f"Expert groups of {nodes_per_block} nodes do not divide {len(leaf_of)} nodes. Change "
            "--expert-model-parallel-size or the number of nodes."
        )
    leaves: dict[str, list[str]] = {}
    for node, leaf in leaf_of.items():
        leaves.setdefault(leaf, []).append(node)
    ordered: list[str] = []
    rest: list[str] = []
    # Whole blocks of each leaf first; what is left of the leaves, side by side, makes the blocks
    # that span leaves. Full leaves come first, so that these blocks span few.
    for nodes in sorted(leaves.values(), key=len, reverse=True):
        whole = len(nodes) // nodes_per_block * nodes_per_block
        ordered += nodes[:whole]
        rest += nodes[whole:]
    blocks = len(leaf_of) // nodes_per_block
    return NodeOrder((*ordered, *rest), _whole((*ordered, *rest), leaf_of, nodes_per_block), blocks)


def whole_blocks(leaf_of: Mapping[str, str], nodes_per_block: int) -> int:
    """Return how many blocks stay under one leaf in the order in which nodes are listed now."""
    return _whole(tuple(leaf_of), leaf_of, nodes_per_block)


def read_topology(path: Path) -> dict[str, str]:
    """Return the leaf switch of each node in a SLURM ``topology.conf``.

    Raises:
        ConfigError: If the file cannot be read, names no leaf, or a node twice; with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--topology reads SLURM's topology.conf, and {path} cannot be: {error}."
        ) from error
    leaf_of: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _LEAF.match(line.split("#", 1)[0])
        if found is None:
            continue
        for node in expand_hosts(found[2], f"{path}, line {number}"):
            if node in leaf_of:
                raise ConfigError(
                    f"{path}, line {number}: node {node} is under {found[1]} and {leaf_of[node]}."
                )
            leaf_of[node] = found[1]
    if not leaf_of:
        raise ConfigError(
            f"{path} names no leaf switch: expected lines such as 'SwitchName=leaf1 "
            "Nodes=node[01-20]'."
        )
    return leaf_of


def expand_hosts(hosts: str, where: str) -> list[str]:
    """Return the names that a host list such as ``a,node[01-03,07]`` stands for.

    Raises:
        ConfigError: If a range in it is none; the message begins with ``where``.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", hosts):
        brackets = _BRACKETS.match(part)
        if brackets is None:
            if "[" in part or "]" in part:
                raise ConfigError(f"{where}: '{part}' is no host list such as node[01-20].")
            names.append(part)
            continue
        names += [f"{brackets[1]}{n}{brackets[3]}" for n in _numbers(brackets[2], where)]
    return names


def _numbers(ranges: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not first.isdigit() or not last.isdigit() or int(last) < int(first):
            raise ConfigError(f"{where}: '{part}' is no range of numbers such as 01-20.")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _whole(nodes: Sequence[str], leaf_of: Mapping[str, str], nodes_per_block: int) -> int:
    starts = range(0, len(nodes), nodes_per_block)
    blocks = (nodes[start : start + nodes_per_block] for start in starts)
    return sum(len({leaf_of[node] for node in block}) == 1 for block in blocks)
