"""``megatron-switch experts``: what each expert of a trained model is for."""

from argparse import ArgumentParser, Namespace

from megatron_switch.commands.trained_model_flags import OTHER_FLAGS, add_load, check_load
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; all others are those of a training."""
    parser.usage = "megatron-switch experts --load FOLDER [OPTIONS] [MEGATRON FLAGS]"
    parser.description = (
        "Shows which tokens each expert of the last sparse layer gets more often than the average, "
        "over text of the training data."
    )
    parser.epilog = OTHER_FLAGS
    add_load(parser)
    add = parser.add_argument
    add("--sequences", type=int, default=200, metavar="N", help="sequences to read")
    add("--num-tokens", type=int, default=6, metavar="N", help="tokens to show for an expert")
    add("--min-count", type=int, default=20, metavar="N", help="least occurrences")


def run(args: Namespace) -> int:
    """Print a table of experts and the tokens that prefer them, and return the exit code.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    check_load(args)
    for name in ("sequences", "num_tokens", "min_count"):
        if (number := getattr(args, name)) < 1:
            raise ConfigError(f"{flag_name(name)} must be at least 1, got {number}.")
    from megatron_switch.commands.inspect.expert_report import report_experts

    report_experts(args)
    return 0
