"""A checkpoint is named the way one is used to, and once."""

from pathlib import Path

import pytest

from megatron_switch.commands.inspect.parsers import parse_capacity_sweep

MORE = ["--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", *MORE],
        ["--json", "run", *MORE],
        ["--load", "run", *MORE],
        [*MORE, "--load", "run"],
        ["--load=run", *MORE],
    ],
    ids=" ".join,
)
def test_the_checkpoint_of_a_sweep_stands_first_or_behind_its_flag(words):
    own, left = parse_capacity_sweep(words)
    assert own.checkpoint == Path("run")
    assert left == MORE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: CHECKPOINT (or --load FOLDER)"),
        (["one", "--load", "two"], "given twice, as one and with --load two: leave one out"),
        (["--json", "one", "--load=two"], "given twice, as one and with --load two: leave one"),
    ],
    ids=str,
)
def test_it_is_given_once(capsys, words, message):
    with pytest.raises(SystemExit):
        parse_capacity_sweep(words)
    assert message in capsys.readouterr().err


def test_the_help_of_a_sweep_shows_both_ways(capsys):
    with pytest.raises(SystemExit):
        parse_capacity_sweep(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "capacity-sweep (CHECKPOINT | --load FOLDER) [OPTIONS]" in text
    assert "--load FOLDER the same, as other commands take it" in text
