"""What reaches the screen: everything but Megatron's eight hundred lines of arguments and set-up.

Inside :class:`Console` all output goes to a log file, one a rank. The screen leaves out what is
known to need no reading (:data:`_HIDDEN`, warnings and log records of libraries), so that a line
that is not listed is shown. A sound run produces half a dozen warnings that need no action
(:mod:`megatron_switch.training.logs.known_warnings`): the log explains each below the first of its
kind, and the screen has one line that says so.

The log lives in a temporary file, which stays only if the run fails. With a run folder it moves
there once the checks before training have passed, so that a refused run leaves no files.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron_switch.errors import SwitchError
from megatron_switch.training.logs.evaluation_names import named_line
from megatron_switch.training.logs.known_warnings import find_known_warning

_ARGUMENTS_BEGIN, _ARGUMENTS_END = "--- arguments ---", "--- end of arguments ---"
_HIDDEN = re.compile(
    "|".join(
        (
            r"\s*$",
            r"-+\s*$",
            r"\s*>+ (?!WARNING)",  # steps of the set-up
            r"\[(before|after) .*\] datetime:",
            r"\[exiting program after receiving SIGTERM\.\]",  # said before, with the signal's name
            r"\[Rank \d+\] .* memory \(MB\)",
            r".*time across ranks \(ms\):|    \S+ \.+: \(|  +rank +\d+: [\d.]+$",  # timers
            r"(Total n|N)umber of .* in billions|Theoretical memory|Activation memory",
            r"Memory penalty|Number of in-flight|compute_activation_memory",
            r"    (train|validation|test): +\w+$",
            r"using world size|using torch\.\w+ for parameters|setting global batch size",
            r"Number of virtual stages|accumulate and all-reduce|init_persistent_async_worker",
            r"(model parallel|torch distributed) is already initialized|time to initialize",
            r"done with setup|training \.\.\.$|Evaluating (on|iter)",
            r"Storing distributed optimizer| checkpoint version|sharded_state_dict metadata",
            r".*[Rr]erun[_ ]state",
        )
    )
)
"""Beginnings of lines that Megatron prints in every sound run."""


class Console:
    """Splits standard output into screen and log while its block runs.

    Args:
        log_folder: Folder of one log a rank after :meth:`commit_log`; None for a temporary file.
        rank: This process's rank; only rank 0 prints through :meth:`say`.
        world_size: Ranks altogether; only the last prints through :meth:`say_beside_losses`.
        trains: Whether the run trains, or evaluates only.
    """

    def __init__(
        self, log_folder: Path | None, *, rank: int, world_size: int = 1, trains: bool = True
    ) -> None:
        self._trains = trains
        self._rank = rank
        self._world_size = world_size
        self._screen = sys.stdout
        self._log_folder = log_folder
        self._temporary = True
        handle, name = tempfile.mkstemp(prefix=f"megatron-switch-{rank}-", suffix=".log")
        os.close(handle)
        self.log_path = Path(name)
        self._log: TextIO
        self._explained: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> "Console":
        """Take over standard output, warnings and log records."""
        self._log = self.log_path.open("a", encoding="utf-8", buffering=1)
        self._stack.callback(lambda: self._log.close())  # of whatever it is by then
        self._screen = sys.stdout
        splitter = _Splitter(self._screen, self._note, trains=self._trains)
        self._stack.callback(splitter.close)
        self._stack.enter_context(redirect_stdout(splitter))
        self._quiet_warnings()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore everything; keep a temporary log only if the run failed.

        A user error is explained by its message, so its log is removed too.
        """
        self._stack.close()
        if not self._temporary:
            return
        exited = isinstance(error, SystemExit) and not error.code
        if error is None or exited or isinstance(error, SwitchError):
            self.log_path.unlink()
        else:
            error.add_note(f"What rank {self._rank} printed before: {self.log_path}")

    def commit_log(self) -> None:
        """Move the log into its folder, if it has one: the run has begun."""
        if self._log_folder is None or not self._temporary:
            return
        self._log_folder.mkdir(parents=True, exist_ok=True)
        path = self._log_folder / f"rank-{self._rank}.log"
        log = path.open("a", encoding="utf-8", buffering=1)
        self._log.close()
        with self.log_path.open(encoding="utf-8") as before:
            shutil.copyfileobj(before, log)
        self.log_path.unlink()
        self._log, self.log_path, self._temporary = log, path, False

    def say(self, text: str) -> None:
        """Print to the screen, once for all ranks, and to the log."""
        self._write(text, shown=self._rank == 0)

    def say_beside_losses(self, text: str) -> None:
        """Do the same on the rank that prints the losses, so that one log has both."""
        self._write(text, shown=self._rank == self._world_size - 1)

    def _write(self, text: str, *, shown: bool) -> None:
        self._log.write(text + "\n")
        if shown:
            print(text, file=self._screen, flush=True)

    @property
    def log_text(self) -> str:
        """Where all output is, for the start-up text."""
        known = "all output; warnings that need no action are explained there"
        if self._log_folder is None:
            return f"{self.log_path}, kept only if the run fails: {known}"
        return f"{self._log_folder}: {known}"

    def _note(self, line: str) -> None:
        """Write a line to the log; if it is a known warning, explain it the first time."""
        self._log.write(line + "\n")
        known = find_known_warning(line)
        if known is not None and known.pattern not in self._explained:
            self._explained.add(known.pattern)
            self._log.write(f"    (known, no action needed: {known.meaning})\n")

    def _quiet_warnings(self) -> None:
        """Send warnings and library log records to the log; they are not errors."""
        saved = warnings.showwarning

        def to_log(
            message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any
        ) -> None:
            self._note(warnings.formatwarning(message, category, filename, lineno).rstrip("\n"))

        warnings.showwarning = to_log
        self._stack.callback(setattr, warnings, "showwarning", saved)

        root = logging.getLogger()
        handlers = root.handlers[:]
        root.handlers[:] = [_Handler(self._note)]
        self._stack.callback(root.handlers.__setitem__, slice(None), handlers)


class _Handler(logging.Handler):
    """Hands log records on as lines."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(self.format(record))


class _Splitter:
    """A text stream that notes each complete line, and shows it unless it is known noise."""

    def __init__(self, screen: TextIO, note: Callable[[str], None], *, trains: bool) -> None:
        self._screen = screen
        self._trains = trains
        self._note = note
        self._pending = ""
        self._in_arguments = False

    def write(self, text: str) -> int:
        self._pending += text
        *lines, self._pending = self._pending.split("\n")
        for line in (named_line(each, trains=self._trains) for each in lines):
            self._note(line)
            if not self._is_hidden(line):
                self._screen.write(line + "\n")
                self._screen.flush()
        return len(text)

    def _is_hidden(self, line: str) -> bool:
        if _ARGUMENTS_BEGIN in line or _ARGUMENTS_END in line:
            self._in_arguments = _ARGUMENTS_BEGIN in line
            return True
        known = _HIDDEN.match(line) is not None or find_known_warning(line) is not None
        return self._in_arguments or known

    def close(self) -> None:
        """Write what was printed without an end of line."""
        if self._pending:
            self.write("\n")

    def flush(self) -> None:
        """Nothing waits here but the beginning of a line, which stays until its end comes."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._screen.fileno()
