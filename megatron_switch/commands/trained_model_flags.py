"""What the commands that look at a trained model have in common: ``--load``."""

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
