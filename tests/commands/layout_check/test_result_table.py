"""Rows say what is equal, lines under them what is not, and JSON the same."""

import json
import math

import pytest

from megatron_switch.commands.layout_check.cases import MEANINGS, SETTINGS, Case
from megatron_switch.commands.layout_check.result_table import Result, heading, lines_of, summary
from megatron_switch.commands.layout_check.values import Verdict
from megatron_switch.layout.grid import Layout

VALUES = {factor: next(iter(values)) for factor, values in {**MEANINGS, **SETTINGS}.items()}
CASE = Case(Layout(4, tp=2, ep=4, etp=1), VALUES, 4)
DEVIATION = {
    "loss of step 1": 1e-7,
    "aux of step 1, layer 2": 2e-7,
    "z of step 1, layer 2": 3e-7,
    "dropped of step 1, layer 2": 0.0,
    "load of step 1, layer 2, expert 0": 0.0,
    "gradient 1 of decoder.layers.1.mlp.router.weight": 4e-7,
    "gradient 1 of decoder.layers.1.mlp.experts.experts.linear_fc1.weight[3]": 5e-7,
    "gradient 1 of embedding.word_embeddings.weight": 6e-7,
    "norm of step 1": 7e-7,
    "clip of step 1": 8e-7,
    "parameter of embedding.word_embeddings.weight": 9e-7,
}


def result(**changes):
    return Result(CASE, Verdict({**DEVIATION, **changes}, [], []))


def test_every_value_has_a_column():
    cells = result().cells()
    assert list(cells.values()) == [1e-7, 2e-7, 3e-7, 0.0, 4e-7, 5e-7, 6e-7, 7e-7, 8e-7, 9e-7]


def test_a_cell_is_the_worst_of_its_values():
    cells = result(**{"loss of step 2": 5e-6, "loss of step 3": 1e-6}).cells()
    assert cells["loss"] == 5e-6


def test_a_row_stands_under_its_heading():
    (row,) = lines_of(result())
    names, cells = heading().split(), row.split()
    assert dict(zip(names[:8], cells[:8], strict=True)) == {
        **{"ranks": "4", "TP": "2", "PP": "1", "VP": "1", "EP": "4", "ETP": "1"},
        **{"CP": "1", "DP": "2"},
    }
    assert cells[names.index("router")] == "4e-07"
    assert row.index("1e-07") + len("1e-07") == heading().index("loss") + len("loss")
    assert row.endswith(
        "2 micro-batches, microbatch, per micro-batch, plain, recompute none, "
        "packed, evaluation none"
    )


def test_what_differs_stands_under_the_row_worst_first():
    lines = lines_of(result(**{"loss of step 1": 1e-3, "norm of step 1": 2e-2}))
    assert lines[0].endswith("DIFFERS")
    assert [line.strip() for line in lines[1:]] == [
        "norm of step 1: off by 2.0e-02",
        "loss of step 1: off by 1.0e-03",
    ]


def test_long_lists_are_cut():
    many = {f"loss of step {number}": 1.0 for number in range(9)}
    assert lines_of(result(**many))[-1].strip() == "and 4 more"


def test_tokens_that_went_elsewhere_and_near_ties_are_listed():
    unlike = Result(CASE, Verdict(DEVIATION, ["token 3"], ["token 4"]))
    lines = lines_of(unlike)
    assert "UNLIKE" in lines[0]
    assert [line.strip() for line in lines[1:]] == ["token 3", "near tie: token 4"]
    tie = Result(CASE, Verdict(DEVIATION, [], ["token 4"]))
    assert tie.equal
    assert not lines_of(tie)[0].endswith("DIFFERS")


def test_a_case_without_a_verdict_says_why():
    failed = Result(CASE, error="a rank failed")
    lines = lines_of(failed)
    assert not failed.equal
    assert "FAILED" in lines[0]
    assert lines[1].strip() == "a rank failed"


def test_json_holds_the_case_and_what_differs():
    wrong = result(**{"loss of step 1": math.inf, "clip of step 1": 0.5})
    record = json.loads(wrong.as_json())
    assert (record["ranks"], record["tp"], record["dp"], record["optimizer"]) == (4, 2, 2, "plain")
    assert record["equal"] is False
    assert record["wrong"] == {"loss of step 1": None, "clip of step 1": 0.5}
    assert record["deviation"]["weights"] == 9e-7
    assert json.loads(Result(CASE, error="no").as_json())["error"] == "no"


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([result(), result()], "2 cases, all equal; the greatest deviation is 9.0e-07."),
        ([result(), Result(CASE, error="no")], "2 cases, 1 of them NOT equal."),
    ],
)
def test_the_summary_counts(results, text):
    assert summary(results) == text
