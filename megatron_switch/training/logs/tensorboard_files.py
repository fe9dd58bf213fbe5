"""TensorBoard's files of a run that resumes: the steps that it computes again are in them once.

A run that was killed and resumes has logged steps that it computes again. TensorBoard's own remedy
(``purge_step``) hides every value whose step is as large, and the steps of Megatron's
``... vs samples`` values are samples, not iterations: nearly all of them would be hidden. So the
files end before the first event of the iteration that is logged next, as ``metrics.jsonl`` does.

An event file is a sequence of records: length (8 bytes), checksum (4), event, checksum (4).
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event

_LENGTH = struct.Struct("<Q")
_BESIDE = 16
"""Bytes of a record beside its event."""
_SAMPLES = " vs samples"
"""End of the tags whose steps are samples."""


def drop_from(folder: Path, iteration: int) -> None:
    """End a folder's event files before their first event of an iteration or a later one.

    A file without such an event is not touched, so that a writer may have one open.

    Args:
        folder: That of ``--tensorboard-dir``; need not exist.
        iteration: The iteration that is logged next.
    """
    for path in folder.glob("*tfevents*"):
        start = _start_of(path, iteration)
        if start is not None:
            os.truncate(path, start)


def _start_of(path: Path, iteration: int) -> int | None:
    """Return the position of the first event of an iteration or a later one, if there is any."""
    position = 0
    for data in _records(path):
        event = Event.FromString(data)
        of_iteration = any(not value.tag.endswith(_SAMPLES) for value in event.summary.value)
        if of_iteration and event.step >= iteration:
            return position
        position += len(data) + _BESIDE
    return None


def _records(path: Path) -> Iterator[bytes]:
    """Yield the events of a file, up to one that a killed run has not finished."""
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size + 4)) == _LENGTH.size + 4:
            length = _LENGTH.unpack(head[: _LENGTH.size])[0]
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            yield data[:length]
