"""``megatron-switch launch-local``: train on CPU ranks of this host, forked from one process."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace

from megatron_switch.commands.train import ShowAllFlags
from megatron_switch.flags.train_flags import refuse_unknown
from megatron_switch.utils.argument_types import count
from megatron_switch.utils.exit_codes import reporting_errors


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; all others are left for the trainer."""
    parser.description = "Train on N CPU ranks of this host, forked from one process."
    parser.epilog = "All other flags go to 'megatron-switch train', whose --help shows them."
    parser.add_argument(
        "-n", "--num-ranks", type=count, required=True, metavar="N", help="ranks to start"
    )
    parser.add_argument(
        "--help-all", action=ShowAllFlags, help="show all flags of a training and exit"
    )


def run(args: Namespace) -> int:
    """Train on forked ranks, and return the exit code of the first that fails, else 0.

    Raises:
        ConfigError: A flag does not exist.
    """
    refuse_unknown(args.train_flags)
    from megatron_switch.emulation import import_megatron, launch

    import_megatron()  # before the next line, so that it does so in the quick way
    from megatron_switch.training.logs.run_folder import COMMAND_VARIABLE
    from megatron_switch.training.loop.session import train  # once, for all ranks

    again = [sys.executable, "-m", "megatron_switch", "launch-local", *args.argv]
    os.environ[COMMAND_VARIABLE] = shlex.join(again)
    flags = ["--switch-device", "cpu", *args.train_flags]  # the first, so that another choice wins

    def train_rank() -> int:
        train(flags)
        return 0

    return launch(args.num_ranks, lambda: reporting_errors(train_rank))
