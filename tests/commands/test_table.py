"""Every command is a module with flags and work; where its training flags stand is in the table."""

import pytest

from megatron_switch.commands.table import COMMANDS, parse


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        parse(name, ["--help"])
    assert f"usage: megatron-switch {name} " in capsys.readouterr().out


def test_training_flags_stand_among_a_commands_own():
    argv = ["--load", "run", "--tensor-model-parallel-size", "2", "--seed", "3"]
    args = parse("generate", argv)
    assert (str(args.load), args.seed) == ("run", 3)
    assert args.train_flags == ["--tensor-model-parallel-size", "2"]
    assert args.argv == argv


def test_training_flags_stand_after_two_dashes():
    args = parse("rehearse", ["--world-size", "8", "--", "--world-size", "9", "--bf16"])
    assert args.world_size == 8
    assert args.train_flags == ["--world-size", "9", "--bf16"]


def test_a_command_without_training_flags_refuses_them(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("check-binding", ["--bf16"])
    assert "unrecognized arguments: --bf16" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--world", "8"], ["--world-size", "8", "--js"]])
def test_flags_are_not_abbreviated_where_training_flags_stand(argv):
    with pytest.raises(SystemExit, match="2"):
        parse("rehearse", argv)


def test_training_flags_keep_their_order_and_their_values():
    argv = ["--a", "-1", "--b=x y", "--c", "1", "2", "--d"]
    assert parse("train", argv).train_flags == argv
