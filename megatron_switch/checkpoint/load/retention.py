"""Which checkpoints of a run are kept, and deleting the others.

The newest N complete ones are kept (``--switch-keep-checkpoints``), and those at multiples of
``--save-retain-interval``. Megatron has the second flag, keeps one newest checkpoint beside it, and
fails in a folder that began with weights only; so a run with either flag uses these rules instead.

Only what is older than the iteration that the tracker names, and than N complete ones, is ever
deleted: a save that is under way, or was interrupted, is never the reason for a deletion.
"""

import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from megatron_switch.checkpoint.formats.dist_metadata import find_defect
from megatron_switch.checkpoint.load.files import TRACKER

_PREFIX = "iter_"


@dataclass(frozen=True)
class Retention:
    """How many checkpoints of a run are kept.

    Attributes:
        newest: How many of the newest complete ones.
        every: Multiples of this iteration are kept too; None for none.
    """

    newest: int
    every: int | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> "Retention | None":
        """Return what the arguments ask for; None where every checkpoint is kept."""
        newest, every = args.switch_keep_checkpoints, args.save_retain_interval
        return None if newest is every is None else cls(newest or 1, every)

    def superfluous(
        self, iterations: Sequence[int], saved: int, is_complete: Callable[[int], bool]
    ) -> list[int]:
        """Return the iterations that need not be kept, oldest first.

        Args:
            iterations: All there are.
            saved: The newest one that was saved completely.
            is_complete: Whether all of an iteration is there.
        """
        kept: list[int] = []
        older = []
        for iteration in sorted((each for each in iterations if each <= saved), reverse=True):
            if len(kept) == self.newest:
                older.append(iteration)
            elif is_complete(iteration):
                kept.append(iteration)
        return [each for each in reversed(older) if not (self.every and each % self.every == 0)]

    def apply(self, folder: Path) -> Thread | None:
        """Delete what need not be kept in a folder of checkpoints, beside the training.

        Args:
            folder: The folder with the tracker file.

        Returns:
            What deletes; None where nothing is to be deleted.
        """
        saved = (folder / TRACKER).read_text(encoding="utf-8").strip()
        if not saved.isdecimal():
            return None
        there = {
            int(path.name.removeprefix(_PREFIX)): path
            for path in folder.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdecimal()
        }
        names = self.superfluous(
            list(there), int(saved), lambda iteration: find_defect(there[iteration]) is None
        )
        # A link may lead to a checkpoint that another run needs.
        doomed = [there[name] for name in names if not there[name].is_symlink()]
        if not doomed:
            return None
        listing = ", ".join(each.name for each in doomed)
        print(f"Deleting old checkpoints in {folder}: {listing}.", flush=True)
        thread = Thread(target=_delete, args=(doomed,))
        thread.start()
        return thread


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            print(f"The old checkpoint {folder} could not be deleted: {error}.", flush=True)
