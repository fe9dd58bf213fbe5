"""How far a long stretch of steps is: a bar where a terminal shows it, or a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def steps_progress(label: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar for the length of a block; yields what is to be called after each step.

    Args:
        label: What is going on.
        total: Steps altogether.
        shown: Whether this process may show it; of several ranks one does.
    """
    screen = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        disable=not (shown and screen.is_terminal),
        redirect_stdout=False,  # what libraries print goes to the log
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


class SpokenProgress:
    """Says how far a stretch of steps is, if it takes long; a short one passes in silence.

    Args:
        label: What is going on.
        say: Where lines go.
        interval_s: Seconds before the first line, and between lines.
        clock: Tells seconds.
    """

    def __init__(
        self,
        label: str,
        say: Callable[[str], None],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._say = label, say
        self._interval_s, self._clock = interval_s, clock
        self._begun: float | None = None
        self._spoken = 0.0

    def begin_step(self, done: int, total: int | None) -> None:
        """Note that a step begins; the first one begins the stretch.

        Args:
            done: Steps that have ended.
            total: Steps altogether; None where nobody knows.
        """
        now = self._clock()
        if self._begun is None:
            self._begun = self._spoken = now
        if not done or now - self._spoken < self._interval_s:
            return
        self._spoken = now
        spent = now - self._begun
        if total is None:
            self._say(f" {self._label}: step {done} ended after {spent:.0f} s")
            return
        left = spent / done * (total - done)
        self._say(
            f" {self._label}: {done} of {total} steps in {spent:.0f} s, about {left:.0f} s to go"
        )

    def end(self) -> None:
        """Note that the stretch is over; the next step begins another."""
        self._begun = None
