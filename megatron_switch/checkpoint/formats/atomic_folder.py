"""Write a folder atomically: the target is complete or absent.

Everything goes to a hidden sibling of the target, which is renamed to the target when all of it is
on disk. A conversion that fails or is ended by Ctrl-C, SIGTERM or SIGHUP removes it; one that was
killed leaves it behind under a name that nothing loads, and the next conversion to the same target
empties it. Two conversions to one target
at the same time are refused. An existing target and a full disk are refused before the first byte;
a disk that fills up or fails meanwhile ends the conversion with a message.
"""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_switch.errors import CheckpointError
from megatron_switch.utils.units import size_text

_LOCK = ".lock"
_RESERVE = 64 * 2**20  # for what is no tensor: index, configuration, tokenizer


@contextmanager
def folder_put_in_place(target: Path, *, needed_bytes: int, flag: str) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends without an exception.

    Args:
        target: Folder to make; it must not exist.
        needed_bytes: What will be written.
        flag: Flag that names the target, for messages.

    Raises:
        CheckpointError: The target exists, its disk is too full or cannot be written, or another
            process is writing it.
    """
    _refuse_existing(target, flag)
    partial = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():  # its target may belong to another user
            raise FileExistsError(errno.EEXIST, "A symbolic link is in the way", str(partial))
        partial.mkdir(exist_ok=True)
        held = FileLock(partial / _LOCK, timeout=0).acquire()
    except Timeout:
        raise CheckpointError(
            f"Another process is writing {flag} {target}. Wait for it, or name another folder."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{flag} {target} cannot be written: {error}. Name another folder."
        ) from error
    with held, _signals_raise():
        _empty(partial)
        _check_space(target, needed_bytes, flag)
        try:
            yield partial
            _flush(partial)
            _refuse_existing(target, flag)  # made by another program meanwhile
            (partial / _LOCK).unlink()
            partial.rename(target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if (failure := _failure_of_a_file(error)) is None:
                raise
            raise CheckpointError(
                f"{flag} {target} could not be written to its end, and nothing of it is left: "
                f"{failure}. {_way_out(failure)}"
            ) from error
    _sync_folder(target.parent)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process as an exception does, so that it cleans up."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # what shells return for a process that a signal ended

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if is_main]
    defaults = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]
    for number in defaults:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _failure_of_a_file(error: BaseException) -> OSError | None:
    """Return the disk's failure behind an exception.

    torch writes tensors through a stream; where that fails, torch reports an unexpected position,
    and the failure itself is the exception's cause or context.
    """
    if isinstance(error, CheckpointError):  # has its message already
        return None
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, OSError):
            return each
        each = each.__cause__ or each.__context__
    return None


def _way_out(failure: OSError) -> str:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space or raise the limit, or name a folder on another disk."
    return "Check that file and its disk, or name a folder on another one."


def _refuse_existing(target: Path, flag: str) -> None:
    if os.path.lexists(target):
        raise CheckpointError(
            f"{flag} {target} already exists, and nothing is overwritten. Name a new folder, or "
            "move that one away."
        )


def _empty(partial: Path) -> None:
    """Remove what an interrupted conversion left."""
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _check_space(target: Path, needed_bytes: int, flag: str) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes + _RESERVE:
        shutil.rmtree(target.parent / f".{target.name}.partial", ignore_errors=True)
        raise CheckpointError(
            f"{flag} {target} needs {size_text(needed_bytes + _RESERVE)}, but its disk has "
            f"{size_text(free)} free. Free some space, or name a folder on another disk."
        )


def _flush(folder: Path) -> None:
    """Bring files and names to the disk: after a crash the target is whole or absent."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as stream:
                os.fsync(stream.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
