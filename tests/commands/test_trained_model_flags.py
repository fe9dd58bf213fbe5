"""The checkpoint of an evaluation is named by the first word or by its flag, and once."""

from pathlib import Path

import pytest

from megatron_switch.commands.table import parse
from megatron_switch.commands.trained_model_flags import take_checkpoint
from megatron_switch.errors import ConfigError

MORE = ["--tensor-model-parallel-size", "2"]
BOTH = pytest.mark.parametrize("command", ["capacity-sweep", "evaluate"])


@BOTH
@pytest.mark.parametrize(
    "argv",
    [
        ["run", *MORE],
        ["--json", "run", *MORE],
        ["--load", "run", *MORE],
        [*MORE, "--load", "run"],
        ["--load=run", *MORE],
    ],
    ids=" ".join,
)
def test_the_checkpoint_stands_first_or_behind_its_flag(command, argv):
    args = parse(command, argv)
    take_checkpoint(args)
    assert args.load == Path("run")
    assert args.train_flags == MORE


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "There is no model: --load was not given"),
        (MORE, "There is no model: --load was not given"),
        (["one", "--load", "two"], "given twice, as one and with --load two: leave one out"),
        (["--json", "one", "--load=two"], "given twice, as one and with --load two: leave one"),
    ],
    ids=str,
)
def test_it_is_given_once(argv, message):
    with pytest.raises(ConfigError, match=message):
        take_checkpoint(parse("capacity-sweep", argv))


@BOTH
def test_the_help_shows_both_ways(capsys, command):
    with pytest.raises(SystemExit):
        parse(command, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{command} (CHECKPOINT | --load FOLDER) [OPTIONS]" in text
    assert "CHECKPOINT is the folder that --load takes" in text
