"""A launch as values: flags, nodes, launcher, and SLURM options.

A :class:`LaunchJob` can always be rendered: its flags form a legal layout of its ranks.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_switch.architecture.model_flags import flags_with_model
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flags_of_argv
from megatron_switch.flags.train_flags import refuse_unknown
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_rules import LayoutConstraints
from megatron_switch.layout.nodes import GroupSpread
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.validation import validate_layout
from megatron_switch.planner.hardware.cluster import Hardware

Shape = Literal["srun", "torchrun"]
"""Launcher of a node's processes: one srun task per GPU, or one torchrun per node."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_MOST_SAVE_SECONDS = 65_535


@dataclass(frozen=True)
class Container:
    """A pyxis/enroot container in which every process runs.

    Attributes:
        image: Value of ``--container-image``.
        mounts: Source and destination, as ``SRC:DST``.
        workdir: Working folder inside the container; empty for the image's default.
    """

    image: str
    mounts: tuple[str, ...] = ()
    workdir: str = ""


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A training to launch.

    Attributes:
        name: Name of the job and of its scripts.
        nodes: Number of nodes.
        hardware: Hardware of a node.
        flags: Words for ``megatron-switch train``.
        run_dir: The run's folder, on a file system that all nodes share.
        shape: Launcher of a node's processes.
        time_limit: In SLURM's format.
        save_seconds: Seconds before the time limit at which the run is signalled to save.
        sbatch: Further options of sbatch, without the leading dashes.
        container: Container of the processes; None to run on the node itself.
        hostfile: File of nodes in rank order; empty for SLURM's order.
        bind: Whether ranks are bound to the NUMA node of their GPU.

    Raises:
        ConfigError: If a value cannot be written into a script.
        LayoutError: If the flags do not form a legal layout of the job's ranks.
    """

    name: str
    nodes: int
    hardware: Hardware
    flags: tuple[str, ...]
    run_dir: str
    shape: Shape = "srun"
    time_limit: str = "24:00:00"
    save_seconds: int = 300
    sbatch: tuple[str, ...] = ()
    container: Container | None = None
    hostfile: str = ""
    bind: bool = True

    def __post_init__(self) -> None:
        """Check what can be checked without the cluster."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "--name may contain letters, digits and . _ - only, because it names the scripts; "
                f"got '{self.name}'."
            )
        if not _TIME.fullmatch(self.time_limit):
            raise ConfigError(
                f"--time takes minutes, hours:minutes:seconds or days-hours:minutes:seconds, got "
                f"'{self.time_limit}'."
            )
        self._check_texts()
        self._check_times()
        for option in self.sbatch:
            _check_option(option)
        _check_container(self.container, self.run_dir)
        refuse_unknown(self.flags)
        given = {
            "switch-run-dir": "--run-dir",
            "switch-device": "arguments after the script's name",
        }
        for flag in given.keys() & flags_of_argv(self.flags).keys():
            raise ConfigError(
                f"The scripts set --{flag} themselves: omit it and use {given[flag]}."
            )
        _ = self.layout  # raises here if the layout is illegal

    def _check_texts(self) -> None:
        box = self.container
        texts = [self.hardware.gpu, self.run_dir, self.hostfile, *self.flags, *self.sbatch]
        texts += [] if box is None else [box.image, box.workdir, *box.mounts]
        for text in texts:
            if not text.isprintable():
                raise ConfigError(
                    f"A script can contain printable characters only, but {text!r} has others. "
                    "Remove them, or pass the value in a file."
                )
        if not self.run_dir or "%" in self.run_dir:
            raise ConfigError(
                "--run-dir must be a non-empty path without % (SLURM expands it in log file "
                f"names), got '{self.run_dir}'."
            )

    def _check_times(self) -> None:
        limit = seconds_of(self.time_limit)
        if self.save_seconds > _MOST_SAVE_SECONDS or 0 < limit <= self.save_seconds:
            raise ConfigError(
                "The signal to save must come before the time limit, by at most "
                f"{_MOST_SAVE_SECONDS} seconds in SLURM; got --save-seconds {self.save_seconds} "
                f"with --time {self.time_limit}. Lower --save-seconds."
            )

    @cached_property
    def values(self) -> FlagValues:
        """The flags by name, those of ``--switch-model`` included."""
        return FlagValues(flags_with_model(self.flags))

    @property
    def gpus_per_node(self) -> int:
        """GPUs, and ranks, of a node."""
        return self.hardware.gpus_per_node

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.gpus_per_node

    @cached_property
    def layout(self) -> Layout:
        """The layout that the flags describe."""
        asked = Sizes.of_flags(self.world_size, self.values)
        return validate_layout(asked, self._constraints())

    def _constraints(self) -> LayoutConstraints:
        """Return what the layout has to divide, as far as flags say it; a checkpoint may add."""
        values = self.values
        return LayoutConstraints(
            num_experts=values.integer("num-experts", None),
            num_attention_heads=values.integer("num-attention-heads", None),
            num_query_groups=values.integer("num-query-groups", None),
            seq_length=values.integer("seq-length", None),
            sequence_parallel=values.on("sequence-parallel"),
            micro_batch_size=values.integer("micro-batch-size", None),
            global_batch_size=values.integer("global-batch-size", None),
            chunk_group=values.integer("microbatch-group-size-per-virtual-pipeline-stage", None),
            capacity_group=values.text("switch-capacity-group", "microbatch"),
        )

    @property
    def experts(self) -> GroupSpread:
        """Nodes and leaf switches of an expert group, with nodes in SLURM's order."""
        return self.hardware.expert_spread(self.layout)

    @property
    def notes(self) -> list[str]:
        """Warnings about likely oversights."""
        found = []
        if not self.values.has("save-interval"):
            found.append(
                "Without --save-interval the run saves only before its time limit and at its end; "
                "if a node fails in between, all progress is lost."
            )
        missing = [flags[0] for flags in _NEEDED if not any(map(self.values.has, flags))]
        if missing:
            found.append(
                f"Training also needs {', '.join(f'--{name}' for name in missing)}: add them "
                "after --, or as arguments of the script."
            )
        return found


