"""What a signal does while a run trains: save, say so, and end with an exit code of its own.

Megatron's loop asks after every iteration whether a rank has received the signal of
``--exit-signal``, then saves and exits with code 0, as a finished run does. Here SIGHUP, which a
terminal sends when it is closed, is treated like that signal unless it is ignored (``nohup``), and
the exit code says that the run can be continued.
"""

import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from megatron.training.dist_signal_handler import DistributedSignalHandler, all_gather_item

from megatron_switch.utils.exit_codes import SAVED, SIGNALLED

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"


def code_after(number: int, *, saves: bool, environ: Mapping[str, str]) -> int:
    """Return the exit code of a run that a signal has ended.

    Args:
        number: The signal.
        saves: Whether the run has saved a checkpoint, ``--save`` being given.
        environ: Environment variables of the process.
    """
    if _UNDER_TORCHRUN in environ:
        return 0  # any other code is a failure to torchrun, which would start the ranks again
    return SAVED if saves else SIGNALLED + number


class ExitSignals(DistributedSignalHandler):  # type: ignore[misc]
    """Megatron's handler for the signal of ``--exit-signal``, and for SIGHUP.

    Args:
        number: The signal.
        saves: Whether the run has a folder for checkpoints.
        say: Prints a line on the screen.

    Attributes:
        ended_by: The signal that any rank has received; None while there is none.
    """

    def __init__(self, number: int, *, saves: bool, say: Callable[[str], None]) -> None:
        super().__init__(signal.Signals(number))
        self._saves = saves
        self._say = say
        self._received = 0
        self.ended_by: signal.Signals | None = None

    def __enter__(self) -> "ExitSignals":
        """Handle the signals until the process ends: a second one may come while it saves."""
        signal.signal(self.sig, self._receive)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._receive)
        return self

    def release(self) -> bool:
        """Keep the handlers, see above."""
        return False

    def signals_received(self) -> list[int]:
        """Return the signal that each rank has received, 0 for none; every rank calls this."""
        numbers: list[int] = all_gather_item(self._received, dtype=torch.int32)
        if any(numbers) and self.ended_by is None:
            self.ended_by = signal.Signals(max(numbers))
            self._say(self._text(self.ended_by))
        return numbers

    def _text(self, received: signal.Signals) -> str:
        code = code_after(received, saves=self._saves, environ=os.environ)
        if self._saves:
            return f"{received.name} received: saving a checkpoint, then ending (exit code {code})."
        return (
            f"{received.name} received: ending (exit code {code}). Nothing is saved without --save "
            "or --switch-run-dir."
        )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGHUP:
            _leave_terminal()


def _leave_terminal() -> None:
    """Write nothing to a terminal any more: it is gone, and a write would be an error."""
    for stream in (1, 2):
        if os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def exit_signals(args: Any, say: Callable[[str], None]) -> ExitSignals | None:
    """Return the handler that the arguments ask for, not yet installed.

    Args:
        args: Validated arguments.
        say: Prints a line on the screen.
    """
    if not args.exit_signal_handler:
        return None
    return ExitSignals(args.exit_signal, saves=args.save is not None, say=say)
