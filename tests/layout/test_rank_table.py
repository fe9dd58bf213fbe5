"""The rank table, word for word."""

import csv
import io

import pytest

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import (
    axis_summary,
    describe_experts,
    start_up_text,
    table_as_csv,
)


def test_start_up_shows_eight_rows_a_line_per_axis_and_where_experts_live():
    text = start_up_text(Layout(16, tp=2, ep=4), num_experts=8, ranks_per_node=8)
    assert text == "\n".join(
        [
            "rank  node  tp  cp  pp  dp  etp  ep  edp  experts",
            "   0     0   0   0   0   0    0   0    0  0-1 part 1/2",
            "   1     0   1   0   0   0    1   0    0  0-1 part 2/2",
            "   2     0   0   0   0   1    0   1    0  2-3 part 1/2",
            "   3     0   1   0   0   1    1   1    0  2-3 part 2/2",
            "   4     0   0   0   0   2    0   2    0  4-5 part 1/2",
            "   5     0   1   0   0   2    1   2    0  4-5 part 2/2",
            "   6     0   0   0   0   3    0   3    0  6-7 part 1/2",
            "   7     0   1   0   0   3    1   3    0  6-7 part 2/2",
            "... and 8 more ranks",
            "",
            "axis  size  groups  nodes  first group",
            "  TP     2       8      1  ranks 0, 1",
            "  CP     1      16      1  rank 0",
            "  PP     1      16      1  rank 0",
            "  DP     8       2      2  ranks 0, 2, 4, 6, 8, 10, 12, 14",
            " ETP     2       8      1  ranks 0, 1",
            "  EP     4       4      1  ranks 0, 2, 4, 6",
            " EDP     2       8      2  ranks 0, 8",
            "",
            "ETP = TP = 2: every expert is cut into 2 parts, which live on neighbouring ranks; "
            "rank 0's experts are on ranks 0, 1. "
            "Dense layers are cut over the same number of ranks.",
            "8 experts over EP 4, 2 on a rank; each is held 2 times (EDP 2).",
        ]
    )


def test_a_small_job_shows_all_its_ranks():
    text = start_up_text(Layout(4, ep=4), num_experts=4, ranks_per_node=4)
    assert "more ranks" not in text
    assert "   3     0   0   0   0   3    0   3    0  3\n" in text


def test_a_dense_model_holds_no_experts():
    text = start_up_text(Layout(2, tp=2), num_experts=None, ranks_per_node=2)
    assert "   1     0   1   0   0   0    1   0    0  -\n" in text
    assert text.endswith("No experts: every layer is dense.")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(8, ep=8), "ETP = TP = 1: every expert lives whole on one rank."),
        (Layout(8, ep=8), "8 experts over EP 8, 1 on a rank; no expert is held twice (EDP 1)."),
        (
            Layout(8, tp=2, ep=2, etp=1),
            "ETP = 1 with TP = 2: every expert lives whole on one rank. Dense layers are cut over "
            "2 ranks, experts are not, and the expert-parallel group of rank 0 is ranks 0, 1.",
        ),
        (
            Layout(8, tp=4, ep=2, etp=2),
            "ETP = 2 with TP = 4: every expert is cut into 2 parts, which live on neighbouring "
            "ranks; rank 0's experts are on ranks 0, 1. Dense layers are cut over 4 ranks.",
        ),
        (
            Layout(8, tp=2, ep=2, order="cp-ep-tp-dp-pp"),
            "ETP = TP = 2: every expert is cut into 2 parts, which live on ranks 2 apart; rank 0's "
            "experts are on ranks 0, 2.",
        ),
    ],
)
def test_where_experts_live_is_said_in_words(layout, words):
    assert words in describe_experts(layout, 8)


def test_an_axis_whose_groups_span_different_numbers_of_nodes_says_so():
    lines = axis_summary(Layout(12, tp=3), ranks_per_node=4).splitlines()
    assert lines[1].split() == ["TP", "3", "4", "1", "to", "2", "ranks", "0,", "1,", "2"]


def test_a_long_group_is_shortened():
    line = axis_summary(Layout(64, ep=64), ranks_per_node=8).splitlines()[6]
    assert line.split("  ")[-1] == "ranks 0, 1, 2, ... 63"


def test_the_csv_reads_back_as_the_layout():
    layout = Layout(32, tp=2, pp=2, cp=2, ep=4, etp=1)
    hosts = [f"n{rank // 8}" for rank in range(32)]
    text = table_as_csv(layout, num_experts=8, ranks_per_node=8, hosts=hosts)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 32
    for rank, row in enumerate(rows):
        at = layout.coordinates(rank)
        assert {axis: int(row[axis]) for axis in vars(at)} == vars(at)
        assert (int(row["rank"]), int(row["node"])) == (rank, rank // 8)
        assert row["host"] == hosts[rank]
        held = layout.experts_of(rank, 8)
        assert row["experts"] == f"{held[0]}-{held[-1]}"


def test_leaves_are_counted_where_they_are_known():
    layout = Layout(32, tp=2, ep=16, etp=1)
    lines = {line.split()[0]: line for line in axis_summary(layout, 4, 3).splitlines()}
    assert lines["axis"].split() == ["axis", "size", "groups", "nodes", "leaves", "first", "group"]
    # Groups of four nodes under leaves of three: nodes 0 to 3 and 4 to 7 are under two each.
    assert lines["EP"].split()[1:5] == ["16", "2", "4", "2"]
    assert lines["TP"].split()[1:5] == ["2", "16", "1", "1"]
    pairs = {line.split()[0]: line for line in axis_summary(Layout(32, tp=8), 4, 3).splitlines()}
    assert "1 to 2" in pairs["TP"]  # of nodes 2 and 3 the second is under another leaf
    assert "leaves" not in axis_summary(layout, 4)
