"""Find the checkpoint that a run can really continue from.

Megatron writes checkpoints in place and keeps the newest iteration in a tracker file,
``latest_checkpointed_iteration.txt``. A job that is killed while saving leaves an iteration
without all its files, or an empty tracker; upstream then fails deep inside torch, ends
with exit code 0, or silently trains from random weights.

:func:`find_checkpoint` decides before anything is built. It returns an iteration whose
files are all there, with a message whenever that is not the one the tracker names, and
raises :class:`CheckpointError` when there is none, with what was found instead. It never
changes a file; :func:`write_tracker` makes a tracker name what was found, so that all ranks
and Megatron's own loader agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.checkpoint.formats.dist_metadata import find_defect, foreign_format
from megatron_switch.checkpoint.formats.foreign_formats import ForeignFormat
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.atomic_file import renamed_into_place

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # weights without an iteration: converted, or published
CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
INCOMPLETE = "incomplete"  # suffix of an iteration that is kept but never loaded
_TRACKER_BYTES = 4096
_MOST_DIGITS = 12  # of an iteration


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint.

    Attributes:
        folder: Folder of the iteration, such as ``checkpoints/iter_0000500``.
        iteration: Its iteration; 0 for a release, as in Megatron.
        message: What the user should know, or None when the tracker names this iteration.
    """

    folder: Path
    iteration: int
    message: str | None = None

    @property
    def is_release(self) -> bool:
        """Whether this is a checkpoint of weights only, without an iteration."""
        return self.folder.name == RELEASE


@dataclass(frozen=True)
class LoadContext:
    """What messages say of the run or command that looks for a checkpoint."""

    folder_flag: str = "--load"
    iteration_flag: str = "--ckpt-step"
    can_start_anew: bool = True
    is_own_folder: bool = False

    def way_out(self) -> str:
        """Return the way out of a folder that holds no checkpoint."""
        if self.is_own_folder:
            return "Delete what is in it to start from new weights."
        if not self.can_start_anew:
            return f"Give another folder to {self.folder_flag}."
        return f"Correct {self.folder_flag}, or leave it out to start from new weights."


RUN = LoadContext()


