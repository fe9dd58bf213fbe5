"""The result of a preparation: ``prepared.json``, and a summary to print."""

import shlex
from dataclasses import dataclass
from typing import Any

from megatron_switch.data.preparation.corpus import first_of
from megatron_switch.utils.units import decimal_size_text

SCHEMA = "megatron-switch/prepared/1"

_FEW_DOCUMENTS = 100  # fewer, and the validation part of Megatron's usual split is tiny or empty


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation, as it stands in ``prepared.json``.

    Attributes:
        schema: Name and version of this form.
        version: Version of megatron-switch that made it.
        prefix: Path of the token files without suffix, as it was given.
        files: Number of files read.
        empty_files: Files without text that were left out.
        documents: Number of documents.
        empty_documents: Documents without text that were left out.
        tokens: Number of tokens, one end-of-document token a document included.
        text_bytes: Size of the documents in UTF-8.
        left_out: Bad files, lines and rows that were left out.
        left_out_by_flag: Those of them that are an error without ``--skip-bad-input``.
        reasons: Why, for the first few of them.
        tokenizer: Its ``type``, ``vocab_size``, ``eod``, and under ``trained`` how it was trained,
            None where it was not.
        data: Name of the token files' ``dtype``, and ``bin_bytes`` and ``idx_bytes``.
        training_flags: What training needs to use this.
    """

    schema: str
    version: str
    prefix: str
    files: int
    empty_files: int
    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    left_out: int
    left_out_by_flag: int
    reasons: tuple[str, ...]
    tokenizer: dict[str, Any]
    data: dict[str, Any]
    training_flags: tuple[str, ...]


def summary(prepared: Prepared) -> str:
    """Return a few lines to print, the flags for training last."""
    trained = prepared.tokenizer["trained"]
    origin = f"{trained['algorithm']}, trained on this text" if trained else "given"
    lines = [
        ("files", _count(prepared.files)),
        ("documents", _count(prepared.documents) + _empty_text(prepared)),
        (
            "tokens",
            f"{_count(prepared.tokens)} ({prepared.text_bytes / prepared.tokens:.2f} bytes of text "
            "each)",
        ),
        (
            "vocabulary",
            f"{_count(prepared.tokenizer['vocab_size'])} ({prepared.tokenizer['type']}, {origin}; "
            f"end of document {prepared.tokenizer['eod']})",
        ),
        (
            "written",
            f"{prepared.prefix}.bin ({decimal_size_text(prepared.data['bin_bytes'])}, "
            f"{prepared.data['dtype']}) and .idx ({decimal_size_text(prepared.data['idx_bytes'])})",
        ),
    ]
    if prepared.left_out:
        lines.append(("left out", f"{_count(prepared.left_out)}: {first_of(prepared.reasons)}"))
    if prepared.documents < _FEW_DOCUMENTS:
        lines.append(
            (
                "note",
                f"Megatron's --split divides documents, and there are only {prepared.documents}. "
                "For a validation set, cut text files with --document-separator, or prepare "
                "another folder for --valid-data-path.",
            )
        )
    text = "\n".join(f"{name:<11} {value}" for name, value in lines)
    return f"{text}\n\nTrain on it with:\n  {shlex.join(prepared.training_flags)}"


def from_json(fields: dict[str, Any]) -> Prepared:
    """Return what :func:`dataclasses.asdict` wrote; unknown fields are ignored."""
    known = {name: fields[name] for name in Prepared.__dataclass_fields__}
    return Prepared(
        **{
            **known,
            "reasons": tuple(known["reasons"]),
            "training_flags": tuple(known["training_flags"]),
        }
    )


def _empty_text(prepared: Prepared) -> str:
    """Return how much was left out because it was empty, "" when nothing was."""
    kinds = {"empty file": prepared.empty_files, "empty document": prepared.empty_documents}
    counts = [f"{n:,} {name}{'s' * (n > 1)}" for name, n in kinds.items() if n]
    return f" (left out: {', '.join(counts)})" if counts else ""


def _count(number: int) -> str:
    return f"{number:,}"
