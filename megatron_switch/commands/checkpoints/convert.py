"""Conversion of a checkpoint to and from Hugging Face's format, and what each action prints."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.checkpoint.convert.conversion import (
    Import,
    plan_export,
    plan_import,
    write_export,
    write_import,
)
from megatron_switch.checkpoint.convert.inspection import inspect_folder
from megatron_switch.checkpoint.convert.megatron_source import stored_args
from megatron_switch.checkpoint.formats.source_settings import (
    TOKENIZER_FOLDER,
    SourceSettings,
    kept_settings,
)
from megatron_switch.checkpoint.formats.tensor_source import listing
from megatron_switch.checkpoint.formats.tokenizer_files import tokenizer_flags, write_tokenizer
from megatron_switch.checkpoint.load.files import checkpoint_folder, find_checkpoint
from megatron_switch.commands.checkpoints.next_steps import next_steps
from megatron_switch.commands.checkpoints.verify import CONTEXT, verify
from megatron_switch.data.encoder_decoder import SpecialTokens
from megatron_switch.data.tokenizer import RUN_CODE, Tokenizer, build_tokenizer
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.training.logs.known_warnings import known_warnings_hidden
from megatron_switch.utils.progress import bytes_progress
from megatron_switch.utils.units import size_text


@known_warnings_hidden()
def convert(own: Namespace) -> None:
    """Do what the first word of the command says.

    Raises:
        SwitchError: Something cannot be converted; nothing was written.
    """
    actions = {
        "hf-to-megatron": _import,
        "megatron-to-hf": _export,
        "inspect": _inspect,
        "verify": verify,
    }
    actions[own.action](own)


def _import(own: Namespace) -> None:
    # Megatron's parser takes seconds to import, and only this action needs it.
    from megatron_switch.commands.checkpoints.written_arguments import written_arguments

    plan = plan_import(own.hf, dtype=own.dtype, multiple=own.vocab_multiple)
    flags = import_flags(plan, own.megatron)
    args = written_arguments(flags, padded_vocab_size=plan.model.padded_vocab_size)
    with bytes_progress("converting", plan.nbytes) as on_bytes:
        write_import(plan, args, own.megatron, workers=own.workers, on_bytes=on_bytes)
    padding = plan.model.padded_vocab_size - plan.model.vocab_size
    print(
        f"{own.megatron}: {plan.model.model_type}, {len(plan.model.name_map.entries)} tensors, "
        f"{size_text(plan.nbytes)}, {padding} vocabulary rows of padding."
    )
    for note in plan.model.notes:
        print(note)
    if left_out := plan.model.name_map.without_effect(plan.source):
        print(f"Left out, because nothing depends on them: {listing(left_out)}.")
    if (trouble := _tokenizer_trouble(plan, args)) is not None:
        print(
            f"The tokenizer of {own.hf} was copied, but {trouble} Add --tokenizer-type and "
            "--tokenizer-model of another one to both commands below."
        )
    if flags["tokenizer-type"] == "NullTokenizer":
        print(
            f"{own.hf} has no tokenizer, so texts are numbers, as in '5 7 9'. For others add "
            "--tokenizer-type and --tokenizer-model to both commands below."
        )
    print(next_steps(args, own.megatron, flags))


def import_flags(plan: Import, target: Path) -> dict[str, Any]:
    """Return the flags of a run of an imported model, its precision and tokenizer included.

    Args:
        plan: The conversion.
        target: Where the checkpoint will be.
    """
    tokenizer = (target / TOKENIZER_FOLDER).resolve()
    flags = {**plan.model.flags, **tokenizer_flags(plan.folder, tokenizer, plan.model.vocab_size)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if plan.precision == dtype:
            flags[name] = True
    return flags


def _tokenizer_trouble(plan: Import, args: Namespace) -> str | None:
    """Say why training could not use a source's tokenizer, or None."""
    try:
        tokenizer = build_tokenizer(args)  # of the files that were copied
    except (ConfigError, DataError) as error:
        return f"cannot be used: {error}"
    rows = plan.model.padded_vocab_size
    if tokenizer.vocab_size > rows:
        return f"has {tokenizer.vocab_size} tokens, more than the {rows} rows of the embedding."
    return None


