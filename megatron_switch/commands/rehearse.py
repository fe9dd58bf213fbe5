"""``megatron-switch rehearse``: a launch of any size, one rank at a time, without a GPU.

    megatron-switch rehearse --world-size 1024 -- PRETRAIN FLAGS
    megatron-switch rehearse --world-size 1024 --rank 0 --model gpt-1.6t-128 -- MORE FLAGS

The flags are those of ``megatron-switch train``. With ``--model`` they are added to the model's and
to a few of a launch (:func:`launch_argv`), and win over them.
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console

from megatron_switch.architecture.model_flags import (
    flags_with_model,
    model_file,
    model_names,
    read_model,
)
from megatron_switch.errors import ConfigError
from megatron_switch.flags.train_flags import refuse_unknown
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.sizes import Sizes
from megatron_switch.utils.argument_types import count

_WIDE = 120
_GPU_LIBRARIES = ("transformer_engine", "apex")


def run(args: Namespace) -> int:
    """Rehearse, print, and return the exit code.

    Raises:
        SwitchError: What the launch would raise, or what cannot be rehearsed.
    """
    flags: list[str] = args.train_flags
    if args.model is not None:
        flags = [*launch_argv(args.model, args.world_size), *flags]
    elif not flags:
        raise ConfigError(
            "A rehearsal needs the flags of a launch: give them after --, or name a model with "
            f"--model ({', '.join(model_names())})."
        )
    refuse_unknown(flags)
    _hide_gpu_libraries()
    from megatron_switch.emulation import import_megatron

    import_megatron()
    from megatron_switch.rehearsal.ranks import Launch, rehearse_ranks
    from megatron_switch.rehearsal.report import as_json
    from megatron_switch.rehearsal.tables import show

    launch = Launch(args.world_size, args.ranks_per_node, tuple(flags))
    ranks = _ranks(args, flags)
    reports = []
    for report in rehearse_ranks(launch, ranks):
        reports.append(report)
        if len(ranks) > 1:
            done = f"{len(reports)} of {len(ranks)}"
            print(f"rank {report.rank} is rehearsed ({done})", file=sys.stderr, flush=True)
    if args.json:
        values = as_json(
            reports, world_size=args.world_size, ranks_per_node=args.ranks_per_node, flags=flags
        )
        print(json.dumps(values, indent=2))
    else:
        show(reports, Console(width=None if sys.stdout.isatty() else _WIDE))
    return 0


def launch_argv(name: str, world_size: int) -> list[str]:
    """Return flags of a launch of a model: bf16, experts over as many ranks as hold them evenly.

    Args:
        name: A named model, or a JSON file of flags.
        world_size: Ranks of the launch.

    Raises:
        ConfigError: There is no such model.
    """
    values = FlagValues(read_model(name))
    experts = values.integer("num-experts", 1)
    argv = ["--switch-model", str(model_file(name)), "--bf16", "--micro-batch-size", "1"]
    argv += ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    argv += ["--train-iters", "1000", "--lr", "1e-4", "--use-distributed-optimizer"]
    if experts > 1:
        argv += ["--expert-model-parallel-size", str(math.gcd(experts, world_size))]
        argv += ["--expert-tensor-parallel-size", "1"]
    return argv


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; those of the training stand after ``--``."""
    parser.description = (
        "Run the training session of single ranks of a launch, on one CPU core and "
        "without values: what each holds, needs and sends, and every mistake that would stop it."
    )
    parser.epilog = "Flags of megatron-switch train stand after --."
    parser.add_argument(
        "--world-size", type=count, required=True, metavar="N", help="ranks of the launch"
    )
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        metavar="R",
        help="a rank to rehearse; may be given again (default: first, last, one of each stage)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help=f"{', '.join(model_names())}, or a JSON file of flags"
    )
    parser.add_argument(
        "--ranks-per-node", type=count, default=8, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _ranks(args: Namespace, flags: Sequence[str]) -> list[int]:
    from megatron_switch.rehearsal.ranks import sample

    world_size: int = args.world_size
    if args.rank is not None:
        outside = [rank for rank in args.rank if not 0 <= rank < world_size]
        if outside:
            raise ConfigError(
                f"A launch of {world_size} ranks has ranks 0 to {world_size - 1}, got --rank "
                f"{outside[0]}. Change --rank or --world-size."
            )
        return list(dict.fromkeys(args.rank))
    return sample(Sizes.of_flags(world_size, FlagValues(flags_with_model(flags))))


def _hide_gpu_libraries() -> None:
    """Let Megatron find neither library, whose kernels take no tensor without values."""
    if "megatron" not in sys.modules:
        for name in _GPU_LIBRARIES:
            if find_spec(name) is not None:
                sys.modules[name] = None  # type: ignore[assignment]  # importing it raises
