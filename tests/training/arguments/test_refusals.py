"""What Megatron refuses is explained by the values that it compared, with their flags."""

from argparse import Namespace

import pytest

from megatron_switch.training.arguments.refusals import explain_refusal

# In a file of its own: pytest gives the assertions of test files messages.
CHECKS = """\
from types import SimpleNamespace


def bare(args):
    assert args.min_lr <= args.lr


def inside(args):
    if args.bf16:
        if args.num_layers > 2:
            assert not args.fp16


def with_words(args):
    config = SimpleNamespace(rows=args.num_layers, hidden=object())
    if config.rows % 2 and config.hidden:
        raise ValueError("layers must be\\n even")


def without_values(args):
    raise RuntimeError("no")
"""
VALUES = {"min_lr": 1.0, "lr": 0.5, "bf16": True, "fp16": True, "num_layers": 3}


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (
            "bare",
            "args.min_lr <= args.lr must hold. The values are --min-lr 1.0, --lr 0.5. Change one "
            "of them.",
        ),
        (
            "inside",
            "not args.fp16 must hold. The values are --bf16 True, --num-layers 3, --fp16 True. "
            "Change one of them.",
        ),
        ("with_words", "layers must be even. The values are rows 3. Change one of them."),
        ("without_values", "no."),
    ],
)
def test_rule_values_and_flags(tmp_path, check, expected):
    file = tmp_path / "checks.py"
    file.write_text(CHECKS)
    names = {}
    exec(compile(CHECKS, file, "exec"), names)
    with pytest.raises(Exception) as error:  # noqa: PT011 - of any type
        names[check](Namespace(**VALUES))
    assert explain_refusal(error.value) == expected


def test_an_error_that_was_never_raised_has_its_own_words():
    assert explain_refusal(ValueError("words")) == "words."
