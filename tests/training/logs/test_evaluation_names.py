"""Three kinds of evaluation have three names, wherever Megatron calls them all validation."""

from types import SimpleNamespace

import pytest

from megatron_switch.training.logs.evaluation_names import (
    AFTER_TRAINING,
    TEST,
    VALIDATION,
    NamedValues,
    is_after_training,
    named_line,
    named_tag,
)


@pytest.mark.parametrize(
    ("tag", "evaluation", "named"),
    [
        ("lm loss validation", VALIDATION, "lm loss validation"),
        ("lm loss validation", TEST, "lm loss test"),
        ("lm loss validation", AFTER_TRAINING, "lm loss validation after training"),
        ("lm loss validation vs samples", TEST, "lm loss test vs samples"),
        ("lm loss validation ppl vs samples", TEST, "lm loss test ppl vs samples"),
        ("lm loss validation-code", VALIDATION, "lm loss validation-code"),
        ("lm loss validation ppl 2", TEST, "lm loss validation ppl 2"),  # no tag of Megatron's
        (
            "lm loss validation-code ppl",
            AFTER_TRAINING,
            "lm loss validation-code after training ppl",
        ),
        ("lm loss", TEST, "lm loss"),
    ],
)
def test_a_tag_has_the_name_of_its_evaluation(tag, evaluation, named):
    assert named_tag(tag, evaluation) == named


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (" validation loss at iteration 8 | lm loss", " validation loss at iteration 8 | lm loss"),
        (
            " validation loss at iteration 8 on validation set | lm loss",
            " validation loss at iteration 8 after training | lm loss",
        ),
        (
            " validation-code loss at iteration 8 on validation set | lm loss",
            " validation-code loss at iteration 8 after training | lm loss",
        ),
        (
            " validation loss at iteration 8 on test set | lm loss",
            " test loss at iteration 8 | lm loss",
        ),
        (" iteration 8/ 8 | lm loss", " iteration 8/ 8 | lm loss"),
    ],
)
def test_a_line_of_the_screen_has_the_name_of_its_evaluation(line, named):
    assert named_line(line) == named


def test_where_nothing_is_trained_validation_has_no_other_name():
    line = " validation loss at iteration 8 on validation set | lm loss"
    assert named_line(line, trains=False) == " validation loss at iteration 8 | lm loss"


def run(**changes):
    values = {
        "skip_train": False,
        "train_iters": 8,
        "eval_interval": 4,
        "start_eval_at_iter": None,
        "eval_iters": 2,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("changes", "iteration", "after"),
    [
        ({}, 4, [False, False]),
        ({}, 8, [False, True]),  # once in the loop, once after it
        ({"eval_interval": 3}, 8, [True]),  # the loop does not evaluate here
        ({"eval_interval": 0}, 8, [True]),
        ({"start_eval_at_iter": 9}, 8, [True]),
        ({"start_eval_at_iter": 8}, 8, [False, True]),
        ({"eval_iters": [2, 2]}, 8, [False, False, True, True]),
        ({"skip_train": True, "train_iters": None}, 8, [False, False]),
    ],
)
def test_validation_after_the_last_step_is_known(changes, iteration, after):
    found = [is_after_training(run(**changes), iteration, seen=seen) for seen in range(len(after))]
    assert found == after


def test_weights_and_biases_gets_the_same_names():
    calls = []
    writer = NamedValues(SimpleNamespace(log=lambda *call: calls.append(call), config={"a": 1}))
    writer.log({"lm loss validation": 4.0}, 8)
    writer.evaluation = TEST
    writer.log({"lm loss validation": 3.0}, 8)
    assert calls == [({"lm loss validation": 4.0}, 8), ({"lm loss test": 3.0}, 8)]
    assert writer.config == {"a": 1}
    with pytest.raises(AttributeError):
        writer.__deepcopy__  # noqa: B018  # copying must not look for it in a module