def _export(own: Namespace) -> None:
    found = find_checkpoint(
        checkpoint_folder(own.megatron), iteration=own.iteration, context=CONTEXT
    )
    args = stored_args(found)
    if own.tokenizer_model is not None:
        if args.tokenizer_type == "NullTokenizer" or own.no_tokenizer:
            why = "with --no-tokenizer" if own.no_tokenizer else "where a model has no tokenizer"
            raise ConfigError(f"--tokenizer-model has no effect {why}. Leave it out.")
        args.tokenizer_model = str(own.tokenizer_model)
    settings = _settings(args, found.folder.parent, own.vocab_size)
    plan = plan_export(
        found,
        architecture=own.architecture,
        dtype=own.dtype,
        vocab_size=own.vocab_size or settings.vocab_size,
    )
    notes = list(plan.model.notes)

    def tokenizer(folder: Path) -> None:
        if not own.no_tokenizer:
            notes.append(write_tokenizer(args, folder, found.folder.parent))

    with bytes_progress("converting", plan.nbytes) as on_bytes:
        write_export(plan, own.hf, tokenizer=tokenizer, settings=settings, on_bytes=on_bytes)
    print(
        f"{own.hf}: {plan.model.model_type}, {sum(len(g.names) for g in plan.groups)} tensors, "
        f"{size_text(plan.nbytes)}."
    )
    for note in notes:
        print(note)


def _settings(args: Namespace, where: Path, wanted_rows: int | None) -> SourceSettings:
    """Return the rows of the vocabulary that are no padding, and the tokens with a meaning.

    An imported model has what its source had. A run pads its tokenizer's tokens by a known rule,
    and takes the tokens with a meaning from the tokenizer.
    """
    kept = kept_settings(args, where)
    try:
        tokenizer = build_tokenizer(Namespace(**{**vars(args), **RUN_CODE}))
    except (ConfigError, DataError):  # it was moved; whether that matters is decided elsewhere
        return kept
    tokens = tokenizer.vocab_size
    if wanted_rows and wanted_rows < tokens:
        raise CheckpointError(
            f"--vocab-size {wanted_rows} would cut off rows of the tokenizer's {tokens} tokens. "
            f"Give {tokens} or more, or leave the flag out."
        )
    if kept.vocab_size is not None:
        return kept
    if args.tokenizer_type == "NullTokenizer":
        padded = args.padded_vocab_size  # by whatever rule: there is nothing but tokens
    else:
        padded = padded_vocab_size(tokens, make_divisible_by=args.make_vocab_size_divisible_by)
    return SourceSettings(
        vocab_size=tokens if padded == args.padded_vocab_size else None,
        token_ids=_token_ids(tokenizer, is_t5=getattr(args, "switch_arch", "gpt") == "t5"),
    )


def _token_ids(tokenizer: Tokenizer, *, is_t5: bool) -> dict[str, int | None]:
    """Return the ids that training gave a meaning."""
    special = SpecialTokens.of(tokenizer.built, tokenizer.vocab_size)
    if is_t5:
        return {
            "pad_token_id": special.padding,
            "eos_token_id": special.end,
            "decoder_start_token_id": special.padding,
        }
    # Documents are separated by their end token alone.
    has_padding = special.padding != special.end
    return {
        "bos_token_id": None,
        "eos_token_id": special.end,
        "pad_token_id": special.padding if has_padding else None,
    }


def _inspect(own: Namespace) -> None:
    found = inspect_folder(checkpoint_folder(own.folder))
    table = Table(show_header=False, box=None)
    for name, value in found.facts.items():
        table.add_row(name, value)
    Console().print(table)
    print(found.advice)
