"""The command line ``megatron-switch COMMAND``: its help text, its streams and its exit codes.

A user's error ends with its message and exit code 2, without a traceback. The commands themselves
stand in :mod:`megatron_switch.commands.table`.
"""

import logging
import os
import select
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from megatron_switch import __version__
from megatron_switch.commands import table
from megatron_switch.commands.table import COMMANDS
from megatron_switch.utils.exit_codes import INTERRUPTED, PIPE_CLOSED, reporting_errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: Words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    _quieten_imports()
    name = _command_name(words)
    try:
        code = reporting_errors(lambda: table.run(name, words[1:]))
        sys.stdout.flush()  # here, and not at the end of Python, which would complain
        return code
    except KeyboardInterrupt:
        print("\nmegatron-switch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes at its end
        return PIPE_CLOSED


def _command_name(words: Sequence[str]) -> str:
    """Return the first word; help, version and what is no command end the program."""
    parser = ArgumentParser(
        prog="megatron-switch",
        description="Train Switch Transformers with Megatron-Core.",
        epilog="\n".join(f"  {name:<16}{c.summary}" for name, c in COMMANDS.items()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-switch {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    name: str = parser.parse_args(words[:1]).command
    return name


def _open_missing_streams() -> None:
    """Give libraries streams to print to where the process was started without."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _has_lost_its_reader() -> bool:
    """Return whether standard output has lost its reader, as after ``| head``."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _quieten_imports() -> None:
    """Keep libraries from saying what is not installed: the start-up text says it once."""
    warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer.[Ee]ngine).*")
    warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