_NEEDED = (
    ("train-iters", "train-samples"),
    ("lr",),
    ("data-path", "data-args-path", "per-split-data-args-path", "train-data-path", "mock-data"),
    ("tokenizer-type",),
)
"""Required flags of a training run, each with its alternatives."""


def _check_option(option: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*(=\S+)?", option):
        raise ConfigError(
            f"--sbatch takes an sbatch option without leading dashes, such as account=NAME; got "
            f"'{option}'."
        )
    name = option.partition("=")[0]
    if name in _OURS:
        raise ConfigError(
            f"--sbatch {option} conflicts with an option that the script sets: {_OURS[name]}."
        )


_OURS = {
    "job-name": "use --name",
    "nodes": "use --nodes",
    "ntasks-per-node": "it follows from --shape and --gpus-per-node",
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task"), "it asks for --gres, see --gpus-per-node"
    ),
    "array": "a run folder belongs to one job; render one script per run",
    "requeue": "the script requeues the job after a save",
    "no-requeue": "the script requeues the job after a save; set MAX_RESTARTS=0 to disable it",
    "open-mode": "logs of a restarted job are appended to",
    "exclusive": "the script requests exclusive nodes",
    "ntasks": "it follows from --shape and --gpus-per-node",
    "gres": "use --gpus-per-node",
    "time": "use --time",
    "signal": "use --save-seconds",
    "output": "all logs are in --run-dir",
    "error": "all logs are in --run-dir",
    "distribution": "ranks fill nodes one after another; use --hostfile for their order",
}


def seconds_of(time_limit: str) -> int:
    """Return a SLURM time limit in seconds; 0 means none."""
    days, _, rest = time_limit.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if days:  # with days, the first number is hours; without, minutes
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_container(container: Container | None, run_dir: str) -> None:
    if container is None:
        return
    for mount in container.mounts:
        if not re.fullmatch(r"[^:,\"$`\\]+:[^,\"$`\\]+", mount):
            raise ConfigError(
                f"--container-mount takes one SOURCE:DESTINATION, got '{mount}'. Repeat the flag "
                "for more."
            )
    shared = [s for s, _, d in (mount.partition(":") for mount in container.mounts) if s == d]
    if not any(run_dir == folder or run_dir.startswith(f"{folder}/") for folder in shared):
        raise ConfigError(
            f"The run folder is written inside and outside the container under the same path, "
            f"but --run-dir {run_dir} is in no mount. Give an absolute --run-dir, and a "
            "--container-mount FOLDER:FOLDER that holds it."
        )
