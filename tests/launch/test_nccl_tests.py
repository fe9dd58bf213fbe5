"""The splits of nccl-tests form exactly the groups of the layout."""

import pytest

from megatron_switch.launch.nccl_tests import group_tests, split_of, untestable_axes
from megatron_switch.layout.grid import Layout

AXES = ("tp", "cp", "dp", "pp", "ep", "edp")
LAYOUTS = [
    Layout(8, ep=8),
    Layout(32, tp=2, ep=8, etp=1, pp=2),
    Layout(64, tp=4, ep=8, pp=2, etp=2, cp=2),
    Layout(1024, tp=8, pp=8, ep=64, etp=1),
    Layout(24, tp=2, ep=4, etp=1, pp=3),
]


def colours(split: str, ranks: int) -> list[int]:
    """What nccl-tests makes of a split: ranks of one colour are a group."""
    operation, value = split.split()
    number = int(value, 0)
    of_rank = {
        "DIV": lambda r: r // number,
        "MOD": lambda r: r % number,
        "AND": lambda r: r & number,
    }
    return [of_rank[operation](rank) for rank in range(ranks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_ranks_of_one_colour_are_a_group_of_the_layout(layout, axis):
    split = split_of(layout, axis)
    if not split:
        assert axis in untestable_axes(layout)
        return
    groups: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours(split, layout.world_size)):
        groups.setdefault(colour, []).append(rank)
    assert sorted(groups.values()) == sorted(layout.groups(axis))


def test_only_an_odd_axis_in_the_middle_is_untestable_axes():
    assert untestable_axes(Layout(24, tp=2, ep=4, etp=1, pp=2)) == ["dp", "edp"]
    assert all(untestable_axes(layout) == [] for layout in LAYOUTS[:4])


def test_each_axis_is_tested_with_what_training_does_along_it():
    found = {(test.axis, test.program) for test in group_tests(LAYOUTS[1])}
    assert ("ep", "alltoall_perf") in found
    assert ("pp", "sendrecv_perf") in found
    assert {axis for axis, _ in found} == {"tp", "dp", "pp", "ep", "edp"}
