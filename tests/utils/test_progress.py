"""A bar where a terminal shows it, on standard error; elsewhere nothing."""

import io
import sys

import pytest

from megatron_switch.utils.progress import PeriodicReport, bytes_progress, steps_progress


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


def test_bytes_have_binary_units(on_terminal):
    terminal = on_terminal()
    with bytes_progress("converting", 3 * 2**20) as on_bytes:
        on_bytes(2**20)
    assert "1.0/3.0 MiB" in terminal.getvalue()


def test_of_several_ranks_one_shows_it(on_terminal):
    terminal = on_terminal()
    with steps_progress("evaluating", 3, shown=False) as advance:
        advance()
    assert terminal.getvalue() == ""


class Clock:
    """Tells the time that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def report(clock, lines):
    return PeriodicReport("evaluation", lines.append, interval_s=10.0, clock=clock)


def test_long_work_gets_a_line_now_and_then(clock):
    lines: list[str] = []
    progress = report(clock, lines)
    for done in range(10):
        progress.begin_step(done, 10)
        clock.now += 4.0
    assert lines == [
        " evaluation: 3 of 10 steps in 12 s, about 28 s to go",
        " evaluation: 6 of 10 steps in 24 s, about 16 s to go",
        " evaluation: 9 of 10 steps in 36 s, about 4 s to go",
    ]


def test_short_work_gets_none_however_long_ago_the_last_one_was(clock):
    lines: list[str] = []
    progress = report(clock, lines)
    for _ in range(5):
        for done in range(3):
            progress.begin_step(done, 3)
            clock.now += 1.0
        progress.end()
        clock.now += 100.0
    assert lines == []


def test_steps_are_counted_where_their_number_is_unknown(clock):
    lines: list[str] = []
    progress = report(clock, lines)
    for done in range(2):
        progress.begin_step(done, None)
        clock.now += 12.0
    assert lines == [" evaluation: step 1 ended after 12 s"]
