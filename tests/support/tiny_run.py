"""Commands of this program on the smallest model that has everything, in forked processes.

A fork inherits what the test process has imported, so that a run costs seconds instead of half a
minute, and takes with it whatever a run leaves behind in its process.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_switch.cli import main
from megatron_switch.emulation.launch import import_megatron

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --switch-device cpu "
    "--eval-iters 0 --log-interval 1"
)
SPARSE = f"{TINY} --num-experts 4"
EXACT = (
    f"{SPARSE} --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0 "
    "--moe-z-loss-coeff 1e-3 --eval-iters 1 --eval-interval 2 --save-interval 1 "
    "--switch-metrics-interval 2"
)
"""The sparse model without noise, which gives the same numbers in every layout."""

OF_THE_CLOCK = frozenset({"time", "step_seconds", "tokens_per_second"})
"""What of a training record depends on when it was made."""

_PATIENCE_S = 100.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    screen: str
    errors: str


class Started:
    """A command that runs in a forked process, with its output in files."""

    def __init__(self, words: Sequence[str], prepare: Callable[[], None] | None = None) -> None:
        import_megatron()
        sys.stdout.flush()
        sys.stderr.flush()
        self._files = [os.memfd_create(name) for name in ("screen", "errors")]
        self._status: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="switch-command-")
        self.pid = os.fork()
        if self.pid == 0:
            tempfile.tempdir = self._folder.name  # for what ranks leave that are ended
            _become_command(words, self._files, prepare)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_running(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is None

    def wait(self) -> Outcome:
        deadline_s = time.monotonic() + _PATIENCE_S
        try:
            while self.is_running() and time.monotonic() < deadline_s:
                time.sleep(0.02)
        finally:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._folder.cleanup()
        texts = [_content(file) for file in self._files]
        assert self._status is not None, f"not done in {_PATIENCE_S:.0f} s\n" + "\n".join(texts)
        return Outcome(os.waitstatus_to_exitcode(self._status), *texts)


def run_command(*words: str, prepare: Callable[[], None] | None = None) -> Outcome:
    """Run a command to its end; ``prepare`` is called in its process before it."""
    return Started(words, prepare).wait()


def train(flags: str, *, ranks: int = 1, prepare: Callable[[], None] | None = None) -> Outcome:
    """Train on as many ranks as are asked for."""
    launcher = ["train"] if ranks == 1 else ["launch-local", "-n", str(ranks)]
    return run_command(*launcher, *flags.split(), prepare=prepare)


def trained(flags: str, *, ranks: int = 1, prepare: Callable[[], None] | None = None) -> Outcome:
    """Train, and see to it that it succeeded."""
    outcome = train(flags, ranks=ranks, prepare=prepare)
    assert outcome.code == 0, outcome.screen + outcome.errors
    return outcome


def read_records(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the records of one kind of a metrics file."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


def _become_command(
    words: Sequence[str], files: list[int], prepare: Callable[[], None] | None
) -> NoReturn:
    code = 1
    try:
        for file, target in zip(files, (1, 2), strict=True):
            os.dup2(file, target)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # pytest has its own
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
        torch.set_num_threads(1)
        if prepare is not None:
            prepare()
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _content(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(file, encoding="utf-8", errors="replace") as stream:
        return stream.read()
