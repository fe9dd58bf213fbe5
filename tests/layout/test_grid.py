"""Our rank arithmetic against Megatron's own generator, and its refusals."""

from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
)

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import DENSE_GROUPS, EXPERT_GROUPS, GROUP_NAMES, Layout
from megatron_switch.layout.grid_rules import broken_grid_rule
from megatron_switch.layout.sizes import DEFAULT_ORDER, TP_PP_DP_ORDER, Sizes

ORDERS = ["-".join(axes) for axes in permutations(DEFAULT_ORDER.split("-"))]


@st.composite
def sizes(draw, orders=(DEFAULT_ORDER, TP_PP_DP_ORDER)):
    """Draw sizes whose product covers all ranks, for orders that may still forbid them."""
    small = st.integers(1, 4)
    tp, cp, pp, ep, etp = (draw(small) for _ in range(5))
    replicas = draw(st.integers(1, 3))
    # A multiple of both products, so that only the rules about the order can refuse it.
    world_size = tp * cp * pp * ep * etp * replicas
    assume(world_size <= 128)
    return Sizes(
        world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=draw(st.sampled_from(orders))
    )


def generators(asked):
    """Return Megatron's generators of the dense and of the expert grid."""
    common = {"pp": asked.pp, "order": asked.order}
    dense = RankGenerator(tp=asked.tp, ep=1, dp=asked.dp, cp=asked.cp, **common)
    expert = RankGenerator(tp=asked.etp, ep=asked.ep, dp=asked.edp, cp=1, **common)
    return dense, expert


@given(sizes())
@settings(max_examples=100, deadline=None)
def test_every_group_equals_megatrons(asked):
    assume(broken_grid_rule(asked) is None)
    layout = Layout.of(asked)
    dense, expert = generators(asked)
    for name, axes in DENSE_GROUPS.items():
        assert layout.groups(name) == dense.get_ranks("-".join(axes)), name
    for name, axes in EXPERT_GROUPS.items():
        token = "-".join(axes).replace("etp", "tp").replace("edp", "dp")
        assert layout.groups(name) == expert.get_ranks(token), name
    pipelines = dense.get_ranks("pp")
    assert layout.groups("embedding") == [default_embedding_ranks(p) for p in pipelines]
    assert layout.groups("position_embedding") == [
        default_position_embedding_ranks(p) for p in pipelines
    ]


@given(sizes(orders=ORDERS))
@settings(max_examples=100, deadline=None)
def test_an_order_is_refused_exactly_where_megatron_refuses_it(asked):
    dense, expert = generators(asked)
    same_pipelines = dense.get_ranks("pp") == expert.get_ranks("pp")
    same_replicas = asked.order.endswith("pp") or asked.pp == 1 or asked.dp == asked.edp
    assert (broken_grid_rule(asked) is None) == (same_pipelines and same_replicas)


@given(sizes())
@settings(max_examples=50, deadline=None)
def test_one_group_of_one_rank_is_the_one_among_all_groups_that_holds_it(asked):
    assume(broken_grid_rule(asked) is None)
    layout = Layout.of(asked)
    for name in GROUP_NAMES:
        groups = layout.groups(name)
        for rank in range(layout.world_size):
            holding = [ranks for ranks in groups if rank in ranks]
            assert layout.group(name, rank) == (holding[0] if holding else [])


@given(sizes())
@settings(max_examples=50, deadline=None)
def test_coordinates_lead_back_to_the_rank(asked):
    assume(broken_grid_rule(asked) is None)
    layout = Layout.of(asked)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.dense_rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert layout.expert_rank(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank


def test_ranks_that_hold_the_same_experts_are_the_expert_data_parallel_group():
    layout = Layout(48, tp=2, ep=3, pp=2, etp=1)
    for rank in range(48):
        same = [
            other
            for other in range(48)
            if layout.coordinates(other).pp == layout.coordinates(rank).pp
            and layout.experts_of(other, 12) == layout.experts_of(rank, 12)
        ]
        assert layout.group("edp", rank) == same


def test_16384_ranks_give_the_documented_placement():
    # 2,048 nodes of 8: TP fills a node, and with ETP 1 eight experts' ranks share it.
    layout = Layout(16384, tp=8, pp=8, ep=64, etp=1)
    assert layout.group("tp", 12345) == list(range(12344, 12352))
    assert layout.group("ep", 12345) == list(range(12288, 12352))
    assert layout.group("edp", 12345) == list(range(12288 + 57, 14336, 64))
    assert layout.group("pp", 12345) == [57 + 2048 * stage for stage in range(8)]
    assert layout.experts_of(12345, 128) == range(114, 116)


def test_expert_tensor_parallelism_takes_the_fast_links_from_expert_parallelism():
    layout = Layout(1024, tp=8, pp=8, ep=8, etp=8)
    assert layout.group("ep", 0) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert layout.group("etp", 0) == list(range(8))


def test_layouts_are_values():
    assert Layout(8, tp=2) == Layout(8, tp=2, etp=2)
    assert hash(Layout(8, tp=2)) == hash(Layout(8, tp=2, etp=2))
    assert Layout(8, tp=2) != Layout(8, tp=2, etp=1)
    with pytest.raises(AttributeError):
        Layout(8).tp = 2


def test_a_layout_that_covers_no_grid_is_refused():
    with pytest.raises(LayoutError, match=r"12 ranks cannot form the expert grid: .* = 8 does not"):
        Layout(12, ep=8)


def test_an_uneven_split_of_experts_names_the_sizes_that_work():
    with pytest.raises(
        LayoutError,
        match=r"64 experts .* 12 .*\(4 would be left over\).*--expert-model-parallel-size must be "
        r"one of \[1, 2, 4, 8, 16, 32, 64\]",
    ):
        Layout(12, ep=12).experts_of(0, 64)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_layout_is_refused(rank):
    with pytest.raises(LayoutError, match=rf"Rank {rank} is not in this layout: .* 0 to 7"):
        Layout(8).coordinates(rank)


def test_an_unknown_group_is_refused():
    for ask in (lambda: Layout(8).group("tensor", 0), lambda: Layout(8).groups("tensor")):
        with pytest.raises(LayoutError, match=r"no group called 'tensor'; groups are tp, cp, dp"):
            ask()


def test_a_name_leaves_out_context_parallelism_and_virtual_stages_of_1():
    assert Layout(8, ep=8).name == "TP1 PP1 EP8 ETP1"
    assert Layout(8, pp=2, cp=2, vp=3, ep=2).name == "TP1 PP2 VP3 CP2 EP2 ETP1"
