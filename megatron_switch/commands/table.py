"""The table of commands, and how the words of a command line become the arguments of one.

A command NAME is the module ``megatron_switch.commands.NAME`` with two functions:
``add_arguments(parser)`` declares its flags, and ``run(args)`` does the work and returns the exit
code. The module imports nothing that takes seconds; ``run`` imports torch and Megatron where it
needs them. So a help text or a mistyped flag is answered at once.

``args`` holds, beside the command's own flags, ``argv``, all words after its name, and
``train_flags``, those that are flags of ``megatron-switch train``.
"""

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_switch.flags.argv import attribute_of, split_train_flags
from megatron_switch.utils.help_text import ShowingDefaults


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    summary: str
    train_flags: Literal["none", "mixed", "after --"] = "none"
    """Where flags of a training stand: nowhere, among the command's own, or after ``--``."""


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "train, one process a rank (under torchrun or SLURM; alone: one rank)", "mixed"
    ),
    "launch-local": Command("train on several CPU ranks of this host, forked", "mixed"),
    "prepare": Command("turn text files into training data"),
    "evaluate": Command(
        "show loss, perplexity and drops of a trained checkpoint on its data", "mixed"
    ),
    "generate": Command("continue a prompt with a trained checkpoint", "mixed"),
    "experts": Command("show what each expert of a trained checkpoint is for", "mixed"),
    "capacity-sweep": Command("evaluate a trained checkpoint at several capacity factors", "mixed"),
    "plan": Command("find the fastest layouts of a model on a cluster", "after --"),
    "rehearse": Command("run single ranks of a launch of any size without a GPU", "after --"),
    "render-launch": Command("write the scripts that start a training on a cluster", "after --"),
    "check-binding": Command("show GPU, network card and NUMA node of each rank"),
    "from-deepspeed": Command("translate a DeepSpeed configuration into flags"),
    "convert": Command("convert checkpoints to and from Hugging Face's format"),
    "reshard": Command("rewrite a checkpoint for another layout"),
    "upcycle": Command("turn a dense checkpoint into a Switch model"),
    "check-layouts": Command(
        "train in every layout and compare with one rank, on CPUs or on your GPUs"
    ),
    "demo": Command("train a small Switch GPT on this computer's CPU and look at it"),
}
"""Every command, in the order of the help text."""


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Args:
        name: A key of :data:`COMMANDS`.
        argv: Words after the command's name.

    Raises:
        SystemExit: After a help text, or with code 2 after a message about a malformed flag.
        SwitchError: What was asked for cannot be done; the message says why.
    """
    code: int = _module(name).run(parse(name, argv))
    return code


def parse(name: str, argv: Sequence[str]) -> Namespace:
    """Return the arguments that a command's ``run`` takes; see :func:`run`."""
    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"megatron-switch {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        formatter_class=ShowingDefaults,
        allow_abbrev=command.train_flags == "none",
    )
    _module(name).add_arguments(parser)
    own, train_flags = list(argv), list[str]()
    if command.train_flags == "mixed":
        args, train_flags = parser.parse_known_args(own)
    else:
        if command.train_flags == "after --":
            own, train_flags = split_train_flags(argv)
        args = parser.parse_args(own)
    args.argv, args.train_flags = list(argv), train_flags
    return args


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron_switch.commands.{attribute_of(name)}")
