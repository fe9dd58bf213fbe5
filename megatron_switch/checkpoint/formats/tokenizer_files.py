"""Convert the files of a model's tokenizer between the formats.

To Megatron: the files are copied into the checkpoint's folder, and the flags name them there. To
Hugging Face: a tokenizer in its format is copied; a SentencePiece model is written as
``tokenizer.json``, which ``AutoTokenizer`` opens offline, and compared with the original on text of
many kinds before it is accepted.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_switch.checkpoint.formats.hf_folder import copy_tokenizer, write_json
from megatron_switch.errors import CheckpointError

_SENTENCEPIECE = ("spiece.model", "tokenizer.model")
_SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SAMPLES = (
    "Hello world!",
    "  two  spaces, a\ttab\nand a line",
    "def f(x):\n    return x ** 2  # 42\n",
    "Stra\N{LATIN SMALL LETTER SHARP S}e, na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve",
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{CJK UNIFIED IDEOGRAPH-6587} \N{GRINNING FACE}",
    "a" * 40,
    "",
)


def tokenizer_flags(source: Path, target: Path, vocab_size: int) -> dict[str, Any]:
    """Return Megatron's flags for a tokenizer that will lie in another folder.

    Args:
        source: Folder in Hugging Face's format.
        target: Where its tokenizer's files will be copied to.
        vocab_size: Rows of the embedding; without a tokenizer, tokens are numbers below it.
    """
    if any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": str(target)}
    for name in _SENTENCEPIECE:
        if (source / name).is_file():
            path = str(target / name)
            return {"tokenizer-type": "SentencePieceTokenizer", "tokenizer-model": path}
    return {"tokenizer-type": "NullTokenizer", "vocab-size": vocab_size}


def write_tokenizer(args: Namespace, folder: Path, where: Path) -> str:
    """Write the tokenizer of a Megatron model in Hugging Face's format.

    Args:
        args: Arguments stored in its checkpoint.
        folder: Folder to write into.
        where: The checkpoint's folder, where a converted model has its tokenizer.

    Returns:
        What was written, for the user.

    Raises:
        CheckpointError: The tokenizer's files are not where the arguments say, or cannot be
            expressed exactly.
    """
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind == "NullTokenizer":
        return "The model has no tokenizer (NullTokenizer): none is written."
    path = find_tokenizer(Path(model), where) if model else None
    if kind == "HuggingFaceTokenizer" and path is not None and path.is_dir():
        names = copy_tokenizer(path, folder)
        return f"Tokenizer copied from {path}: {', '.join(names)}."
    if kind in _SENTENCEPIECE_TYPES and path is not None:
        _write_sentencepiece(path, folder, ends_texts=_of_t5(args))
        return f"Tokenizer written as tokenizer.json from {path}."
    raise CheckpointError(
        f"The checkpoint names --tokenizer-type {kind} --tokenizer-model {model}, which is not "
        "there, or is of a type that has no counterpart. Give the place where it is now with "
        "--tokenizer-model, or leave the tokenizer out with --no-tokenizer."
    )


def find_tokenizer(path: Path, where: Path) -> Path | None:
    """Return the path of a tokenizer: as stored, or beside a checkpoint that was moved with it."""
    beside = where / path.parent.name / path.name
    moved = where / path.name
    return next((each for each in (path, beside, moved) if each.exists()), None)


def _of_t5(args: Namespace) -> bool:
    """Whether the tokenizer is that of a T5, which appends the end token to every text."""
    return getattr(args, "switch_arch", "gpt") == "t5"


def _write_sentencepiece(path: Path, folder: Path, *, ends_texts: bool) -> None:
    import sentencepiece

    try:
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing
    except ImportError as error:
        raise CheckpointError(
            "Writing tokenizer.json needs the package tokenizers. Install it with pip install "
            "'megatron-switch[hf]', or leave the tokenizer out with --no-tokenizer."
        ) from error
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    proto = _proto(path)
    tokenizer: Any = Tokenizer.from_str(_json(proto))
    if ends_texts and processor.eos_id() >= 0:
        end = processor.id_to_piece(processor.eos_id())
        tokenizer.post_processor = TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, processor.eos_id())],
        )
    for text in _SAMPLES:
        expected = processor.encode(text)
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if expected != found:
            raise CheckpointError(
                f"{path} cannot be written as tokenizer.json exactly: {text!r} is {expected} in "
                f"the one and {found} in the other. Leave the tokenizer out with --no-tokenizer."
            )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _config(processor))


def _proto(path: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())


def _config(processor: Any) -> Mapping[str, Any]:
    ids = {
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
    }
    named = {name: processor.id_to_piece(index) for name, index in ids.items() if index >= 0}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }


def _json(proto: Any) -> str:
    """Return ``tokenizer.json`` of a SentencePiece model."""
    import json

    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    pieces = [piece.piece for piece in proto.pieces]
    is_bpe = trainer.model_type == trainer.BPE
    unknown = pieces[trainer.unk_id]
    model: dict[str, Any] = {"byte_fallback": bool(trainer.byte_fallback)}
    if is_bpe:
        model |= {
            "type": "BPE",
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": _merges(proto),
            "unk_token": unknown,
            "fuse_unk": True,
        }
    else:
        model |= {
            "type": "Unigram",
            "vocab": [[piece.piece, piece.score] for piece in proto.pieces],
            "unk_id": trainer.unk_id,
        }
    steps: list[dict[str, Any]] = []
    if normalizer.precompiled_charsmap:
        import base64

        charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if normalizer.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    kinds = proto.SentencePiece
    special = [
        {
            "id": index,
            "content": piece.piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": piece.type != kinds.USER_DEFINED,
        }
        for index, piece in enumerate(proto.pieces)
        if piece.type in (kinds.CONTROL, kinds.USER_DEFINED, kinds.UNKNOWN)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }
    )


def _merges(proto: Any) -> list[list[str]]:
    """Return the pairs that make each piece, the most frequent piece first."""
    scores = {piece.piece: (piece.score, index) for index, piece in enumerate(proto.pieces)}
    normal = [piece for piece in proto.pieces if piece.type == proto.SentencePiece.NORMAL]
    merges = []
    for piece in normal:
        text = piece.piece
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(left, right) for left, right in pairs if left in scores and right in scores]
        known.sort(key=lambda pair: (scores[pair[0]][1], scores[pair[1]][1]))
        merges += [(piece.score, left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [[left, right] for _, left, right in merges]
