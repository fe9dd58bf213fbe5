"""How far a long piece of work is: a bar on a terminal, or a line now and then in a log.

Bars stand on standard error, so that results can be redirected, and show nothing elsewhere.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def steps_bar(screen: Console | None = None, *, shown: bool = True, **options: Any) -> Progress:
    """Return a bar that counts steps, shown inside a ``with`` block.

    Args:
        screen: Where it is shown, if that is a terminal; standard error where None.
        shown: Whether this process may show it; of several ranks one does.
        **options: Of :class:`rich.progress.Progress`.
    """
    return _bar(screen, shown, [MofNCompleteColumn()], options)


def bytes_bar(screen: Console | None = None, *, shown: bool = True, **options: Any) -> Progress:
    """Return a bar that counts bytes; see :func:`steps_bar`."""
    measures = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    return _bar(screen, shown, measures, options)


def _bar(
    screen: Console | None, shown: bool, measures: list[ProgressColumn], options: dict[str, Any]
) -> Progress:
    screen = screen or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *measures,
        TimeRemainingColumn(elapsed_when_finished=True),
        console=screen,
        disable=not (shown and screen.is_terminal),
        redirect_stdout=False,  # what libraries print may go to a log
        **options,
    )


@contextmanager
def steps_progress(label: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar for the length of a block; yields what is to be called after each step.

    Args:
        label: What is going on.
        total: Steps altogether.
        shown: Whether this process may show it; of several ranks one does.
    """
    with steps_bar(shown=shown, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def bytes_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for the length of a block; yields what is to be called with bytes that are done.

    Args:
        label: What is going on.
        total: Bytes altogether.
    """
    with bytes_bar() as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


class PeriodicReport:
    """Writes a line now and then about steps that take long; short ones pass without.

    Args:
        label: What is going on.
        write: Where lines go.
        interval_s: Seconds before the first line, and between lines.
        clock: Returns seconds.
    """

    def __init__(
        self,
        label: str,
        write: Callable[[str], None],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._write = label, write
        self._interval_s, self._clock = interval_s, clock
        self._begun: float | None = None
        self._written = 0.0

    def begin_step(self, done: int, total: int | None) -> None:
        """Note that a step begins; the first one starts the clock.

        Args:
            done: Steps that have ended.
            total: Steps altogether; None where that is unknown.
        """
        now = self._clock()
        if self._begun is None:
            self._begun = self._written = now
        if not done or now - self._written < self._interval_s:
            return
        self._written = now
        spent = now - self._begun
        if total is None:
            self._write(f" {self._label}: step {done} ended after {spent:.0f} s")
            return
        left = spent / done * (total - done)
        self._write(
            f" {self._label}: {done} of {total} steps in {spent:.0f} s, about {left:.0f} s to go"
        )

    def end(self) -> None:
        """Note that all steps have ended; the next one starts the clock again."""
        self._begun = None