def has_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` holds anything that looks like a checkpoint, complete or not.

    False for a folder that does not exist, and for one that a first run has just created:
    the two cases in which a job that always passes ``--load`` starts from new weights.
    """
    return (folder / TRACKER).exists() or bool(_iterations(folder)) or _foreign(folder) is not None


def is_same_folder(first: str | None, second: str | None) -> bool:
    """Whether two flags name one folder, however they spell it."""
    return None not in (first, second) and Path(str(first)).resolve() == Path(str(second)).resolve()


def interrupted_first_save(folder: Path) -> list[str]:
    """Return the incomplete iterations of a folder in which no save was ever completed.

    Empty where a save was: Megatron writes the tracker at the end of each.
    """
    if (folder / TRACKER).exists() or _foreign(folder) is not None:
        return []
    names = _iterations(folder)
    return [] if any(find_defect(folder / name) is None for name in names) else names


def set_aside(folder: Path, names: Iterable[str]) -> None:
    """Rename iterations, on one rank, so that nothing is saved into what is left of them."""
    for name in names:
        taken = len(list(folder.glob(f"{name}.{INCOMPLETE}*")))
        (folder / name).rename(folder / f"{name}.{INCOMPLETE}{taken or ''}")


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder with the tracker file: ``folder``, or the one inside of a run's folder.

    Args:
        folder: What a user names.
    """
    inside = folder / CHECKPOINTS
    return inside if inside.is_dir() and not has_checkpoint(folder) else folder


def find_checkpoint(
    folder: Path, *, iteration: int | None = None, context: LoadContext = RUN
) -> FoundCheckpoint:
    """Return the checkpoint of ``folder`` that a run can continue from.

    Args:
        folder: What ``--load`` names: the folder with the tracker file.
        iteration: What ``--ckpt-step`` names. Given, it is this iteration or an error.
        context: Whose flags messages name.

    Raises:
        CheckpointError: The folder does not exist, holds no checkpoint, only incomplete ones,
            or one in a format that this program cannot load.
    """
    if not folder.is_dir():
        raise CheckpointError(f"The checkpoint folder {folder} does not exist. {context.way_out()}")
    if iteration is not None:
        return _required(folder, iteration, context.iteration_flag)
    named, trouble = _read_tracker(folder / TRACKER)
    if named is not None:
        defect = find_defect(folder / named)
        if defect is None:
            return _found(folder / named)
        trouble = f"{folder / TRACKER} names {named}, which is not complete: {defect}"
    return _newest_complete(folder, trouble, tried=named, context=context)


def write_tracker(folder: Path, found: FoundCheckpoint) -> None:
    """Make the tracker of ``folder`` name ``found``. One rank calls this, before the others read.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    content = RELEASE if found.is_release else str(found.iteration)
    try:
        with renamed_into_place(folder / TRACKER) as stream:
            stream.write(content)
    except OSError as error:
        raise CheckpointError(
            f"{folder / TRACKER} does not name the newest complete checkpoint, "
            f"{found.folder.name}, and cannot be written ({error}). Write {content!r} into that "
            "file, or load a copy of the folder with --load."
        ) from error


def _required(folder: Path, iteration: int, flag: str) -> FoundCheckpoint:
    target = folder / f"iter_{iteration:07d}"
    if not target.is_dir():
        complete = [name for name in _iterations(folder) if find_defect(folder / name) is None]
        raise CheckpointError(
            f"{flag} {iteration} asks for {target}, which does not exist. Complete "
            f"checkpoints in {folder}: {', '.join(complete) or 'none'}."
        )
    defect = find_defect(target)
    if defect is not None:
        raise CheckpointError(
            f"{flag} {iteration} asks for {target}, which is not complete: {defect} "
            f"Choose another iteration, or leave {flag} out to take the newest complete one."
        )
    return FoundCheckpoint(target, iteration)


def _read_tracker(path: Path) -> tuple[str | None, str]:
    """Return the folder that a tracker names, or None and what is wrong with it."""
    if not path.exists():
        return None, f"{path} is missing."
    if not path.is_file():  # opening a pipe would wait for its writer
        return None, f"{path} is not a file."
    with path.open(encoding="utf-8", errors="replace") as file:
        content = file.read(_TRACKER_BYTES).strip()
    if content == RELEASE:
        return RELEASE, ""
    if content.isdecimal() and len(content) <= _MOST_DIGITS:
        return f"iter_{int(content):07d}", ""
    if not content:
        return None, f"{path} is empty."
    return None, f"{path} holds {content[:40]!r}, which is neither an iteration nor 'release'."


def _newest_complete(
    folder: Path, trouble: str, *, tried: str | None, context: LoadContext
) -> FoundCheckpoint:
    """Return the newest complete checkpoint, or raise with what was found instead."""
    defects = {}
    for name in _iterations(folder):
        defect = find_defect(folder / name)
        if defect is None:
            message = f"{trouble} Continuing from {name}, the newest complete one."
            return _found(folder / name, message)
        defects[name] = defect
    if (folder / "metadata.json").exists():
        raise CheckpointError(
            f"{context.folder_flag} names the folder of one iteration, {folder}. Give it the "
            f"folder above, {folder.parent}, and the iteration to {context.iteration_flag} if it "
            "is not the newest one."
        )
    foreign = _foreign(folder)
    if foreign is not None:
        raise CheckpointError(
            f"{folder} holds a checkpoint in {foreign.name}, but only Megatron's torch_dist format "
            f"can be loaded. {foreign.advice} Or correct {context.folder_flag}."
        )
    if not defects and tried is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint: {trouble} There is no iter_* folder either. "
            f"{context.way_out()}"
        )
    listing = "".join(f"\n  {name}: {defect}" for name, defect in list(defects.items())[:5])
    raise CheckpointError(
        f"{folder} holds no complete checkpoint. {trouble}{listing}\n"
        "The run that saved them probably ended while saving, or a file was lost in a copy. "
        f"{context.way_out()}"
    )


def _iterations(folder: Path) -> list[str]:
    """Names of the folders that may hold a checkpoint, newest first, a release last."""
    numbered = [path.name for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    numbered.sort(key=lambda name: int(name[5:]), reverse=True)
    return numbered + ([RELEASE] if (folder / RELEASE).is_dir() else [])


def _foreign(folder: Path) -> ForeignFormat | None:
    """Return the format of the checkpoint in ``folder`` where it is recognisably another one."""
    folders = [folder, *(folder / name for name in _iterations(folder))]
    formats = (foreign_format(each) for each in folders)
    return next((found for found in formats if found is not None), None)


def _found(folder: Path, message: str | None = None) -> FoundCheckpoint:
    iteration = 0 if folder.name == RELEASE else int(folder.name[5:])
    return FoundCheckpoint(folder, iteration, message)
