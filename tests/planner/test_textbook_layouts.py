"""Every group, and the experts of every rank, of the layouts that papers and manuals draw.

Written out, not computed: this is what a reader compares with a picture. A key names all the
groups that have these members. "EP 8 with 64 experts" and the like are the usual one-node and
two-node settings of Switch and GShard style models.
"""

from dataclasses import dataclass

import pytest

from megatron_switch.layout.grid import GROUP_NAMES, Layout


@dataclass(frozen=True)
class Textbook:
    """A layout with everything that must be true of it."""

    layouts: list[Layout]
    num_experts: int
    groups: dict[str, list[list[int]]]
    experts: list[list[int]]


# fmt: off
TEXTBOOK = {
    "8 ranks, EP 8": Textbook(
        layouts=[Layout(8, ep=8), Layout(8, ep=8, etp=1)],
        num_experts=64,
        groups={
            "tp cp pp mp tp_cp etp edp embedding position_embedding": [
                [0], [1], [2], [3], [4], [5], [6], [7],
            ],
            "dp dp_cp tp_dp tp_dp_cp ep etp_ep etp_ep_pp": [[0, 1, 2, 3, 4, 5, 6, 7]],
        },
        experts=[
            [0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15],
            [16, 17, 18, 19, 20, 21, 22, 23], [24, 25, 26, 27, 28, 29, 30, 31],
            [32, 33, 34, 35, 36, 37, 38, 39], [40, 41, 42, 43, 44, 45, 46, 47],
            [48, 49, 50, 51, 52, 53, 54, 55], [56, 57, 58, 59, 60, 61, 62, 63],
        ],
    ),
    "4 ranks, EP 4": Textbook(
        layouts=[Layout(4, ep=4), Layout(4, ep=4, etp=1)],
        num_experts=8,
        groups={
            "tp cp pp mp tp_cp etp edp embedding position_embedding": [[0], [1], [2], [3]],
            "dp dp_cp tp_dp tp_dp_cp ep etp_ep etp_ep_pp": [[0, 1, 2, 3]],
        },
        experts=[
            [0, 1], [2, 3], [4, 5], [6, 7],
        ],
    ),
    "8 ranks, TP 2 x EP 2 x DP 2, ETP = TP": Textbook(
        layouts=[Layout(8, tp=2, ep=2)],
        num_experts=4,
        groups={
            "tp mp tp_cp etp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "cp pp embedding position_embedding": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "dp dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "tp_dp tp_dp_cp": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "etp_ep etp_ep_pp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
        experts=[
            [0, 1], [0, 1], [2, 3], [2, 3], [0, 1], [0, 1], [2, 3], [2, 3],
        ],
    ),
    "8 ranks, TP 2 x EP 2 x DP 2, ETP = 1": Textbook(
        layouts=[Layout(8, tp=2, ep=2, etp=1)],
        num_experts=4,
        groups={
            "tp mp tp_cp ep etp_ep etp_ep_pp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "cp pp etp embedding position_embedding": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "dp dp_cp edp": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "tp_dp tp_dp_cp": [[0, 1, 2, 3, 4, 5, 6, 7]],
        },
        experts=[
            [0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3],
        ],
    ),
    "16 ranks, TP 4 x EP 4, ETP = TP": Textbook(
        layouts=[Layout(16, tp=4, ep=4)],
        num_experts=8,
        groups={
            "tp mp tp_cp etp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
            "cp pp edp embedding position_embedding": [
                [0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], [13], [14],
                [15],
            ],
            "dp dp_cp ep": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            "tp_dp tp_dp_cp etp_ep etp_ep_pp": [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
            ],
        },
        experts=[
            [0, 1], [0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [2, 3], [4, 5], [4, 5],
            [4, 5], [4, 5], [6, 7], [6, 7], [6, 7], [6, 7],
        ],
    ),
    "16 ranks, TP 4 x EP 4, ETP = 1": Textbook(
        layouts=[Layout(16, tp=4, ep=4, etp=1)],
        num_experts=8,
        groups={
            "tp mp tp_cp ep etp_ep etp_ep_pp": [
                [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15],
            ],
            "cp pp etp embedding position_embedding": [
                [0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], [13], [14],
                [15],
            ],
            "dp dp_cp edp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            "tp_dp tp_dp_cp": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]],
        },
        experts=[
            [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3],
            [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7],
        ],
    ),
    "32 ranks, two replicas of TP 4 x EP 4, ETP = TP": Textbook(
        layouts=[Layout(32, tp=4, ep=4)],
        num_experts=8,
        groups={
            "tp mp tp_cp etp": [
                [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19],
                [20, 21, 22, 23], [24, 25, 26, 27], [28, 29, 30, 31],
            ],
            "cp pp embedding position_embedding": [
                [0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], [13], [14],
                [15], [16], [17], [18], [19], [20], [21], [22], [23], [24], [25], [26], [27],
                [28], [29], [30], [31],
            ],
            "dp dp_cp": [
                [0, 4, 8, 12, 16, 20, 24, 28], [1, 5, 9, 13, 17, 21, 25, 29],
                [2, 6, 10, 14, 18, 22, 26, 30], [3, 7, 11, 15, 19, 23, 27, 31],
            ],
            "tp_dp tp_dp_cp": [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31],
            ],
            "ep": [
                [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [16, 20, 24, 28],
                [17, 21, 25, 29], [18, 22, 26, 30], [19, 23, 27, 31],
            ],
            "edp": [
                [0, 16], [1, 17], [2, 18], [3, 19], [4, 20], [5, 21], [6, 22], [7, 23], [8, 24],
                [9, 25], [10, 26], [11, 27], [12, 28], [13, 29], [14, 30], [15, 31],
            ],
            "etp_ep etp_ep_pp": [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
                [16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31],
            ],
        },
        experts=[
            [0, 1], [0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [2, 3], [4, 5], [4, 5],
            [4, 5], [4, 5], [6, 7], [6, 7], [6, 7], [6, 7], [0, 1], [0, 1], [0, 1], [0, 1],
            [2, 3], [2, 3], [2, 3], [2, 3], [4, 5], [4, 5], [4, 5], [4, 5], [6, 7], [6, 7],
            [6, 7], [6, 7],
        ],
    ),
    "32 ranks, two replicas of TP 4 x EP 4, ETP = 1": Textbook(
        layouts=[Layout(32, tp=4, ep=4, etp=1)],
        num_experts=8,
        groups={
            "tp mp tp_cp ep etp_ep etp_ep_pp": [
                [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19],
                [20, 21, 22, 23], [24, 25, 26, 27], [28, 29, 30, 31],
            ],
            "cp pp etp embedding position_embedding": [
                [0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], [13], [14],
                [15], [16], [17], [18], [19], [20], [21], [22], [23], [24], [25], [26], [27],
                [28], [29], [30], [31],
            ],
            "dp dp_cp edp": [
                [0, 4, 8, 12, 16, 20, 24, 28], [1, 5, 9, 13, 17, 21, 25, 29],
                [2, 6, 10, 14, 18, 22, 26, 30], [3, 7, 11, 15, 19, 23, 27, 31],
            ],
            "tp_dp tp_dp_cp": [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31],
            ],
        },
        experts=[
            [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3],
            [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7],
            [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3],
            [4, 5], [6, 7],
        ],
    ),
}
# fmt: on


@pytest.mark.parametrize("name", TEXTBOOK)
def test_every_group_is_as_written_out(name):
    expected = {
        key: groups for keys, groups in TEXTBOOK[name].groups.items() for key in keys.split()
    }
    for layout in TEXTBOOK[name].layouts:
        assert {group: layout.groups(group) for group in GROUP_NAMES} == expected


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_groups_of_each_rank_are_the_written_out_ones_that_it_is_in(name):
    for layout in TEXTBOOK[name].layouts:
        for keys, groups in TEXTBOOK[name].groups.items():
            for key in keys.split():
                for rank in range(layout.world_size):
                    assert [layout.group(key, rank)] == [ranks for ranks in groups if rank in ranks]


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_experts_of_every_rank_are_as_written_out(name):
    textbook = TEXTBOOK[name]
    for layout in textbook.layouts:
        held = [layout.experts_of(rank, textbook.num_experts) for rank in range(layout.world_size)]
        assert [list(experts) for experts in held] == textbook.experts
