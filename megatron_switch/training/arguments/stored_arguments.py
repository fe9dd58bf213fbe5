"""Which model a checkpoint holds, taken from the arguments stored in it.

A checkpoint stores the whole argument namespace of the run that wrote it. This module takes from it
what decides which function the model computes, and the tokenizer, so that a model can be used from
its folder alone. Layout, device, and everything about speed, memory, training and logging stays
that of the command line, where an explicit flag also wins over a stored value.

Megatron's own ``--use-checkpoint-args`` takes a list that misses half of the model. Here the rule
errs the other way: *every* field of Megatron's ``TransformerConfig`` is taken unless its row in
:data:`megatron_switch.flags.megatron_flags.MEGATRON_FLAGS` says otherwise. A field that comes with
a newer Megatron is therefore never forgotten silently; at worst it asks for something that is not
there.
"""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.formats.tokenizer_files import find_tokenizer
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.config import switch_traits
from megatron_switch.data.tokenizer import FLAGS, RUN_CODE
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.flags.known_flags import KNOWN_FLAGS, flags_with
from megatron_switch.flags.megatron_flags import MEGATRON_FLAGS
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.flags.train_flags import destination
from megatron_switch.flags.traits import MegatronFlag
from megatron_switch.training.arguments.parser import CommandLine


def model_attributes() -> frozenset[str]:
    """Return the attributes of Megatron's namespace that decide which function a model computes."""
    parallel = {field.name for field in fields(ModelParallelConfig)}
    transformer = {field.name for field in fields(TransformerConfig)} - parallel

    def is_taken(name: str) -> bool:
        row = MEGATRON_FLAGS.get(name, MegatronFlag())
        if row.stored is not None:
            return row.stored
        return row.on_resume == "model" or name in transformer

    megatron = set(filter(is_taken, transformer | MEGATRON_FLAGS.keys()))
    switch = {name for name, each in switch_traits().items() if each.on_resume != "free"}
    return frozenset(megatron | switch)


def compared_attributes() -> frozenset[str]:
    """Return the attributes whose other value is another model when training continues.

    All that decide which function a model computes, unless they have a row of their own in
    :data:`megatron_switch.flags.megatron_flags.MEGATRON_FLAGS`, which then decides.
    """
    return frozenset(name for name in model_attributes() if name not in KNOWN_FLAGS) | frozenset(
        flags_with("model")
    )


def tokenizer_attributes() -> frozenset[str]:
    """Return the attributes that decide which tokenizer is used, without those that run code."""
    return frozenset(destination(flag) for flag in FLAGS) - RUN_CODE.keys()


def with_checkpoint_args(line: CommandLine) -> CommandLine:
    """Return the command line with the checkpoint's model, if ``--use-checkpoint-args`` is given.

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
    return with_stored_model(line, stored, where=found.folder.parent)


def with_stored_model(
    line: CommandLine, stored: Namespace, *, where: Path | None = None
) -> CommandLine:
    """Return a command line that describes the model of a checkpoint.

    Args:
        line: The parsed command line; its namespace is changed in place.
        stored: Arguments of the run that wrote the checkpoint, validated as Megatron stores them.
        where: The checkpoint's folder. A converted one has its tokenizer inside, which is found
            there where the folder was moved.

    Returns:
        The same namespace; no default replaces what was taken.

    Raises:
        ConfigError: The class of the tokenizer is named by a file, which only a flag may choose.
    """
    metadata = getattr(stored, "metadata_path", None)
    if metadata is not None and "metadata_path" not in line.explicit:
        raise ConfigError(
            f"The checkpoint's tokenizer was built from --tokenizer-metadata {metadata}, which "
            "names the class that runs, and a checkpoint may not choose code. If you trust that "
            "file, give the flag."
        )
    names = (model_attributes() | tokenizer_attributes()) - line.explicit
    taken = {name for name in names if hasattr(stored, name) and hasattr(line.args, name)}
    for name in taken:
        setattr(line.args, name, getattr(stored, name))
    if where is not None and "tokenizer_model" in taken and line.args.tokenizer_model:
        named = Path(line.args.tokenizer_model)
        found = find_tokenizer(named, where)
        if found not in (named, None):
            line.args.tokenizer_model = str(found.resolve())
    return CommandLine(line.args, line.explicit, stored=frozenset(taken))
