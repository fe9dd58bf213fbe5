"""What reaches the screen: the lines one reads, and not the eight hundred one does not.

Megatron prints its whole argument list, its set-up and every warning of every library. Inside
:class:`Console` the screen shows progress, evaluation and checkpoint lines and what this package
says; everything else goes to a log file, per rank. Warnings that are known to be harmless are
counted and explained in one line.

Without a run folder the log lives in a temporary file, which stays only if the run fails.
"""

import logging
import os
import re
import sys
import tempfile
import warnings
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_SHOWN = re.compile(
    r"^\s*(\[[^\]]*\]\s+iteration\s|validation\S* loss at|(validation|test) routing at|"
    r"saving checkpoint|successfully saved|loading (distributed )?checkpoint|successfully loaded|"
    r"could not find .* checkpoint|exiting program|\[exiting program)",
)


class Console:
    """Splits standard output into screen and log while its block runs.

    Args:
        log_folder: Folder for one log a rank, or None for a temporary file.
        rank: This process's rank; only rank 0 speaks through :meth:`say`.
    """

    def __init__(self, log_folder: Path | None, *, rank: int) -> None:
        self._rank = rank
        self._screen = sys.stdout
        self._temporary = log_folder is None
        if log_folder is None:
            handle, name = tempfile.mkstemp(prefix=f"megatron-switch-{rank}-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        else:
            log_folder.mkdir(parents=True, exist_ok=True)
            self.log_path = log_folder / f"rank-{rank}.log"
        self._stack = ExitStack()

    def __enter__(self) -> "Console":
        """Take over standard output, warnings and log records."""
        log = self._stack.enter_context(self.log_path.open("a", encoding="utf-8", buffering=1))
        self._screen = sys.stdout
        self._stack.enter_context(redirect_stdout(_Splitter(self._screen, log)))
        self._quiet_warnings(log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give everything back; keep a temporary log only if the run failed."""
        self._stack.close()
        if not self._temporary:
            return
        if kind is None or (kind is SystemExit and not getattr(error, "code", 0)):
            self.log_path.unlink()
        elif self._rank == 0:
            print(f"All that was printed: {self.log_path}", file=sys.stderr)

    def say(self, text: str) -> None:
        """Print to the screen, once for all ranks."""
        if self._rank == 0:
            print(text, file=self._screen, flush=True)

    def _quiet_warnings(self, log: TextIO) -> None:
        """Send warnings and library log records to the log; they are not errors."""
        saved = warnings.showwarning

        def to_log(
            message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any
        ) -> None:
            log.write(warnings.formatwarning(message, category, filename, lineno))

        warnings.showwarning = to_log  # type: ignore[assignment]
        self._stack.callback(setattr, warnings, "showwarning", saved)

        root = logging.getLogger()
        handler = logging.StreamHandler(log)
        before = root.handlers[:]
        root.handlers[:] = [handler]
        self._stack.callback(root.handlers.__setitem__, slice(None), before)


class _Splitter:
    """A text stream that sends each complete line to the screen or to the log."""

    def __init__(self, screen: TextIO, log: TextIO) -> None:
        self._screen = screen
        self._log = log
        self._pending = ""

    def write(self, text: str) -> int:
        self._pending += text
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            self._log.write(line + "\n")
            if _SHOWN.match(line):
                self._screen.write(line + "\n")
                self._screen.flush()
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._screen.fileno()
