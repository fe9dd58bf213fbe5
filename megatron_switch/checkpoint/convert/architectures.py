"""The architectures that can be converted: which record and which name table each one has.

A ``config.json`` or Megatron's stored arguments go in; a name table, the other side's settings and
what the user should know come out. What is not listed here is refused with the list.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_switch.checkpoint.convert.gpt_config import (
    LAYOUTS,
    choose_layout,
    read_gpt_config,
    write_gpt_config,
)
from megatron_switch.checkpoint.convert.gpt_model import gpt_flags, gpt_from_args
from megatron_switch.checkpoint.convert.gpt_names import SWITCH_EXPERTS, gpt_table
from megatron_switch.checkpoint.convert.name_map import NameTable
from megatron_switch.checkpoint.convert.t5_model import (
    DENSE,
    SWITCH,
    T5_TYPES,
    t5_config,
    t5_flags,
    t5_from_args,
    t5_from_config,
)
from megatron_switch.checkpoint.convert.t5_names import t5_table
from megatron_switch.errors import CheckpointError


@dataclass(frozen=True)
class ImportedModel:
    """A model in Hugging Face's format, described for Megatron."""

    model_type: str
    table: NameTable
    flags: Mapping[str, Any]
    """Flags of Megatron, without dashes, that describe the model; True stands alone."""
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True)
class ExportedModel:
    """A model of Megatron, described in Hugging Face's format."""

    model_type: str
    table: NameTable
    config: Callable[[str], dict[str, Any]]
    """Content of ``config.json``, given the name of the weights' type."""
    vocab_size: int
    notes: tuple[str, ...]
    """What the user should know."""


def describe_import(
    config: Mapping[str, Any], where: str, keys: Collection[str], *, multiple: int
) -> ImportedModel:
    """Describe a model from its ``config.json``.

    Args:
        config: Content of the file.
        where: The file, for messages.
        keys: Names of the tensors that come with it.
        multiple: Rows of the embedding become a multiple of this.

    Raises:
        CheckpointError: No name table fits the architecture.
    """
    found = config.get("model_type")
    model_type = found if isinstance(found, str) else ""
    if model_type in LAYOUTS:
        gpt = read_gpt_config(config, where, multiple=multiple)
        experts = LAYOUTS[model_type].experts or SWITCH_EXPERTS
        return ImportedModel(
            model_type,
            gpt_table(gpt.shape, experts),
            gpt_flags(gpt),
            gpt.shape.vocab_size,
            gpt.shape.padded_vocab_size,
        )
    if model_type in T5_TYPES:
        t5 = t5_from_config(config, where, keys, multiple=multiple)
        return ImportedModel(
            model_type,
            t5_table(t5.shape, switch=model_type == SWITCH, head=t5.head),
            t5_flags(t5),
            t5.shape.vocab_size,
            t5.shape.padded_vocab_size,
        )
    raise CheckpointError(
        f"{where} is of a model of type {found!r:.60}, for which there is no name table. "
        f"Converted are: {', '.join(model_types())}."
    )


def describe_export(
    args: Namespace, keys: Collection[str], *, wanted: str, vocab_size: int | None
) -> ExportedModel:
    """Describe a model from the arguments stored in its checkpoint.

    Args:
        args: Megatron's namespace.
        keys: Keys of the checkpoint's weights, by layer.
        wanted: Model type to write, or ``auto``.
        vocab_size: Rows of the embedding to write; None for all.

    Raises:
        CheckpointError: The architecture cannot compute the model.
    """
    if getattr(args, "switch_arch", "gpt") == "t5":
        return _describe_t5(args, keys, wanted, vocab_size)
    if wanted in T5_TYPES:
        raise CheckpointError(
            f"--architecture {wanted} is an encoder-decoder, but the checkpoint's model is a "
            f"decoder-only one. Use auto, or one of {', '.join(LAYOUTS)}."
        )
    gpt = gpt_from_args(args, vocab_size=vocab_size)
    layout, notes = choose_layout(gpt, wanted)
    return ExportedModel(
        layout.model_type,
        gpt_table(gpt.shape, layout.experts or SWITCH_EXPERTS),
        lambda dtype: write_gpt_config(gpt, layout, dtype),
        gpt.shape.vocab_size,
        notes,
    )


def _describe_t5(
    args: Namespace, keys: Collection[str], wanted: str, vocab_size: int | None
) -> ExportedModel:
    t5 = t5_from_args(args, keys, vocab_size=vocab_size)
    model_type = SWITCH if t5.shape.num_experts else DENSE
    if wanted not in ("auto", model_type):
        raise CheckpointError(
            f"--architecture {wanted} cannot hold the checkpoint's model, which is of type "
            f"{model_type}. Use auto."
        )
    t5_config(t5, "float32")  # refuses what the format cannot say
    notes = t5.notes
    if t5.shape.gated and model_type == SWITCH:
        notes += (
            "transformers has no Switch with gated units: no stock class opens this folder. Its "
            "names are those of the released Switch-XXL.",
        )
    return ExportedModel(
        model_type,
        t5_table(t5.shape, switch=model_type == SWITCH),
        lambda dtype: t5_config(t5, dtype),
        t5.shape.vocab_size,
        notes,
    )


def model_types() -> tuple[str, ...]:
    """Return every model type that can be read and written."""
    return (*LAYOUTS, *T5_TYPES)
