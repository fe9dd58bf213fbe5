"""``megatron-switch capacity-sweep``: what a trained model loses at other capacity factors."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_switch.commands.trained_model_flags import OTHER_FLAGS, add_load, check_load
from megatron_switch.errors import ConfigError

DEFAULT_FACTORS = "1,1.25,1.5,2,-1"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; all others are those of a training.

    The checkpoint may stand first, without a flag. It is no argument of the parser, which would
    take the value of one of Megatron's flags for it.
    """
    parser.usage = (
        "megatron-switch capacity-sweep (CHECKPOINT | --load FOLDER) [OPTIONS] [MEGATRON FLAGS]"
    )
    parser.description = (
        "Evaluates a trained checkpoint at several capacity factors, without training: what is "
        "dropped, and what it costs. CHECKPOINT is the folder that --load takes."
    )
    parser.epilog = OTHER_FLAGS
    add_load(parser)
    add = parser.add_argument
    add(
        "--factors",
        default=DEFAULT_FACTORS,
        metavar="LIST",
        help=f"capacity factors; a negative one drops nothing (default: {DEFAULT_FACTORS}). Write "
        "--factors=-1,2 where the first is negative.",
    )
    add("--samples", type=int, default=256, metavar="N", help="validation sequences to evaluate on")
    add(
        "--micro-batch-size",
        type=int,
        metavar="B",
        help="sequences that share a capacity (that of evaluation in training)",
    )
    add(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="prepared data to evaluate on (that of the training)",
    )
    add("--split", metavar="A,B,C", help="which part of it is for validation (as in training)")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: Namespace) -> int:
    """Print loss and drops at each factor, and return the exit code.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    take_checkpoint(args)
    from megatron_switch.commands.inspect.capacity_sweep import sweep_capacity

    sweep_capacity(args)
    return 0


def take_checkpoint(args: Namespace) -> None:
    """Set ``load`` to the first word where it is no flag, and leave the others.

    Raises:
        ConfigError: The checkpoint is given in both ways, or in none.
    """
    if args.train_flags and not args.train_flags[0].startswith("-"):
        word, *args.train_flags = args.train_flags
        if args.load is not None:
            raise ConfigError(
                f"The checkpoint is given twice, as {word} and with --load {args.load}: leave one "
                "out."
            )
        args.load = Path(word)
    check_load(args)
