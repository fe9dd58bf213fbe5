"""One folder holds everything of a run, and a script that continues it.

    checkpoints/      Megatron's checkpoints            metrics.jsonl   one line an iteration
    tensorboard/      TensorBoard events                ranks.csv       the groups of each rank
    log/              everything Megatron printed       run.json        what it is, its starts
                                                        resume.sh       continues it

A folder belongs to one run: its identity (data, seed, model; the flags that declare it, see
:class:`megatron_switch.flags.traits.Traits`) is compared with the ``run.json`` found there, and a
folder of another run, or of something else, is refused. Layout, schedule and logging may change
from start to start; what a checkpoint permits is checked when it is loaded.
"""

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_switch.checkpoint.load.files import (
    CHECKPOINTS,
    has_checkpoint,
    interrupted_first_save,
    is_same_folder,
)
from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import table_as_csv
from megatron_switch.training.logs.run_record import RunRecord, identity_of
from megatron_switch.utils.atomic_file import renamed_into_place

RECORD = "run.json"
COMMAND_VARIABLE = "MEGATRON_SWITCH_COMMAND"
"""Environment variable in which a launcher leaves its own command line for ``resume.sh``."""

_OWN_NAMES = frozenset(
    {
        "checkpoints",
        "launch",
        "tensorboard",
        "log",
        "metrics.jsonl",
        "ranks.csv",
    }  # launch: scripts'
)
_SAVE_INTERVAL = 1000


class RunFolder:
    """The folder of one run.

    Args:
        path: The folder; created where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.tensorboard = path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log"
        self._rank_table = path / "ranks.csv"
        self._run = path / RECORD
        self._record = RunRecord(self._run)
        self._resume = path / "resume.sh"

    def apply(self, args: Namespace, explicit: Collection[str]) -> tuple[str, ...]:
        """Point the flags that were not given at this folder.

        What the run has saved is loaded, so that the same command starts and continues, also where
        the start is another run's checkpoint (``--load`` with ``--finetune``).

        Args:
            args: Parsed arguments, changed in place.
            explicit: Attributes whose flag stood on the command line.

        Returns:
            What the user should know.
        """
        places: dict[str, object] = {
            "save": str(self.checkpoints),
            "tensorboard_dir": str(self.tensorboard),
            "switch_metrics_file": str(self.metrics),
        }
        if args.save_interval is None:
            places["save_interval"] = _SAVE_INTERVAL
        for name, place in places.items():
            if name not in explicit:
                setattr(args, name, place)
        saved = Path(args.save)
        if is_same_folder(args.load, args.save):
            args.load = args.save
        if args.load == args.save or not has_checkpoint(saved) or interrupted_first_save(saved):
            return ()
        started_from = args.load
        args.load = args.save
        if started_from is None:
            return ()
        args.finetune, args.ckpt_step = False, None
        return (f"Continuing from {args.save}; --load {started_from} was where this run began.",)

    def check_ownership(self) -> None:
        """Make sure, before anything is written into it, that the folder is meant for runs.

        Raises:
            ConfigError: It holds files that no run writes, or is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--switch-run-dir {self.path} is a file. Give a folder.")
        names = {each.name for each in self.path.iterdir()} if self.path.exists() else set()
        if self._run.name in names:
            return
        # Other ranks may be a moment ahead and write already, at first under hidden names.
        foreign = sorted(n for n in names - _OWN_NAMES if not n.startswith("."))
        if foreign:
            raise ConfigError(
                f"--switch-run-dir {self.path} is not empty and holds no run.json: it has "
                f"{', '.join(foreign[:5])}. Give a new folder, or that of a run to continue."
            )

    def check_identity(self, args: Namespace) -> None:
        """Check that the folder belongs to this run, or to no run yet.

        Args:
            args: Validated arguments.

        Raises:
            ConfigError: It holds another run, or a ``run.json`` that cannot be read.
        """
        if self._run.exists():
            self._compare(args)

    def describe(
        self,
        args: Namespace,
        argv: list[str],
        device: str,
        *,
        layout: Layout,
        hosts: Sequence[str],
        ranks_per_node: int,
    ) -> None:
        """Write ``run.json``, ``resume.sh`` and ``ranks.csv``.

        Args:
            args: Arguments of a run that has loaded its checkpoint.
            argv: The command line.
            device: Where the run trains.
            layout: The ranks.
            hosts: The host of each rank.
            ranks_per_node: Ranks on each node.
        """
        command = os.environ.get(COMMAND_VARIABLE) or shlex.join(_this_command(argv))
        if args.load == args.save:  # the tracker names that iteration, or what was saved since
            command = _without_step(command)
        self._record.begin(args, command, device, layout=layout, hosts=hosts)
        with renamed_into_place(self._resume) as file:
            file.write(_RESUME.format(folder=shlex.quote(os.getcwd()), command=command))
        self._resume.chmod(0o755)
        with renamed_into_place(self._rank_table) as file:
            file.write(
                table_as_csv(
                    layout,
                    num_experts=args.num_experts,
                    ranks_per_node=ranks_per_node,
                    hosts=hosts,
                )
            )

    def record_end(self, *, code: int, reason: str, iteration: int) -> None:
        """Write into ``run.json`` how this start ended.

        Args:
            code: Exit code of the process.
            reason: Why, in a few words.
            iteration: The last iteration.
        """
        self._record.end(code=code, reason=reason, iteration=iteration)

    def _compare(self, args: Namespace) -> None:
        try:
            found = self._record.identity()
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._run} cannot be read as the record of a run ({error!r}). Give another "
                "--switch-run-dir."
            ) from error
        wanted = json.loads(json.dumps(identity_of(args)))
        lines = [
            f"\n  --{name.replace('_', '-')}: {found.get(name)} there, {value} now"
            for name, value in wanted.items()
            if found.get(name) != value
        ]
        if lines:
            raise ConfigError(
                f"--switch-run-dir {self.path} belongs to another run:{''.join(lines)}\n"
                "Give another folder, or that run's own flags (its resume.sh has them)."
            )


_RESUME = """\
#!/usr/bin/env bash
# Continues this run from its newest checkpoint. More flags may follow. Where torchrun started it on
# several nodes: run this on each, with PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT set.
# A run that has finished says so and does nothing.
# To train longer than was planned: --train-iters N --override-opt_param-scheduler
set -eu
cd {folder}
exec {command} "$@"
"""


def _without_step(command: str) -> str:
    """Return a command line without ``--ckpt-step``."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        if word == "--ckpt-step":
            next(words, None)
        elif not word.startswith("--ckpt-step="):
            kept.append(word)
    return shlex.join(kept)


def _this_command(argv: list[str]) -> list[str]:
    """Return how this process would be started again."""
    train = [sys.executable, "-m", "megatron_switch", "train"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={local}"]
        torchrun.append(f"--nnodes={ranks // local}")
        train = [sys.executable, *torchrun, "-m", "megatron_switch", "train"]
    return [*train, *argv]
