"""``megatron-switch train``: the training session of this rank.

All flags are Megatron's and the ``--switch-*`` flags, which the trainer's own parser reads.
"""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from typing import Any, NoReturn

from megatron_switch.flags.train_flags import refuse_unknown


class ShowAllFlags(Action):
    """Shows every flag of a training, and ends the program."""

    def __init__(self, **options: Any) -> None:
        """Take no value."""
        super().__init__(**{"nargs": 0, "default": SUPPRESS, **options})

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        """Print and exit."""
        print(_help(all_flags=True))
        parser.exit()


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags that ask for help; all others are left for the trainer."""
    parser.format_help = _help  # type: ignore[method-assign]
    parser.add_argument("--help-all", action=ShowAllFlags)


def run(args: Namespace) -> int:
    """Train, and return the exit code.

    Raises:
        SwitchError: The run cannot start, or cannot go on.
    """
    refuse_unknown(args.train_flags)  # before Megatron is imported, which takes seconds
    from megatron_switch.training.loop.session import train

    train(args.train_flags)
    return 0


def _help(*, all_flags: bool = False) -> str:
    from megatron_switch.training.arguments.help import train_help

    return train_help(all_flags=all_flags)
