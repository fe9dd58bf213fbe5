"""Settings of a Hugging Face configuration that Megatron's arguments have no place for.

These are the rows of the embedding before it was padded (models have more than their tokenizers
have tokens), the tokens that begin, end and pad a text, and the generation settings. An import
keeps them in a file beside the tokenizer. A run that continues from it names that tokenizer in its
arguments, so an export finds the file and writes the settings back.
"""

import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_switch.checkpoint.formats.hf_folder import (
    CONFIG,
    config_fields,
    copy_tokenizer,
    read_json,
    write_json,
)
from megatron_switch.checkpoint.formats.tokenizer_files import find_tokenizer

FILE = "hugging_face.json"
GENERATION = "generation_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Folder inside of a converted checkpoint that holds the tokenizer's files, and this one."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class SourceSettings:
    """What is written into an export's configuration beside the model itself."""

    vocab_size: int | None = None
    """Rows of the embedding without padding, where that is known."""
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    """Those of :data:`TOKEN_IDS` that are set; None is a value, and means that there is none."""
    generation: Mapping[str, Any] | None = None
    """Content of ``generation_config.json``, where the source had one."""


NO_SETTINGS = SourceSettings()


def keep_settings(hf: Path, folder: Path) -> None:
    """Write what Megatron has no place for into the folder of the tokenizer.

    Args:
        hf: Folder in Hugging Face's format.
        folder: Tokenizer's folder of the checkpoint; made where there is none.

    Raises:
        CheckpointError: A file of the source cannot be read, or names tokens by other than ids.
    """
    config = read_json(hf / CONFIG)
    check_token_ids(config, str(hf / CONFIG))
    kept: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "token_ids": {name: config[name] for name in TOKEN_IDS if name in config},
    }
    if (hf / GENERATION).is_file():
        kept["generation_config"] = read_json(hf / GENERATION)
    folder.mkdir(exist_ok=True)
    write_json(folder / FILE, kept)


def check_token_ids(config: Mapping[str, Any], where: str) -> None:
    """Raise unless the tokens with a meaning are ids, several ids, or none.

    Args:
        config: Content of a ``config.json``.
        where: The file, for messages.

    Raises:
        CheckpointError: Naming the first that is something else.
    """
    fields = config_fields(config, where, "converted")
    for name in filter(fields.has, TOKEN_IDS):
        value = config[name]
        if not all(type(each) is int for each in (value if isinstance(value, list) else [value])):
            raise fields.wrong(name, "the id of a token, a list of ids, or null")


def copy_settings(source: Path, target: Path) -> None:
    """Copy the tokenizer inside of a converted checkpoint, and these settings, where it has them.

    Args:
        source: Folder of a checkpoint.
        target: Folder of another one that is made of it.
    """
    source, target = source / TOKENIZER_FOLDER, target / TOKENIZER_FOLDER
    copy_tokenizer(source, target)
    if (source / FILE).is_file():
        target.mkdir(exist_ok=True)
        shutil.copyfile(source / FILE, target / FILE)


def kept_settings(args: Namespace, where: Path) -> SourceSettings:
    """Return what an import kept, or nothing for a model that was not imported.

    Args:
        args: Arguments stored in the checkpoint; its tokenizer's place is read.
        where: The checkpoint's folder.

    Raises:
        CheckpointError: The file is damaged.
    """
    folder: Path | None = where / TOKENIZER_FOLDER
    if args.tokenizer_model:
        place = find_tokenizer(Path(args.tokenizer_model), where)
        folder = place.parent if place is not None and place.is_file() else place
    if folder is None or not (folder / FILE).is_file():
        return NO_SETTINGS
    kept = read_json(folder / FILE)
    fields = config_fields(kept, str(folder / FILE), "Hugging Face")
    for name in ("token_ids", "generation_config"):
        fields.inner(name)
    check_token_ids(fields.inner("token_ids").values, str(folder / FILE))
    rows = fields.integer("vocab_size")
    return SourceSettings(
        vocab_size=rows if rows <= args.padded_vocab_size else None,
        token_ids=kept.get("token_ids") or {},
        generation=kept.get("generation_config"),
    )
