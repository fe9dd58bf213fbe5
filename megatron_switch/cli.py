"""The command line ``megatron-switch COMMAND``: one table of commands, each imported when called.

A mistake that the user can mend ends with its message and exit code 2, without a traceback; in a
job of several ranks rank 0 says it for all.
"""

import logging
import os
import select
import shlex
import signal
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_switch import __version__
from megatron_switch.errors import OneRankNumericError, SwitchError
from megatron_switch.utils.help_text import ShowingDefaults

_USER_ERROR = 2
_INTERRUPTED = 130  # what shells return for a command that Ctrl-C ended
_PIPE_CLOSED = 141  # and for one that wrote to a pipe without reader
_HELP_ALL = "--help-all"
_HELP = frozenset({"-h", "--help", _HELP_ALL})
_PATIENCE_S = 3.0  # long enough for rank 0's message to end the job first


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    summary: str
    run: Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: Words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    _quieten_imports()
    if words and words[0] in COMMANDS:
        try:
            code = reporting_errors(lambda: COMMANDS[words[0]].run(words[1:]))
            sys.stdout.flush()  # here, and not at the end of Python, which would complain
            return code
        except KeyboardInterrupt:
            print("\nmegatron-switch: interrupted", file=sys.stderr)
            return _INTERRUPTED
        except BrokenPipeError:
            if not _reader_has_gone():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes at its end
            return _PIPE_CLOSED
    parser = ArgumentParser(
        prog="megatron-switch",
        description="Train Switch Transformers with Megatron-Core.",
        epilog="\n".join(f"  {name:<16}{c.summary}" for name, c in COMMANDS.items()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-switch {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    parser.parse_args(words)
    raise AssertionError("argparse accepts no other command")


def _open_missing_streams() -> None:
    """Give libraries streams to print to where the process was started without."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _reader_has_gone() -> bool:
    """Return whether nobody reads standard output any more, as after ``| head``."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _quieten_imports() -> None:
    """Keep libraries from telling what is not installed: the start-up text says it once."""
    warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer.[Ee]ngine).*")
    warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def reporting_errors(run: Callable[[], int]) -> int:
    """Call ``run``; turn an error of the user's into its message and exit code 2."""
    try:
        return run()
    except SwitchError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0" and not isinstance(error, OneRankNumericError):  # others say the same
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training's would save a checkpoint
            time.sleep(_PATIENCE_S)
        where = f" (rank {rank})" if rank != "0" else ""
        print(f"\nmegatron-switch: error{where}: {error}", file=sys.stderr, flush=True)
        return _USER_ERROR


def _train(argv: list[str]) -> int:
    if not _HELP.isdisjoint(argv):
        from megatron_switch.training.arguments.help import train_help

        print(train_help(all_flags=_HELP_ALL in argv))
        return 0
    _refuse_misspelt(argv)
    from megatron_switch.training.loop.session import train

    train(argv)
    return 0


def _refuse_misspelt(flags: Sequence[str]) -> None:
    """Refuse a flag that does not exist before Megatron is imported, which takes seconds."""
    from megatron_switch.flags.train_flags import refuse_unknown

    refuse_unknown(flags)


def _launch_local(argv: list[str]) -> int:
    parser = ArgumentParser(
        prog="megatron-switch launch-local",
        description="Train on N CPU ranks of this host, forked from one process.",
        epilog="All other flags go to 'megatron-switch train', whose --help shows them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--num-ranks", type=int, required=True, metavar="N", help="ranks to start"
    )
    own, flags = parser.parse_known_args(argv)
    if _HELP_ALL in flags:
        return _train(flags)
    if own.num_ranks < 1:
        parser.error(f"argument -n/--num-ranks: at least 1, got {own.num_ranks}")
    _refuse_misspelt(flags)
    from megatron_switch.emulation import import_megatron, launch

    import_megatron()  # before the next line, so that it does so in the quick way
    import megatron_switch.training.loop.session  # noqa: F401  # once, for all ranks
    from megatron_switch.training.logs.run_folder import COMMAND_VARIABLE

    again = [sys.executable, "-m", "megatron_switch", "launch-local", *argv]
    os.environ[COMMAND_VARIABLE] = shlex.join(again)
    flags = ["--switch-device", "cpu", *flags]  # the first, so that another choice wins
    return launch(own.num_ranks, lambda: reporting_errors(lambda: _train(flags)))


def _prepare(argv: list[str]) -> int:
    from megatron_switch.data.prepare import add_arguments, run

    return run(_parsed("prepare", COMMANDS["prepare"].summary, add_arguments, argv))


def _generate(argv: list[str]) -> int:
    from megatron_switch.commands.inspect.parsers import generate_parser

    generate_parser().parse_known_args(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.inspect.generate import run

    return run(argv)


def _experts(argv: list[str]) -> int:
    from megatron_switch.commands.inspect.parsers import experts_parser

    experts_parser().parse_known_args(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.inspect.expert_report import run

    return run(argv)


def _convert(argv: list[str]) -> int:
    from megatron_switch.commands.checkpoints.parsers import convert_parser

    convert_parser().parse_args(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.checkpoints.convert import run

    return run(argv)


def _reshard(argv: list[str]) -> int:
    from megatron_switch.commands.checkpoints.parsers import reshard_parser

    reshard_parser().parse_args(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.checkpoints.reshard import run

    return run(argv)


def _upcycle(argv: list[str]) -> int:
    from megatron_switch.commands.checkpoints.parsers import upcycle_parser

    upcycle_parser().parse_args(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.checkpoints.upcycle import run

    return run(argv)


def _capacity_sweep(argv: list[str]) -> int:
    from megatron_switch.commands.inspect.parsers import parse_capacity_sweep

    parse_capacity_sweep(argv)  # help and slips are answered without Megatron
    from megatron_switch.commands.inspect.capacity_sweep import run

    return run(argv)


def _check_layouts(argv: list[str]) -> int:
    from megatron_switch.commands.check_layouts.parser import add_arguments

    args = _parsed("check-layouts", COMMANDS["check-layouts"].summary, add_arguments, argv)
    from megatron_switch.commands.check_layouts.comparison import run

    return run(args)


def _demo(argv: list[str]) -> int:
    from megatron_switch.commands.demo import add_arguments, run

    return run(_parsed("demo", COMMANDS["demo"].summary, add_arguments, argv))


def _plan(argv: list[str]) -> int:
    from megatron_switch.commands.cluster.plan import run

    return run(argv)


def _rehearse(argv: list[str]) -> int:
    from megatron_switch.commands.cluster.rehearse import run

    return run(argv)


def _render_launch(argv: list[str]) -> int:
    from megatron_switch.commands.cluster.render_launch import run

    return run(argv)


def _check_binding(argv: list[str]) -> int:
    from megatron_switch.commands.cluster.check_binding import run

    return run(argv)


def _from_deepspeed(argv: list[str]) -> int:
    from megatron_switch.commands.cluster.from_deepspeed import run

    return run(argv)


def _parsed(
    name: str, summary: str, add_arguments: Callable[[ArgumentParser], None], argv: list[str]
) -> Namespace:
    parser = ArgumentParser(
        prog=f"megatron-switch {name}", description=summary, formatter_class=ShowingDefaults
    )
    add_arguments(parser)
    return parser.parse_args(argv)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train, one process a rank (under torchrun or SLURM; alone: one rank)", _train
    ),
    "launch-local": Command("train on several CPU ranks of this host, forked", _launch_local),
    "prepare": Command("turn text files into training data", _prepare),
    "generate": Command("continue a prompt with a trained checkpoint", _generate),
    "experts": Command("show what each expert of a trained checkpoint is for", _experts),
    "capacity-sweep": Command(
        "evaluate a trained checkpoint at several capacity factors", _capacity_sweep
    ),
    "plan": Command("find the fastest layouts of a model on a cluster", _plan),
    "rehearse": Command("run single ranks of a launch of any size without a GPU", _rehearse),
    "render-launch": Command(
        "write the scripts that start a training on a cluster", _render_launch
    ),
    "check-binding": Command("show GPU, network card and NUMA node of each rank", _check_binding),
    "from-deepspeed": Command("translate a DeepSpeed configuration into flags", _from_deepspeed),
    "convert": Command("convert checkpoints to and from Hugging Face's format", _convert),
    "reshard": Command("rewrite a checkpoint for another layout", _reshard),
    "upcycle": Command("turn a dense checkpoint into a Switch model", _upcycle),
    "check-layouts": Command(
        "train in every layout and compare with one rank, on CPUs or on your GPUs", _check_layouts
    ),
    "demo": Command("train a small Switch GPT on this computer's CPU and look at it", _demo),
}
"""Every command, in the order of the help text."""
