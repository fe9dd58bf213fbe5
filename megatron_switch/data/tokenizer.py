"""Tokenizers, built by Megatron from Megatron's flags.

The text is tokenised by the object that training builds from the same flags, so that a corpus and
its training agree by construction. The flags are Megatron's own, with its names, defaults and
meaning. Flags, packages and files that a tokenizer lacks are refused before Megatron is called.
"""

import importlib.util
import logging
import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_switch.errors import ConfigError, DataError
from megatron_switch.flags.train_flags import add_flag, destination

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

TOKENIZER_TYPES = (
    *SENTENCEPIECE_TYPES,
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
)
"""Megatron's tokenizers of plain text. Those of images and conversations prepare other files."""

VOCAB_SIZE_TYPES = ("TikTokenizer", "NullTokenizer")
"""Tokenizers whose size is set by ``--vocab-size`` rather than by their files."""

_NEEDS_MODEL = (*SENTENCEPIECE_TYPES, "HuggingFaceTokenizer", "TikTokenizer")
_NEEDS_MODEL_FILE = (*SENTENCEPIECE_TYPES, "TikTokenizer")
_NEEDS_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}
_NEEDS_PACKAGE = {
    "TikTokenizer": ("tiktoken", "tiktoken"),
    "HuggingFaceTokenizer": ("transformers", "'megatron-switch[hf]'"),
    **{name: ("transformers", "'megatron-switch[hf]'") for name in _NEEDS_FILES},
}

DEFAULT_VOCAB_SIZE = 32_000
"""Number of tokens of a tokenizer that is trained."""

FLAGS: Mapping[str, str] = {
    "--tokenizer-type": "Megatron's name of a tokenizer. Without it, a SentencePiece model is "
    "trained on the text.",
    "--tokenizer-model": "Model file, or for HuggingFaceTokenizer a folder or a name.",
    "--vocab-size": "Number of tokens. Default where a tokenizer is trained: "
    f"{DEFAULT_VOCAB_SIZE}, of one that is given: its own.",
    "--vocab-file": "Vocabulary file of GPT2BPETokenizer and the BERT tokenizers.",
    "--merge-file": "BPE merges of GPT2BPETokenizer.",
    "--tokenizer-metadata": "Megatron's JSON file about the tokenizer, which names its class.",
    "--tokenizer-special-tokens": "Special tokens to add; TikTokenizer needs seven of its own "
    "among them.",
    "--tiktoken-pattern": "How TikTokenizer cuts text into words.",
    "--tiktoken-num-special-tokens": "Ids that TikTokenizer keeps for special tokens.",
    "--tokenizer-sentencepiece-legacy": "Let special tokens be added to a finished SentencePiece "
    "model.",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": "Keep repeated spaces with a "
    "SentencePiece model that would merge them.",
    "--tokenizer-hf-no-use-fast": "Use the slow variant of a Hugging Face tokenizer.",
    "--tokenizer-hf-no-include-special-tokens": "Leave out the tokens that a Hugging Face "
    "tokenizer puts around a text.",
    "--trust-remote-code": "Let a Hugging Face tokenizer run code of its own.",
    "--null-tokenizer-eod-id": "End-of-document id of NullTokenizer. Default: the last one.",
    "--null-tokenizer-pad-id": "Padding id of NullTokenizer. Default: none.",
    "--chat-template": "Jinja template for conversations; plain text does not use it.",
}
"""Megatron's tokenizer flags, and what they mean for text."""

RUN_CODE: Mapping[str, object] = {"trust_remote_code": False, "metadata_path": None}
"""Attributes that can make a tokenizer run code, with the value that runs none. Their value comes
from the command line only, never from a checkpoint."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of Megatron's.

    Attributes:
        built: The object that training gets from the same flags.
        vocab_size: Number of tokens, before the embedding is padded.
        eod: Token that ends a document.
    """

    built: Any
    vocab_size: int
    eod: int


def add_tokenizer_arguments(parser: ArgumentParser) -> None:
    """Add Megatron's tokenizer flags to a parser."""
    group = parser.add_argument_group("tokenizer, with Megatron's own flags")
    for name, text in FLAGS.items():
        options = {"choices": TOKENIZER_TYPES} if name == "--tokenizer-type" else {}
        add_flag(group, name, help=text, **options)


def training_flags(args: Namespace) -> list[str]:
    """Return the tokenizer flags with which training builds the same tokenizer."""
    parser = ArgumentParser()
    add_tokenizer_arguments(parser)
    flags: list[str] = []
    for name in FLAGS:
        value = getattr(args, destination(name))
        if value == parser.get_default(destination(name)):
            continue
        flags.append(name)
        if not isinstance(value, bool):
            flags += map(str, value) if isinstance(value, list) else [str(value)]
    return flags


