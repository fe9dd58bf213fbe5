"""What the error of illegal sizes shows: both grids, and legal neighbours."""

import re

import pytest

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.grid_rules import broken_grid_rule
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.suggestions import describe_change, layout_error, nearest_legal


def is_legal(sizes):
    return broken_grid_rule(sizes) is None


def message(*args, **sizes):
    """Return the text of the error that making this layout raises."""
    with pytest.raises(LayoutError) as caught:
        Layout(*args, **sizes)
    return str(caught.value)


def test_the_whole_message():
    assert message(12, tp=2, ep=8, etp=1) == (
        "12 ranks cannot form the expert grid: ETP x EP x PP = 1 x 8 x 1 = 8 does not divide 12.\n"
        "  dense grid:  TP 2 x CP 1 x PP 1 x DP 6 = 12 ranks\n"
        "  expert grid: ETP 1 x EP 8 x PP 1 x EDP ? = 12 ranks (12 / 8 is not whole)\n"
        "Nearest legal settings:\n"
        "  --expert-model-parallel-size 6  (DP 6, EDP 2)\n"
        "  --expert-model-parallel-size 12  (DP 6, EDP 1)\n"
        "  --expert-model-parallel-size 4  (DP 6, EDP 3)\n"
        "  16 ranks instead of 12  (DP 8, EDP 2)"
    )


@pytest.mark.parametrize("sizes", [{"ep": 8}, {"tp": 5}, {"cp": 8, "pp": 2}])
def test_both_grids_are_shown_with_every_factor(sizes):
    text = message(12, **sizes)
    assert re.search(r"dense grid:  TP \d+ x CP \d+ x PP \d+ x DP (\d+|\?) = 12 ranks", text)
    assert re.search(r"expert grid: ETP \d+ x EP \d+ x PP \d+ x EDP (\d+|\?) = 12 ranks", text)


@pytest.mark.parametrize(
    "asked",
    [
        Sizes(12, ep=8),
        Sizes(7, tp=2),
        Sizes(30, tp=4, ep=8, etp=1),
        Sizes(10080, tp=11, pp=13, ep=17),
        Sizes(64, tp=8, pp=2, ep=8, order="tp-cp-ep-pp-dp"),
        Sizes(6, tp=4, cp=4),
    ],
)
def test_every_suggestion_is_legal_and_needs_nothing_but_the_flags_that_it_names(asked):
    suggestions = nearest_legal(asked, is_legal)
    assert suggestions
    flag_names = {
        "--tensor-model-parallel-size": "tp",
        "--context-parallel-size": "cp",
        "--pipeline-model-parallel-size": "pp",
        "--expert-model-parallel-size": "ep",
        "--expert-tensor-parallel-size": "etp",
    }
    for legal in suggestions:
        text = describe_change(asked, legal)
        changes = {flag_names[flag]: int(size) for flag, size in re.findall(r"(--\S+) (\d+)", text)}
        ranks = re.search(r"(\d+) ranks instead of", text)
        if ranks:
            changes["world_size"] = int(ranks[1])
        applied = asked.changed(**changes)
        assert is_legal(applied)
        assert applied == legal


def test_expert_tensor_parallelism_that_follows_is_shown_with_the_grid():
    follows = layout_error(
        [broken_grid_rule(Sizes(8, tp=3))], Sizes(8, tp=3), is_legal=lambda sizes: sizes.tp == 4
    )
    assert "--tensor-model-parallel-size 4  (ETP 4, DP 2, EDP 2)" in str(follows)


def test_two_sizes_are_changed_where_one_is_not_enough():
    asked = Sizes(8, tp=3, ep=3, etp=1)
    suggestions = nearest_legal(asked, is_legal)
    assert describe_change(asked, suggestions[0]) == (
        "--tensor-model-parallel-size 4 --expert-model-parallel-size 4  (DP 2, EDP 2)"
    )


def test_parallelism_that_was_not_asked_for_is_suggested_last():
    suggestions = nearest_legal(Sizes(8, ep=3), is_legal)
    assert all((legal.tp, legal.cp, legal.pp) == (1, 1, 1) for legal in suggestions)


def test_no_suggestion_is_made_up():
    asked = Sizes(8, tp=3)
    error = layout_error([broken_grid_rule(asked)], asked, is_legal=lambda _: False)
    assert "Nearest legal settings" not in str(error)
