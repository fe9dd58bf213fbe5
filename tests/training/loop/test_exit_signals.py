"""A signal is noticed by all ranks, named on the screen, and gives the exit code."""

import os
import pty
import signal
import sys
from types import SimpleNamespace

import pytest

from megatron_switch.training.loop import exit_signals as module
from megatron_switch.training.loop.exit_signals import ExitSignals, code_after, exit_signals
from megatron_switch.utils.exit_codes import SAVED


@pytest.fixture(autouse=True)
def _handlers_restored():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def others(monkeypatch):
    """Let another rank have received a signal."""
    received = []
    monkeypatch.setattr(module, "all_gather_item", lambda item, dtype: [item, *received])
    return received


def entered(number=signal.SIGTERM, *, saves=True):
    lines = []
    return ExitSignals(number, saves=saves, say=lines.append).__enter__(), lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_of_this_rank_is_noticed_and_said_once(others, number):
    handler, lines = entered(number)
    assert handler.signals_received() == [0]
    assert (handler.ended_by, lines) == (None, [])
    os.kill(os.getpid(), number)
    assert handler.signals_received() == handler.signals_received() == [number]
    assert handler.ended_by == number
    assert lines == [f"{number.name} received: saving a checkpoint, then ending (exit code 75)."]


def test_sighup_is_noticed_beside_the_chosen_signal_unless_it_is_ignored(others):
    handler, _ = entered(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)
    assert handler.signals_received() == [signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler, _ = entered(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)
    assert handler.signals_received() == [0]


def test_the_signal_of_another_rank_counts(others):
    handler, lines = entered(saves=False)
    others.append(signal.SIGTERM)
    assert any(handler.signals_received())
    assert handler.ended_by == signal.SIGTERM
    assert lines == [
        "SIGTERM received: ending (exit code 143). Nothing is saved without --save or "
        "--switch-run-dir."
    ]


@pytest.mark.parametrize(
    ("saves", "environ", "code"),
    [(True, {}, SAVED), (False, {}, 143), (True, {"TORCHELASTIC_RUN_ID": "1"}, 0)],
)
def test_the_exit_code_says_whether_the_run_can_be_continued(saves, environ, code):
    assert code_after(signal.SIGTERM, saves=saves, environ=environ) == code


def test_megatrons_flag_decides_whether_there_is_a_handler():
    args = SimpleNamespace(exit_signal_handler=False, exit_signal=signal.SIGTERM, save="runs")
    assert exit_signals(args, print) is None
    args.exit_signal_handler = True
    assert isinstance(exit_signals(args, print), ExitSignals)


def test_a_terminal_that_is_gone_is_not_written_to():
    pid, terminal = pty.fork()
    if pid == 0:
        code = 1
        try:
            entered()
            os.kill(os.getpid(), signal.SIGHUP)
            code = 2 if os.isatty(1) or os.isatty(2) else 0
            sys.__stdout__.write("nobody reads this")
            sys.__stdout__.flush()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
