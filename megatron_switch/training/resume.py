"""Before a checkpoint is loaded: that it is there, whole, and of this model.

Megatron answers an empty tracker file with exit code 0, a missing one with random weights, and
another model with a shape error deep inside. All of that is decided here, from the files alone.

One case is no mistake: a job that always passes the same folder to ``--load`` and ``--save`` finds
nothing there when it runs for the first time, and starts from new weights.
"""

import io
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path

from megatron.training import get_tokenizer
from megatron.training.checkpointing import load_args_from_checkpoint

from megatron_switch.checkpoint.agreement import FREE_SETTINGS, check_resume
from megatron_switch.checkpoint.contents import read_common_state
from megatron_switch.checkpoint.files import find_checkpoint, has_checkpoint
from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.models.vocabulary import padded_vocab_size
from megatron_switch.recipes import RECIPES
from megatron_switch.training.arguments import CommandLine

_ABSENT = object()


def with_checkpoint_args(line: CommandLine) -> CommandLine:
    """Return the command line with the checkpoint's model, if ``--use-checkpoint-args`` asks so.

    Megatron's rule holds for Megatron's flags: those that describe the model come from the
    checkpoint, whatever was typed. Switch settings come from it where they were not typed.

    Args:
        line: The parsed command line; its namespace is changed.

    Raises:
        CheckpointError: ``--load`` names no complete checkpoint.
        ConfigError: ``--load`` is missing.
    """
    args = line.args
    if not args.use_checkpoint_args:
        return line
    if args.load is None:
        raise ConfigError(
            "--use-checkpoint-args takes the model's flags from a checkpoint, but no checkpoint "
            "is given. Add --load, or leave --use-checkpoint-args out."
        )
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step)
    if found.message is not None and not found.is_release:
        args.ckpt_step = found.iteration
    before = vars(args).copy()
    with redirect_stdout(io.StringIO()):  # a line for each of fifty flags
        load_args_from_checkpoint(args)
    stored = read_common_state(found.folder).get("args")
    settings = {FLAG_PREFIX + f.name for f in fields(SwitchConfig) if f.name not in FREE_SETTINGS}
    for name in (settings | set(RECIPES["switch"])) - line.explicit:
        if hasattr(stored, name):
            setattr(args, name, getattr(stored, name))
    taken = {name for name, value in vars(args).items() if before.get(name, _ABSENT) != value}
    return replace(line, explicit=line.explicit | taken | {"moe_layer_freq"})


def find_what_to_load(args: Namespace) -> tuple[str, ...]:
    """Check what ``--load`` names, and make Megatron load exactly that.

    Args:
        args: Validated arguments; ``ckpt_step`` and ``padded_vocab_size`` may be set.

    Returns:
        What the user should know.

    Raises:
        CheckpointError: Nothing complete is there, or it does not fit this run.
    """
    if args.load is None:
        return ()
    if args.load == args.save and not has_checkpoint(Path(args.load)):
        args.load = None
        return (f"{args.save} holds no checkpoint yet: training starts from new weights.",)
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step)
    state = read_common_state(found.folder)
    args.padded_vocab_size = padded_vocab_size(
        get_tokenizer().vocab_size,
        make_divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
        stored=getattr(state.get("args"), "padded_vocab_size", None),
    )
    notes = check_resume(state, args, is_release=found.is_release)
    if found.message is not None and not found.is_release:
        args.ckpt_step = found.iteration
    return (*([found.message] if found.message else []), *notes)
