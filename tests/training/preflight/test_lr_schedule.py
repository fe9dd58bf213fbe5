"""A schedule that Megatron asserts against without words is refused with its numbers."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.preflight.lr_schedule import check_schedule


def given(sparse_line, flags):
    """Arguments as validation leaves them."""
    args = sparse_line(flags).args
    args.lr_warmup_iters = args.lr_warmup_iters or 0
    args.lr_warmup_samples = args.lr_warmup_samples or 0
    if "--train-samples" in flags:
        args.train_iters = None
    return args


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr-warmup-iters 3",
        "--lr-warmup-iters 4 --lr-decay-iters 5",
        "--lr-warmup-fraction 0.9",
        "--lr-warmup-samples 15 --train-samples 16",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2",
        "--min-lr 1e-3",
        "--lr-warmup-iters 9 --skip-train",
    ],
)
def test_a_schedule(sparse_line, flags):
    check_schedule(given(sparse_line, flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-warmup-iters 4", r"--lr-warmup-iters 4 leaves nothing of its 4 iters .*--train-it"),
        ("--lr-warmup-iters 2 --lr-decay-iters 2", r"--lr-warmup-iters 2 .* 2 iters"),
        ("--lr-warmup-fraction 1.0", r"--lr-warmup-fraction 1\.0 leaves nothing of its 4 iters"),
        (
            "--lr-warmup-samples 16 --train-samples 16",
            r"--lr-warmup-samples 16 leaves nothing of its 16 samples .*--lr-decay-samples",
        ),
        ("--min-lr 1", r"above --lr, which is 0\.001, but --min-lr is 1\. Lower it"),
        ("--lr-warmup-init 0.5", r"--lr, which is 0\.001, but --lr-warmup-init is 0\.5"),
        ("--lr-decay-style WSD", r"Add --lr-wsd-decay-iters\."),
    ],
)
def test_no_schedule(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        check_schedule(given(sparse_line, flags))
