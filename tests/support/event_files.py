"""Reads TensorBoard's files as TensorBoard does, without thinning out."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalar_steps(folder: Path, tag: str) -> list[int]:
    """Return the steps of a value, sorted; the order of files of one second is not defined."""
    return sorted(event.step for event in _read(folder).Scalars(tag))


def scalar_tags(folder: Path) -> list[str]:
    """Return the names of all values, sorted."""
    return sorted(_read(folder).Tags()["scalars"])


def _read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events
