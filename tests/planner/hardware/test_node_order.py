"""Nodes ordered so that expert groups stay under one leaf switch."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.planner.hardware.node_order import (
    expand_hosts,
    order_nodes,
    read_topology,
    whole_blocks,
)


def leaves(*sizes):
    return {f"n{leaf}-{i}": f"leaf{leaf}" for leaf, size in enumerate(sizes) for i in range(size)}


def test_as_many_blocks_as_fit_stay_under_a_leaf():
    leaf_of = leaves(5, 5, 6)
    assert whole_blocks(leaf_of, 4) == 2  # n0-0..3, and the last four of the third leaf
    placement = order_nodes(leaf_of, 4)
    assert (placement.whole, placement.blocks) == (3, 4)
    assert sorted(placement.nodes) == sorted(leaf_of)
    blocks = [placement.nodes[i : i + 4] for i in range(0, 16, 4)]
    assert [len({leaf_of[node] for node in block}) for block in blocks] == [1, 1, 1, 3]


def test_an_order_that_is_good_already_is_no_worse():
    leaf_of = leaves(4, 8)
    assert whole_blocks(leaf_of, 4) == 3
    assert order_nodes(leaf_of, 4).whole == 3


@pytest.mark.parametrize("size", [0, 5])
def test_blocks_that_do_not_divide_the_nodes(size):
    with pytest.raises(ConfigError, match=rf"groups of {size} nodes do not divide 12 nodes"):
        order_nodes(leaves(4, 8), size)


def test_a_topology_file(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text(
        "# switches\n"
        "SwitchName=leaf1 Nodes=node[01-03],login LinkSpeed=400 # rack 1\n"
        "switchname=leaf2 nodes=node[04,06-07]\n"
        "SwitchName=spine Switches=leaf[1-2]\n"
    )
    assert read_topology(path) == {
        **dict.fromkeys(["node01", "node02", "node03", "login"], "leaf1"),
        **dict.fromkeys(["node04", "node06", "node07"], "leaf2"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Switches=b\n", r"names no leaf switch: expected lines such as"),
        ("SwitchName=a Nodes=n[3-1]\n", r"line 1: '3-1' is no range of numbers"),
        ("\nSwitchName=a Nodes=n[1\n", r"line 2: 'n\[1' is no host list"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n",
            r"line 2: node n1 is under b and a",
        ),
    ],
)
def test_a_malformed_topology_is_told_with_its_line(tmp_path, text, message):
    path = tmp_path / "topology.conf"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_topology(path)


def test_a_missing_topology(tmp_path):
    with pytest.raises(ConfigError, match=r"--topology reads SLURM's topology\.conf"):
        read_topology(tmp_path / "absent")


def test_host_lists_keep_leading_zeros():
    assert expand_hosts("a[08-11]-x,b,c[1,3]", "here") == [
        "a08-x", "a09-x", "a10-x", "a11-x", "b", "c1", "c3",
    ]  # fmt: skip
