"""What a run writes beside its log: folders that it alone may write to, and records of its start.

All of it is done on the first rank. A run that is refused creates nothing, and a start that fails
while it loads changes no record: before, it would leave a ``resume.sh`` that fails as well.
"""

import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from signal import Signals

import torch

from megatron_switch.checkpoint.load.retention import Retention
from megatron_switch.errors import SwitchError
from megatron_switch.layout.grid import Layout
from megatron_switch.training.logs.run_folder import RunFolder
from megatron_switch.training.preflight.resume import clear_the_way
from megatron_switch.training.preflight.write_targets import (
    check_write_targets,
    make_write_targets,
)
from megatron_switch.upstream.tracker import after_saving
from megatron_switch.utils.exit_codes import INTERRUPTED, USER_ERROR
from megatron_switch.utils.folder_lock import FolderLock

_FAILED = 1
_SHOWN = 200  # characters of an error


class RunOutputs:
    """The folders and records of one run.

    Args:
        args: Arguments, with the run folder's places filled in.
        folder: The folder of the run, if it has one.
    """

    def __init__(self, args: Namespace, folder: RunFolder | None) -> None:
        self._args = args
        self._folder = folder
        self._locks = _locks(args)

    def check(self) -> None:
        """Check that the run can write what it will write.

        Raises:
            ConfigError: It cannot, or another run does.
        """
        if self._args.rank == 0:
            check_write_targets(self._args)
            self._lock()

    def create(self) -> None:
        """Create what the run writes to; nothing can refuse the run now."""
        if self._args.rank == 0:
            make_write_targets(self._args)
            self._lock()

    def record_start(
        self,
        argv: list[str],
        device: str,
        layout: Layout,
        hosts: Sequence[str],
        *,
        ranks_per_node: int,
    ) -> None:
        """Record this start: its checkpoint is loaded, it can train.

        Args:
            argv: The command line.
            device: Where the run trains.
            layout: The ranks.
            hosts: The host of each rank.
            ranks_per_node: Ranks on each node.
        """
        if not self._records():
            return
        clear_the_way(self._args)
        if self._folder is not None:
            self._folder.describe(
                self._args,
                argv,
                device,
                layout=layout,
                hosts=hosts,
                ranks_per_node=ranks_per_node,
            )
        self._args.save_retain_interval = None  # Megatron would keep one checkpoint only

    @contextmanager
    def old_checkpoints_deleted(self) -> Iterator[None]:
        """Delete old checkpoints after each save within a block, as the flags say."""
        retention = Retention.from_args(self._args)
        with nullcontext() if retention is None else after_saving(retention.apply):
            yield

    def record_end(
        self, error: BaseException | None, signal: Signals | None, code_of_signal: int
    ) -> None:
        """Record how this start ended.

        Args:
            error: What ended it; None where it took its last step.
            signal: The signal that asked for it, if one did.
            code_of_signal: The exit code that this signal gives.
        """
        if not self._records() or self._folder is None:
            return
        code, reason = ending(error)
        if signal is not None and code == 0:
            code, reason = code_of_signal, signal.name
        with suppress(OSError):  # on a full disk, which is then what ended the run
            self._folder.record_end(code=code, reason=reason, iteration=self._iteration(code))

    def _iteration(self, code: int) -> int:
        """Return the last iteration that was completed."""
        args = self._args
        begun: int | None = getattr(args, "curr_iteration", None)  # counted from 0
        if begun is None or args.skip_train:
            return int(getattr(args, "iteration", 0))
        return begun if code in (_FAILED, USER_ERROR, INTERRUPTED) else begun + 1

    def _records(self) -> bool:
        return self._args.rank == 0 and not self._args.fake_process_group

    def _lock(self) -> None:
        for lock in self._locks:
            lock.acquire()


def ending(error: BaseException | None) -> tuple[int, str]:
    """Return exit code and reason of a training that no signal has ended.

    Args:
        error: What ended it; None where it took its last step.
    """
    if error is None:
        return 0, "finished"
    if isinstance(error, SystemExit) and not error.code:
        return 0, "a flag that ends it early, such as --exit-interval"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "SIGINT"
    text = f"{type(error).__name__}: {error}".splitlines()[0][:_SHOWN]
    return USER_ERROR if isinstance(error, SwitchError) else _FAILED, text


def host_names(args: Namespace) -> list[str]:
    """Return the host of each rank; every rank calls this.

    Args:
        args: Arguments of a run whose process groups exist.
    """
    names = [socket.gethostname()] * int(args.world_size)
    if not args.fake_process_group and args.world_size > 1:
        torch.distributed.all_gather_object(names, socket.gethostname())
    return names


def _locks(args: Namespace) -> list[FolderLock]:
    """Return the locks of the folders in which no other run may save."""
    folders = {args.switch_run_dir: "--switch-run-dir", args.save: "--save"}
    if args.skip_train:
        folders.pop(args.save)
    return [FolderLock(Path(folder), flag) for folder, flag in folders.items() if folder]
