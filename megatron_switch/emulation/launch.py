"""Start ranks on this host by forking one parent that has imported Megatron already.

``torchrun`` starts one interpreter a rank, and each imports Megatron anew: seconds of
CPU time and hundreds of megabytes a rank. Here one process imports, then forks.

Guaranteed:

* Every rank finds in its environment what ``torchrun`` would have put there.
* A rank's output goes where the parent's goes, as it is. Only the traceback of a rank
  that fails is held back, so that the first failure is the first thing to read; ranks
  that fail because of it (their peer is gone) get one line each.
* SIGTERM and SIGINT reach every rank once. When a rank fails the others are ended, and
  when the parent dies the kernel ends them all.
* The result is 0 only when every rank returned 0 or ``None``.

Forking is safe while nothing has touched a GPU. A parent that has already used torch's
thread pool hands a dead one to its children, so ranks get one thread each then, and
otherwise their share of the cores.
"""

import ctypes
import faulthandler
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

_GRACE_S = 10.0  # between asking a rank to end and killing it
_POLL_S = 0.02
_FAILED = 1
_SIGNALLED = 128  # a shell's exit code for "ended by signal n" is 128 + n
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_HEAVY_MODULES = (
    "megatron.training",
    "megatron.training.training",
    "megatron.training.models.gpt",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_layer_specs",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)


def launch(num_ranks: int, target: Callable[[], int | None]) -> int:
    """Run ``target`` on ``num_ranks`` forked ranks of this host and wait for all of them.

    Args:
        num_ranks: Ranks to start, at least 1.
        target: Called on every rank without arguments; its return value is the rank's
            exit code, and ``None`` means 0. It finds ``RANK``, ``LOCAL_RANK``,
            ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Returns:
        0 when every rank succeeded, else the exit code of the rank that failed first
        (128 + the signal's number when a signal ended it).
    """
    assert num_ranks >= 1, f"{num_ranks} ranks"
    import_megatron()
    threads = _threads_per_rank(num_ranks)
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="switch-launch-") as folder:
        ranks = _Ranks(Path(folder))
        with ranks.signals_forwarded():
            for rank in range(num_ranks):
                ranks.start(_Rank(rank, num_ranks, port, threads), target)
            return ranks.wait()


def import_megatron() -> None:
    """Import what training needs, so that forked ranks share it."""
    for name in _HEAVY_MODULES:
        importlib.import_module(name)


@dataclass(frozen=True)
class _Rank:
    """What one rank is told."""

    rank: int
    num_ranks: int
    port: int
    threads: int

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class _Ended:
    """How one rank ended; ``time_ns`` orders ranks that ended within one poll."""

    rank: int
    code: int
    time_ns: int
    report: str


class _Ranks:
    """The children of this launch that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, int] = {}  # process id -> rank

    def start(self, rank: _Rank, target: Callable[[], int | None]) -> None:
        with warnings.catch_warnings():
            # Python warns of threads that are not there in the child; see the module's text.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            pid = os.fork()
        if pid == 0:
            _become(rank, self._report_of(rank.rank), target)
        self._running[pid] = rank.rank

    def wait(self) -> int:
        """Wait for all ranks, ending the rest as soon as one fails; return the exit code."""
        first: _Ended | None = None
        deadline_s = float("inf")
        while self._running:
            for ended in self._reap():
                if ended.code == 0:
                    continue
                if first is None:
                    first = ended
                    print(ended.report, file=sys.stderr, flush=True)
                    deadline_s = time.monotonic() + _GRACE_S
                    self._signal(signal.SIGTERM)
                elif ended.code != _SIGNALLED + signal.SIGTERM:
                    print(ended.report.rstrip().splitlines()[-1], file=sys.stderr, flush=True)
            if time.monotonic() > deadline_s:
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        return 0 if first is None else first.code

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Pass SIGTERM and SIGINT on to the ranks instead of dying of them."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._signal(number)

        before = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            yield
        finally:
            self._signal(signal.SIGKILL)  # only after an exception here do any still run
            for number, handler in before.items():
                signal.signal(number, handler)

    def _reap(self) -> list[_Ended]:
        ended = []
        for pid, rank in list(self._running.items()):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                del self._running[pid]
                ended.append(self._ended(rank, os.waitstatus_to_exitcode(status)))
        return sorted(ended, key=lambda each: each.time_ns)

    def _ended(self, rank: int, code: int) -> _Ended:
        report = self._report_of(rank)
        if code < 0:
            name = signal.Signals(-code).name
            return _Ended(rank, _SIGNALLED - code, 0, f"rank {rank} was ended by {name}")
        if not report.exists():
            return _Ended(rank, code, time.time_ns(), f"rank {rank} exited with code {code}")
        return _Ended(rank, code, report.stat().st_mtime_ns, report.read_text())

    def _signal(self, number: int) -> None:
        for pid in list(self._running):
            os.kill(pid, number)

    def _report_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"


def _become(rank: _Rank, report: Path, target: Callable[[], int | None]) -> NoReturn:
    """Turn this forked process into a rank; never return to the parent's code."""
    code = _FAILED
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)  # a terminal's Ctrl-C then arrives once, through the parent
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable()
        os.environ.update(rank.environment())
        torch.set_num_threads(rank.threads)
        code = target() or 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except BaseException:
        report.write_text(f"rank {rank.rank} of {rank.num_ranks} failed:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    print(exit_.code, file=sys.stderr)  # what the interpreter does with a message
    return _FAILED


def _threads_per_rank(num_ranks: int) -> int:
    if len(os.listdir("/proc/self/task")) > 1:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
