"""``megatron-switch render-launch``: scripts that start a planned or described training.

    megatron-switch plan ... --json > plan.json
    megatron-switch render-launch --plan plan.json --run-dir runs/big -- DATA FLAGS
    megatron-switch render-launch --nodes 4 --hardware h100-80gb-ndr --run-dir runs/big -- FLAGS

It writes NAME.sbatch for SLURM and NAME.sh for nodes without. Nothing heavy is imported: it answers
at once on a login node without a GPU.
"""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import split_train_flags
from megatron_switch.launch.environment import generation_of
from megatron_switch.launch.job import Container, LaunchJob
from megatron_switch.launch.render import rehearsal_flags, render_sbatch, render_shell
from megatron_switch.planner.hardware.cluster import load_hardware, preset_names
from megatron_switch.planner.plan_file import read_plan
from megatron_switch.utils.argument_types import count
from megatron_switch.utils.atomic_file import renamed_into_place

_HARDWARE = "h100-80gb-ndr"


def run(args: Namespace) -> int:
    """Write the scripts, say how they are started, and return the exit code.

    Raises:
        SwitchError: If the job cannot be launched, or the scripts cannot be written.
    """
    job = _job(args, args.train_flags)
    generation = args.generation or generation_of(job.hardware.gpu)
    command = ["megatron-switch", "render-launch", *_without_output(args.argv)]
    folder = Path(args.output)
    texts = {
        folder / f"{job.name}.sbatch": render_sbatch(job, generation, command),
        folder / f"{job.name}.sh": render_shell(job, generation, command),
    }
    _write(texts, force=args.force)
    for note in job.notes:
        print(f"Note: {note}")
    sbatch, shell = map(str, texts)
    print(f"Wrote {sbatch} and {shell}, for {job.world_size} ranks of {job.hardware.name}.")
    print(f"With SLURM:     sbatch {sbatch}")
    print(f"Without:        bash {shell}" + (" on every node, as its head says" * (job.nodes > 1)))
    extra = rehearsal_flags(job)
    if extra is not None:
        rehearse = ["megatron-switch", "rehearse", "--world-size", str(job.world_size)]
        rehearse += ["--ranks-per-node", str(job.gpus_per_node), "--rank", "0", "--", *job.flags]
        print(f"Try it here:    {shlex.join([*rehearse, *extra.split()])}")
    return 0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; those of the training stand after ``--``."""
    parser.description = "Write an sbatch file and a shell script that start a training."
    parser.epilog = (
        "Flags of 'megatron-switch train' stand after --; with --plan they are added to the "
        "plan's, and win."
    )
    parser.add_argument("--plan", metavar="FILE", help="what 'megatron-switch plan --json' printed")
    parser.add_argument("--number", type=count, default=1, metavar="N", help="plan of it")
    parser.add_argument("--nodes", type=count, metavar="N", help="nodes (the plan's, or 1)")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="default: as --hardware")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"{', '.join(preset_names())}, or a JSON file (the plan's, or {_HARDWARE})",
    )
    parser.add_argument(
        "--generation",
        choices=("ampere", "hopper", "blackwell"),
        help="of the GPUs, where the hardware's description does not name it",
    )
    parser.add_argument(
        "--run-dir", required=True, metavar="DIR", help="the run's folder, shared by all nodes"
    )
    parser.add_argument("--name", default="switch", help="of the job and its scripts")
    parser.add_argument(
        "--shape",
        choices=("srun", "torchrun"),
        default="srun",
        help="under SLURM: one srun task a GPU, or one torchrun a node (default: %(default)s)",
    )
    parser.add_argument(
        "--time", default="24:00:00", metavar="TIME", help="time limit (default: %(default)s)"
    )
    parser.add_argument(
        "--save-seconds",
        type=count,
        default=300,
        metavar="S",
        help="time before the limit at which the run saves and requeues itself (default: 300)",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further option of sbatch, such as account=NAME; may be repeated",
    )
    parser.add_argument("--container-image", metavar="IMAGE", help="run in it (pyxis/enroot)")
    parser.add_argument(
        "--container-mount",
        action="append",
        default=[],
        metavar="SRC:DST",
        help="folder to show in the container; may be repeated",
    )
    parser.add_argument("--container-workdir", default="", metavar="DIR", help="folder inside")
    parser.add_argument(
        "--hostfile", default="", metavar="FILE", help="order of ranks (plan --write-hostfile)"
    )
    parser.add_argument(
        "--no-numa-binding", action="store_true", help="leave ranks free to move between sockets"
    )
    parser.add_argument("--output", default=".", metavar="DIR", help="where to write")
    parser.add_argument("--force", action="store_true", help="replace scripts that exist")


def _job(args: Namespace, flags: Sequence[str]) -> LaunchJob:
    nodes, gpus = args.nodes or 1, args.gpus_per_node
    hardware = args.hardware or _HARDWARE
    if args.plan is not None:
        planned = read_plan(Path(args.plan), number=args.number)
        nodes, gpus = args.nodes or planned.nodes, gpus or planned.gpus_per_node
        if nodes * gpus != planned.world_size:
            # Says so, with the file's name.
            read_plan(Path(args.plan), world_size=nodes * gpus, number=args.number)
        hardware = args.hardware or planned.gpu
        flags = [*planned.flags, *flags]
    if not flags:
        raise ConfigError(
            "There is nothing to launch: give a plan with --plan, or the flags of "
            "'megatron-switch train' after --."
        )
    container = None
    if args.container_image is not None:
        mounts, workdir = tuple(args.container_mount), args.container_workdir
        container = Container(args.container_image, mounts, workdir)
    elif args.container_mount or args.container_workdir:
        raise ConfigError(
            "--container-mount and --container-workdir belong to a container: add "
            "--container-image, or leave them out."
        )
    node = load_hardware(hardware)
    return LaunchJob(
        name=args.name,
        nodes=nodes,
        hardware=node if gpus is None else replace(node, gpus_per_node=gpus),
        flags=tuple(flags),
        run_dir=args.run_dir,
        shape=args.shape,
        time_limit=args.time,
        save_seconds=args.save_seconds,
        sbatch=tuple(args.sbatch),
        container=container,
        hostfile=args.hostfile,
        bind=not args.no_numa_binding,
    )


def _without_output(argv: Sequence[str]) -> list[str]:
    """Return the part of argv that decide what is in the scripts, and not where they are."""
    own, flags = split_train_flags(argv)
    kept: list[str] = []
    for place, word in enumerate(own):
        if word in ("--force", "--output") or word.startswith("--output="):
            continue
        if place and own[place - 1] == "--output":
            continue
        kept.append(word)
    return [*kept, "--", *flags] if flags else kept


def _write(texts: dict[Path, str], *, force: bool) -> None:
    existing = [str(path) for path in texts if path.exists()]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ConfigError(
            f"{' and '.join(existing)} {verb}. Give another --name or --output, or --force to "
            "replace."
        )
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with renamed_into_place(path) as stream:
                stream.write(text)
        except OSError as error:
            raise ConfigError(f"--output {path.parent} cannot be written: {error}.") from error
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o111)
