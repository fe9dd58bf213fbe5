"""The file that names the newest checkpoint: how it is written, and what follows a complete save.

Megatron writes it in place through its storage client, at the end of each save and on the first
rank. Here it is renamed into place (a job killed meanwhile would leave an empty one), and
:func:`after_saving` calls what is to be done then.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_switch.checkpoint.load.files import TRACKER
from megatron_switch.utils.atomic_file import renamed_into_place

_AFTER_SAVING: list[Callable[[Path], object]] = []


@contextmanager
def after_saving(action: Callable[[Path], object]) -> Iterator[None]:
    """Call ``action`` with the folder of checkpoints after each complete save within a block.

    On the first rank, once the tracker names the new checkpoint; an asynchronous save ends later
    than Megatron's loop leaves it.
    """
    _AFTER_SAVING.append(action)
    try:
        yield
    finally:
        _AFTER_SAVING.remove(action)


@contextmanager
def _saved(tracker: Path) -> Iterator[Any]:
    with renamed_into_place(tracker) as stream:
        yield stream
    for action in _AFTER_SAVING:
        action(tracker.parent)


class TrackerRenamed:
    """Megatron's storage client, except that the tracker is renamed into place.

    Args:
        client: Megatron's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        """Return what else the client has."""
        return getattr(self._client, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as the client does; a tracker is complete when it is closed."""
        from megatron.core.msc_utils import MultiStorageClientFeature

        is_tracker = mode == "w" and os.path.basename(path) == TRACKER
        if is_tracker and not MultiStorageClientFeature.is_enabled():  # object stores are atomic
            return _saved(Path(path))
        return self._client.open(path, mode, *args, **kwargs)