def check_tokenizer_flags(args: Namespace) -> None:
    """Refuse tokenizer flags from which Megatron could build nothing.

    Args:
        args: Namespace with Megatron's tokenizer flags; only those that a type needs are read.

    Raises:
        ConfigError: A flag or a package is missing.
        DataError: A file is missing.
    """
    kind = args.tokenizer_type
    if kind is None:
        raise ConfigError(
            "There is no tokenizer: give --tokenizer-type, and --tokenizer-model where the type "
            "needs one; prepared.json beside the data has the flags."
        )
    package, source = _NEEDS_PACKAGE.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"--tokenizer-type {kind} needs the package {package}, which is not installed. "
            f"Install it with: pip install {source}."
        )
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise ConfigError(
            "--tokenizer-type NullTokenizer needs --vocab-size, and it was not given."
        )
    if kind in _NEEDS_MODEL and args.tokenizer_model is None:
        raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model, and it was not given.")
    for dest in _NEEDS_FILES.get(kind, ()):
        if getattr(args, dest) is None:
            flag = f"--{dest.replace('_', '-')}"
            raise ConfigError(f"--tokenizer-type {kind} needs {flag}, and it was not given.")
    _check_files(args, kind)


def build_tokenizer(args: Namespace) -> Tokenizer:
    """Build a tokenizer as training does.

    Args:
        args: Namespace of :data:`FLAGS`; one that a checkpoint of an older Megatron lacks has its
            default.

    Raises:
        ConfigError: A flag or a package is missing.
        DataError: A file is missing or damaged, or the tokenizer cannot end a document.
    """
    parser = ArgumentParser()
    add_tokenizer_arguments(parser)
    defaults = {name: parser.get_default(name) for name in map(destination, FLAGS)}
    args = Namespace(**{**defaults, **vars(args)})
    check_tokenizer_flags(args)
    with upstream_warnings_hidden():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as upstream

    named = f"--tokenizer-type {args.tokenizer_type}"
    if args.tokenizer_model is not None:
        named += f" --tokenizer-model {args.tokenizer_model}"
    flags = Namespace(**{**vars(args), "pad_vocab_size": False})
    try:
        with upstream_warnings_hidden():
            built = upstream(flags)
        vocab_size = int(built.vocab_size)
    except Exception as error:  # each library has its own; all mean the same to a user
        text = str(error) or type(error).__name__
        if "trust_remote_code" in text:
            raise ConfigError(
                f"The tokenizer of {named} is Python code of its own, which would run with your "
                "rights. If you trust it, add --trust-remote-code; a checkpoint cannot ask for it."
            ) from error
        raise DataError(
            f"Megatron could not build a tokenizer from {named}: {text}. Check that file and type "
            "belong together."
        ) from error
    try:
        eod = built.eod
    except (AttributeError, NotImplementedError, ValueError):
        eod = None
    if not isinstance(eod, int) or not 0 <= eod < vocab_size:
        raise DataError(
            f"The tokenizer of {named} has no token that ends a document (got {eod} of "
            f"{vocab_size} tokens), so the ends of documents would be lost. Use one with an "
            "end-of-sentence token."
        )
    return Tokenizer(built, vocab_size, eod)


@contextmanager
def upstream_warnings_hidden() -> Iterator[None]:
    """Hide what Megatron and torch say about GPUs and ranks, of which preparing needs none.

    Advice to install Apex, or that no rank is known, would only hide what matters.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")  # that there is no CUDA runtime
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _check_files(args: Namespace, kind: str) -> None:
    """Refuse names of files that are not there."""
    wanted = [
        (flag, getattr(args, dest))
        for flag, dest in (
            ("--vocab-file", "vocab_file"),
            ("--merge-file", "merge_file"),
            ("--tokenizer-metadata", "metadata_path"),
        )
    ]
    model = args.tokenizer_model
    # A Hugging Face tokenizer may have a name on the hub, which looks like a relative path.
    looks_like_path = model is not None and (model.startswith((".", "~")) or os.path.isabs(model))
    if kind in _NEEDS_MODEL_FILE or looks_like_path:
        wanted.append(("--tokenizer-model", model))
    for flag, name in wanted:
        if name is None or Path(name).exists():
            continue
        raise DataError(
            f"{flag} {name} does not exist. Give the path where the tokenizer's file is now."
        )
    if kind in _NEEDS_MODEL_FILE and not Path(model).is_file():
        raise DataError(f"--tokenizer-model {model} is no file, and {kind} is read from one.")
