"""Ranks of this host: the flags of the training are passed on, and the command is kept."""

import os
import sys

import pytest

from megatron_switch.cli import main
from megatron_switch.training.logs.run_folder import COMMAND_VARIABLE


def test_flags_are_passed_on_and_the_command_is_kept_for_resume(monkeypatch):
    launched, trained = [], []
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr(
        "megatron_switch.emulation.launch", lambda n, target: launched.append(n) or target() or 5
    )
    monkeypatch.setattr("megatron_switch.training.loop.session.train", trained.append)
    assert main(["launch-local", "-n", "2", "--data-path", "my text"]) == 5
    assert launched == [2]
    assert trained == [["--switch-device", "cpu", "--data-path", "my text"]]
    left = os.environ.pop(COMMAND_VARIABLE)
    expected = f"{sys.executable} -m megatron_switch launch-local -n 2 --data-path 'my text'"
    assert left == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "-n/--num-ranks"), (["-n", "0"], "takes a whole number from 1 to 1048576, got '0'")],
)
def test_it_needs_a_number_of_ranks(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["launch-local", *words])
    assert message in capsys.readouterr().err
