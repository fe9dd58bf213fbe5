"""What the commands that look at a trained model have in common: ``--load``, and the data."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_switch.errors import ConfigError

OTHER_FLAGS = (
    "All other flags are those of 'megatron-switch train', for layout (under torchrun), device "
    "(--switch-device), --ckpt-step, --tokenizer-model and what else shall differ from the "
    "checkpoint."
)


def add_load(parser: ArgumentParser) -> None:
    """Add ``--load``, the checkpoint."""
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FOLDER",
        help="checkpoint folder, or the --switch-run-dir of a training",
    )


def check_load(args: Namespace) -> None:
    """Raise ConfigError if there is no checkpoint."""
    if args.load is None:
        raise ConfigError(
            "There is no model: --load was not given. Name a checkpoint folder, or the "
            "--switch-run-dir of a training."
        )


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


def add_evaluation_data(parser: ArgumentParser) -> None:
    """Add the flags that say on which data a model is evaluated."""
    add = parser.add_argument
    add("--samples", type=int, default=256, metavar="N", help="sequences to evaluate on")
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
    add("--split", metavar="A,B,C", help="how it is split (as in training)")
