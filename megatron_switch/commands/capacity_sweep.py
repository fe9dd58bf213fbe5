"""``megatron-switch capacity-sweep``: what a trained model loses at other capacity factors."""

from argparse import ArgumentParser, Namespace

from megatron_switch.commands.trained_model_flags import (
    OTHER_FLAGS,
    add_evaluation_data,
    add_load,
    take_checkpoint,
)

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
    add_evaluation_data(parser)
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
