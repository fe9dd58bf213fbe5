"""A bar where a terminal shows it, on standard error; elsewhere nothing."""

import io
import sys

import pytest

from megatron_switch.training.progress import steps_progress


class Terminal(io.StringIO):
    """A stream that says that somebody looks at it."""

    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Put a terminal in the place of standard error; called in a test, as pytest puts its own."""

    def begin():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        return stream

    return begin


def test_without_a_terminal_there_is_no_bar(capfd):
    with steps_progress("evaluating", 2) as advance:
        advance()
        print("result")
    assert capfd.readouterr() == ("result\n", "")


def test_a_terminal_sees_how_far_it_is(on_terminal):
    terminal = on_terminal()
    with steps_progress("evaluating", 3) as advance:
        advance()
        advance()
    assert "evaluating" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()


def test_of_several_ranks_one_shows_it(on_terminal):
    terminal = on_terminal()
    with steps_progress("evaluating", 3, shown=False) as advance:
        advance()
    assert terminal.getvalue() == ""
