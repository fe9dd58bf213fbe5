"""Before a checkpoint is loaded: that it is there, whole, and of this model.

Megatron answers an empty tracker file with exit code 0, a missing one with random weights, and
another model with a shape error deep inside. All of that is decided here, from the files alone.

One case is no mistake: a job that always passes the same folder to ``--load`` and ``--save`` finds
nothing there when it runs for the first time, and starts from new weights.
"""

from argparse import Namespace
from pathlib import Path

from megatron.training import get_tokenizer

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import (
    Asker,
    find_checkpoint,
    has_checkpoint,
    write_tracker,
)
from megatron_switch.checkpoint.load.settings_agreement import check_resume
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.models.vocabulary import padded_vocab_size
from megatron_switch.training.arguments.parser import CommandLine
from megatron_switch.training.arguments.stored_arguments import with_stored_model


def with_checkpoint_args(line: CommandLine) -> CommandLine:
    """Return the command line with the checkpoint's model, if ``--use-checkpoint-args`` asks so.

    Model, tokenizer, routing and its losses come from the checkpoint where no flag was given;
    Megatron itself takes half of the model, even over the command line.

    Args:
        line: The parsed command line; its namespace is changed.

    Raises:
        CheckpointError: ``--load`` names no complete checkpoint, or one without arguments.
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
    stored = read_common_state(found.folder).get("args")
    if stored is None:
        raise CheckpointError(
            f"{found.folder} stores no arguments that --use-checkpoint-args could take. Give the "
            "model's flags, or a JSON file of them to --switch-model."
        )
    for name in RECIPES["switch"].keys() - line.explicit:
        if hasattr(stored, name):
            setattr(args, name, getattr(stored, name))
    return with_stored_model(line, stored)


def find_what_to_load(args: Namespace) -> tuple[str, ...]:
    """Check what ``--load`` names, and make Megatron load exactly that.

    Args:
        args: Validated arguments; ``padded_vocab_size`` may be set.

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
    asker = Asker(is_own_folder=args.load == args.save)
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step, asker=asker)
    state = read_common_state(found.folder)
    args.padded_vocab_size = padded_vocab_size(
        get_tokenizer().vocab_size,
        make_divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
        stored=getattr(state.get("args"), "padded_vocab_size", None),
    )
    notes = check_resume(state, args, is_release=found.is_release)
    if found.message is not None and args.rank == 0 and not args.fake_process_group:
        # Megatron reads the tracker first, and ends with exit code 0 where it is empty.
        write_tracker(Path(args.load), found)
    return (*([found.message] if found.message else []), *notes)
