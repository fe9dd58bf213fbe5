"""A progress bar that counts steps, on standard error, where a terminal shows it."""

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
