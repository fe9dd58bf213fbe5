"""Start ranks on this host by forking one parent that has imported Megatron already.

``torchrun`` starts one interpreter a rank, and each imports Megatron anew: seconds of
CPU time and hundreds of megabytes a rank. Here one process imports, then forks.

Guaranteed:

* Every rank finds in its environment what ``torchrun`` would have put there.
* A rank's output goes where the parent's goes, as it is. Only the traceback of a rank
  that fails is held back, so that the first failure is printed first; ranks that fail
  because of it (their peer is gone) get one line each. A rank that returns 2 has printed
  a user error, and nothing is added.
* SIGTERM, SIGINT and SIGHUP reach every rank once; a second one kills them. When a rank fails
  the others are terminated, and when the parent dies the kernel kills them all.
* The result is 0 only when every rank returned 0 or ``None``. Ranks that return
  :data:`megatron_switch.utils.exit_codes.SAVED` have not failed; it is the result.

Forking is safe while nothing has touched a GPU. Ranks run on one thread each unless
``OMP_NUM_THREADS`` is set, as under ``torchrun``: a thread pool that the parent has used
does not survive a fork, and ranks that wait for each other need no second thread.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from megatron_switch.emulation.patches import import_patches
from megatron_switch.upstream.patching import applied
from megatron_switch.utils.exit_codes import SAVED, SIGNALLED

_SETTLE_S = 0.1  # until failures that happened at one moment have all been reported
_GRACE_S = 10.0  # between asking a rank to end and killing it
_POLL_S = 0.02
_FAILED = 1
_EXPLAINED = 2  # a user error, which the rank has printed
_NOTE = "What rank "  # how a note on a rank's log begins
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEAVY_MODULES = (
    "megatron.training",
    "megatron.training.models.gpt",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)


def launch(num_ranks: int, target: Callable[[], int | None]) -> int:
    """Run ``target`` on ``num_ranks`` forked ranks of this host and wait for all of them.

    Call it from the main thread, which alone may receive signals.

    Args:
        num_ranks: Ranks to start, at least 1.
        target: Called on every rank without arguments; its return value is the rank's
            exit code, and ``None`` means 0. It finds ``RANK``, ``LOCAL_RANK``,
            ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Returns:
        0 when every rank succeeded, ``SAVED`` when a signal ended them after a checkpoint, else
        the exit code of the rank that failed first (128 + the signal's number when a signal ended
        it).
    """
    assert num_ranks >= 1, f"{num_ranks} ranks"
    import_megatron()
    with tempfile.TemporaryDirectory(prefix="switch-launch-") as folder, _free_port() as port:
        ranks = _Ranks(Path(folder))
        with ranks.signals_forwarded():
            for rank in range(num_ranks):
                ranks.start(_Rank(rank, num_ranks, port, Path(folder)), target)
            return ranks.wait()


def import_megatron() -> None:
    """Import what training on CPU ranks needs, so that forked ranks share it.

    Imported objects live as long as the process, so garbage collection is off meanwhile, and later
    collections, on the ranks and at exit, skip them: that saves 2 s at start and at exit.
    """
    collecting = gc.isenabled()
    gc.disable()
    with applied(import_patches()):
        for name in _HEAVY_MODULES:
            importlib.import_module(name)
    gc.freeze()
    if collecting:
        gc.enable()


@dataclass(frozen=True)
class _Rank:
    """Rank, port and folder of one rank."""

    rank: int
    num_ranks: int
    port: int
    folder: Path

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    @property
    def report(self) -> Path:
        """File in which this rank explains why it failed."""
        return self.folder / f"rank-{self.rank}.txt"


@dataclass(frozen=True)
class _Failure:
    """How one rank failed, and when, in nanoseconds."""

    code: int
    time_ns: int
    text: str  # empty where the rank has printed it

    @classmethod
    def of(cls, rank: _Rank, code: int) -> "_Failure":
        if code < 0:
            name = signal.Signals(-code).name
            return cls(SIGNALLED - code, time.time_ns(), f"rank {rank.rank} was ended by {name}")
        if not rank.report.exists():
            text = "" if code == _EXPLAINED else f"rank {rank.rank} exited with code {code}"
            return cls(code, time.time_ns(), text)
        return cls(code, rank.report.stat().st_mtime_ns, rank.report.read_text())

    @property
    def last_line(self) -> str:
        """The error itself, which stands below its traceback and above notes."""
        lines = self.text.rstrip().split("\n")
        return next((line for line in reversed(lines) if not line.startswith(_NOTE)), "")


class _Ranks:
    """The children of this launch that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, _Rank] = {}  # by process id
        self._have_saved = False

    def start(self, rank: _Rank, target: Callable[[], int | None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between the fork and the child's first lines would run the parent's handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads that the child does not have; see the module's text.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            pid = os.fork()
        if pid == 0:
            _become(rank, parent, target)
        self._running[pid] = rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

    def wait(self) -> int:
        """Wait for all ranks, ending the rest as soon as one fails; return the exit code."""
        failures: list[_Failure] = []
        while self._running and not failures:
            time.sleep(_POLL_S)
            failures += self._failed()
        if not failures:
            return SAVED if self._have_saved else 0
        time.sleep(_SETTLE_S)
        failures += self._failed()
        failures.sort(key=lambda failure: failure.time_ns)
        _print(failures[0].text)
        self._end_the_rest(failures)
        for failure in failures[1:]:
            if failure.code != SIGNALLED + signal.SIGTERM:
                _print(failure.last_line)
        return failures[0].code

    def _end_the_rest(self, failures: list[_Failure]) -> None:
        self._signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while self._running and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            failures += self._failed()
        self._signal(signal.SIGKILL)

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Pass signals on to the ranks instead of dying of them; an ignored SIGHUP stays ignored.

        A rank that trains saves a checkpoint before it ends, which may take long; a second signal
        kills the ranks, also those that hang.
        """
        forwarded = False

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal forwarded
            self._signal(signal.SIGKILL if forwarded else number)
            forwarded = True

        before = {number: signal.signal(number, forward) for number in _forwarded()}
        try:
            yield
        finally:
            self._signal(signal.SIGKILL)  # after an exception here, some may still run
            for pid in self._running:
                os.waitpid(pid, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _failed(self) -> list[_Failure]:
        """Remove the ranks that have ended; return those of them that failed."""
        failures = []
        for pid, rank in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                self._have_saved |= code == SAVED
                if code not in (0, SAVED):
                    failures.append(_Failure.of(rank, code))
        return failures

    def _signal(self, number: int) -> None:
        for pid in list(self._running):
            os.kill(pid, number)


def _forwarded() -> list[signal.Signals]:
    """Return the signals to forward; ``nohup`` has SIGHUP ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in _FORWARDED if not (ignored and each == signal.SIGHUP)]


def _print(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def _become(rank: _Rank, parent: int, target: Callable[[], int | None]) -> NoReturn:
    """Turn this forked process into a rank; never return to the parent's code."""
    code = _FAILED
    try:
        _leave_parent(parent)
        faulthandler.enable()
        os.environ.update(rank.environment())
        torch.set_num_threads(_num_threads())
        code = target() or 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except KeyboardInterrupt:
        code = SIGNALLED + signal.SIGINT
        rank.report.write_text(f"rank {rank.rank} was interrupted")
    except BaseException:
        rank.report.write_text(
            f"rank {rank.rank} of {rank.num_ranks} failed:\n{traceback.format_exc()}"
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _num_threads() -> int:
    """Return the number in ``OMP_NUM_THREADS``, else 1; like OpenMP, ignore what is no number."""
    outermost = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() and int(outermost) else 1


def _leave_parent(parent: int) -> None:
    """Restore signal handlers, and have the kernel kill this process with its parent."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(_FAILED)
    os.setpgid(0, 0)  # a terminal's Ctrl-C then arrives once, through the parent
    for number in _forwarded():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    print(exit_.code, file=sys.stderr)  # what the interpreter does with a message
    return _FAILED


@contextmanager
def _free_port() -> Iterator[int]:
    """Reserve a port until the first rank listens on it, seconds from now."""
    with socket.socket() as holder:
        # Both bind with SO_REUSEADDR and only the rank listens: Linux allows that, and does not
        # give the port to a process that asks for any free one.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
