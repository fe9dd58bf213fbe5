"""A progress bar that counts bytes, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for the length of a block; yields what is to be called with bytes that are done.

    Args:
        label: What is going on.
        total: Bytes altogether.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=5) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)
