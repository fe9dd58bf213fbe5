"""Exit codes of the program, and how a user's error becomes a message and one of them."""

import os
import signal
import sys
import time
from collections.abc import Callable

from megatron_switch.errors import OneRankNumericError, SwitchError

USER_ERROR = 2
INTERRUPTED = 130
"""What shells return for a command that Ctrl-C ended."""
PIPE_CLOSED = 141
"""What they return for one that wrote to a pipe without a reader."""

_PATIENCE_S = 3.0  # long enough for rank 0's message to end the job first


def reporting_errors(run: Callable[[], int]) -> int:
    """Call ``run``; turn a user's error into its message and :data:`USER_ERROR`.

    In a job of several ranks rank 0 reports for all.
    """
    try:
        return run()
    except SwitchError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0" and not isinstance(error, OneRankNumericError):  # others report the same
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training's would save a checkpoint
            time.sleep(_PATIENCE_S)
        where = f" (rank {rank})" if rank != "0" else ""
        print(f"\nmegatron-switch: error{where}: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
