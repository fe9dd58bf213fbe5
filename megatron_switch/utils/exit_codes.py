"""Exit codes of the program, and how a user's error becomes a message and one of them."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable

from megatron_switch.errors import OneRankNumericError, SwitchError

USER_ERROR = 2
SAVED = 75
"""What a training returns that a signal has ended after it saved a checkpoint: start it again to
continue (``EX_TEMPFAIL`` of <sysexits.h>)."""
SIGNALLED = 128
"""What shells return for a command that signal number n ended, less n."""
INTERRUPTED = 130
"""What shells return for a command that Ctrl-C ended."""
PIPE_CLOSED = 141
"""What they return for one that wrote to a pipe without a reader."""

_PATIENCE_S = 3.0  # long enough for rank 0's message to end the job first


_ACCESS = "Give this user access to it, or name another one."
_SPACE = "Free some space, or name a folder on another disk."
_DISK = "Check its disk, or name a folder on another one."
_WAYS_OUT = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ENAMETOOLONG: "Name a shorter one.",
    errno.ELOOP: "Its symbolic links lead in a circle; correct them.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Close files of other programs on this machine.",
}
"""What a user can do, by what the system refused; all else is an error of the program."""


_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Names of exceptions, torch's among them, which this module does not import."""
_ON_CPU = "can't allocate memory"  # torch's RuntimeError has no class of its own for it


def _message(error: Exception) -> str:
    """Return what to tell a user; nothing where the error is the program's."""
    if isinstance(error, SwitchError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _WAYS_OUT:
        path = "a path" if error.filename is None else os.fsdecode(error.filename)
        return f"{path} cannot be used: {error.strerror}. {_WAYS_OUT[error.errno]}"
    if type(error).__name__ in _OUT_OF_MEMORY or _ON_CPU in str(error):
        text = " ".join(str(error).split())
        return (
            f"There is not enough memory. {text:.300} Smaller are --micro-batch-size and "
            "--seq-length; --recompute-granularity needs less; megatron-switch plan says what fits."
        )
    return ""


def reporting_errors(run: Callable[[], int]) -> int:
    """Call ``run``; turn a user's error into its message and :data:`USER_ERROR`.

    A user's error is a :class:`SwitchError`, a path that the system does not let this process use,
    or more memory than there is. In a job of several ranks rank 0 reports for all.
    """
    try:
        return run()
    except (SwitchError, OSError, RuntimeError, MemoryError) as error:
        if not (message := _message(error)):
            raise
        rank = os.environ.get("RANK", "0")
        if rank != "0" and not isinstance(error, OneRankNumericError):  # others report the same
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training's would save a checkpoint
            time.sleep(_PATIENCE_S)
        where = f" (rank {rank})" if rank != "0" else ""
        print(f"\nmegatron-switch: error{where}: {message}", file=sys.stderr, flush=True)
        return USER_ERROR
