"""``megatron-switch from-deepspeed``: a DeepSpeed run as flags and a launch line of this project.

    megatron-switch from-deepspeed ds_config.json --num-nodes 4 --num-gpus 8 \\
        --num-experts 64 --ep-size 8 --capacity-factor 1.25
"""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_switch.flags.argv import attribute_of
from megatron_switch.migration.deepspeed import Job, check_job, translate_config
from megatron_switch.migration.moe_arguments import add_moe_arguments, translate_moe
from megatron_switch.migration.translation import Translation
from megatron_switch.utils.argument_types import count


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flags, in which underscores are the same as hyphens."""
    parser.description = (
        "Translate a DeepSpeed configuration file, and the arguments of deepspeed.moe.layer.MoE "
        "given as flags, into flags of 'megatron-switch train'."
    )
    parser.add_argument("config", metavar="FILE", help="DeepSpeed's JSON file")
    parser.add_argument("--num-nodes", type=count, metavar="N", help="nodes of the job")
    parser.add_argument("--num-gpus", type=count, metavar="N", help="GPUs of a node")
    parser.add_argument(
        "--model-parallel-size",
        type=count,
        default=1,
        metavar="N",
        help="tensor- x pipeline-parallel ranks of the job's mpu",
    )
    add_moe_arguments(parser)
    for flag, action in list(parser._option_string_actions.items()):
        parser._option_string_actions["--" + attribute_of(flag)] = action


def run(args: Namespace) -> int:
    """Print flags, launch line and notes, and return the exit code.

    Raises:
        ConfigError: If the file or the arguments cannot be used.
    """
    known = args.num_nodes is not None or args.num_gpus is not None
    nodes, gpus = args.num_nodes or 1, args.num_gpus or 1
    job = Job(nodes * gpus if known else None, args.model_parallel_size)
    check_job(job)
    found = translate_config(Path(args.config), job)
    translate_moe(args, found)
    if args.model_parallel_size > 1 and "--tensor-model-parallel-size" not in found.flags:
        found.set("--tensor-model-parallel-size", args.model_parallel_size)
        found.set("--sequence-parallel")
    print(_launch_line(found, nodes, gpus))
    for note in found.notes:
        print(f"\n# {note.setting}: {note.text}", end="")
    print()
    return 0


def _launch_line(found: Translation, nodes: int, gpus: int) -> str:
    lines = [f"torchrun --nnodes {nodes} --nproc-per-node {gpus}"]
    if nodes > 1:
        lines[0] += " --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    lines.append("-m megatron_switch train")
    for flag, value in found.flags.items():
        lines.append(flag if value is True else f"{flag} {shlex.quote(value)}")
    lines.append('"${MODEL_AND_DATA[@]}"')
    return " \\\n  ".join(lines)
