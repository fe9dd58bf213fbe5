"""Over how many nodes groups are spread, and expert groups cut at the edges of nodes."""

import pytest

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import expert_node_groups, group_spread, node_of, spread_of


def test_ranks_fill_nodes_one_after_another():
    assert [node_of(rank, 4) for rank in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert spread_of([0, 3, 4, 7], 4).nodes == 2


def test_without_nodes_of_a_leaf_all_nodes_are_under_one():
    assert spread_of(range(32), 4).leaves == 1
    assert spread_of(range(32), 4, 3).leaves == 3


def test_spreads_are_those_of_the_groups_themselves():
    layout = Layout(96, tp=2, ep=8, etp=2, pp=3)
    for axes, name in ((("tp",), "tp"), (("etp", "ep"), "etp_ep"), (("dp", "cp"), "dp_cp")):
        direct = spread_of(layout.group(name, 0), 8, 2)
        assert group_spread(layout, axes, 8, 2) == direct
    spread = group_spread(layout, ("etp", "ep"), 8, 2)
    assert (spread.members, spread.per_node, spread.nodes, spread.leaves) == (16, 8, 2, 1)
    # With whole experts beside tensor-parallel pairs, the eight ranks of a group are neighbours.
    near = group_spread(Layout(96, tp=2, ep=8, etp=1), ("ep",), 8, 2)
    assert near.nodes == 1
    far = group_spread(layout, ("pp",), 8, 2)
    assert (far.nodes, far.leaves) == (3, 3)


def test_an_expert_group_over_two_nodes_is_cut_into_rows_and_columns():
    cut = expert_node_groups(Layout(8, ep=8), ranks_per_node=4)
    assert cut.inside == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut.across == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_expert_groups_that_stride_over_nodes_meet_only_across():
    # ETP 4 fills a node of 4, so that no two members of an expert group share one.
    cut = expert_node_groups(Layout(16, tp=4, ep=4), ranks_per_node=4)
    assert cut.inside == [[rank] for group in Layout(16, tp=4, ep=4).groups("ep") for rank in group]
    assert cut.across == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_expert_groups_inside_one_node_meet_only_inside():
    cut = expert_node_groups(Layout(8, ep=2), ranks_per_node=4)
    assert cut.inside == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.across == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    ("layout", "per_node"),
    [
        (Layout(32, ep=16), 8),
        (Layout(32, tp=2, ep=8, pp=2), 4),
        (Layout(48, tp=2, ep=12, etp=1, pp=2), 6),
        (Layout(6, ep=6), 8),
    ],
)
def test_every_rank_is_in_one_group_of_each_kind_and_their_product_is_its_expert_group(
    layout, per_node
):
    cut = expert_node_groups(layout, per_node)
    for groups in (cut.inside, cut.across):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for rank in range(layout.world_size):
        row = next(group for group in cut.inside if rank in group)
        columns = [next(group for group in cut.across if member in group) for member in row]
        assert sorted(rank for column in columns for rank in column) == layout.group("ep", rank)


def test_an_expert_group_that_nodes_cut_unevenly_is_refused():
    with pytest.raises(
        LayoutError,
        match=r"from rank 0 to 5 has 4 on node 0, 2 on node 1 \(4 ranks a node\)\. Set "
        r"--expert-model-parallel-size",
    ):
        expert_node_groups(Layout(12, ep=6), ranks_per_node=4)


def test_a_node_holds_at_least_one_rank():
    with pytest.raises(LayoutError, match=r"at least 1 rank, .* is 0\. .*LOCAL_WORLD_SIZE"):
        expert_node_groups(Layout(4, ep=4), ranks_per_node=0)
