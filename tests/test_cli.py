"""The command line: one table of commands, and errors that are messages."""

import logging
import os
import sys
import warnings

import pytest

from megatron_switch import __version__, cli
from megatron_switch.cli import COMMANDS, Command, main, reporting_errors
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.training.run_folder import COMMAND_VARIABLE


@pytest.fixture(autouse=True)
def _libraries_are_heard_again():
    logger = logging.getLogger("torch.utils.cpp_extension")
    before = logger.level
    yield
    logger.setLevel(before)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name:<14}{command.summary}" in text


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megatron-switch {__version__}\n"


@pytest.mark.parametrize("words", [[], ["trian"], ["--no-such-flag"]])
def test_no_command_is_a_mistake_of_use(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage: megatron-switch" in capsys.readouterr().err


def test_a_command_gets_its_words_and_its_code_is_the_programs(monkeypatch):
    seen = []
    command = Command("for this test", lambda words: seen.append(words) or 7)
    monkeypatch.setitem(COMMANDS, "try", command)
    monkeypatch.setattr(sys, "argv", ["megatron-switch", "try", "--a", "b"])
    assert main() == 7
    assert main(["try"]) == 7
    assert seen == [["--a", "b"], []]


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize("error", [ConfigError("no"), DataError("no"), CheckpointError("no")])
def test_an_error_of_the_users_is_its_message_and_code_2(capsys, error):
    assert reporting_errors(raising(error)) == 2
    assert capsys.readouterr().err == "\nmegatron-switch: error: no\n"


def test_other_ranks_give_rank_0_time_and_then_name_themselves(capsys, monkeypatch):
    waits = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    assert reporting_errors(raising(ConfigError("no"))) == 2
    assert capsys.readouterr().err == "\nmegatron-switch: error (rank 3): no\n"
    assert len(waits) == 1


def test_an_error_of_the_programs_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        reporting_errors(raising(ZeroDivisionError()))


def test_libraries_do_not_tell_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", lambda words: 0))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        main(["try"])
        warnings.warn("Transformer Engine and Apex are not installed.", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in heard] == ["something else"]


def test_train_helps_with_the_flags_that_are_ours(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--switch-capacity-group {microbatch,sequence,ep}" in text
    assert "--tensor-model-parallel-size" not in text
    assert "docs/flags.md" in text


def test_launch_local_passes_flags_on_and_leaves_its_command_for_resume(monkeypatch):
    launched, trained = [], []
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr(
        "megatron_switch.emulation.launch", lambda n, target: launched.append(n) or target()
    )
    monkeypatch.setattr(cli, "_train", lambda flags: trained.append(flags) or 5)
    assert main(["launch-local", "-n", "2", "--data-path", "my text"]) == 5
    assert launched == [2]
    assert trained == [["--switch-device", "cpu", "--data-path", "my text"]]
    left = os.environ.pop(COMMAND_VARIABLE)
    expected = f"{sys.executable} -m megatron_switch launch-local -n 2 --data-path 'my text'"
    assert left == expected


@pytest.mark.parametrize(
    ("words", "message"), [([], "-n/--num-ranks"), (["-n", "0"], "at least 1, got 0")]
)
def test_launch_local_needs_a_number_of_ranks(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["launch-local", *words])
    assert message in capsys.readouterr().err
