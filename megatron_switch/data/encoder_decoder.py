"""A training sample of an encoder-decoder, and the special tokens that it is made with.

The decoder reads the target shifted right by one, behind a start token, and predicts the target.
Start token and padding are the tokenizer's padding token, as in T5, or its end-of-document token
where it has none. Masks say what is padding; it is never inferred from an id.

All entries of a sample are int64, masks too (0 or 1): tensor-parallel ranks get them in one
broadcast.

Shape letters: S positions of the encoder or of the decoder.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_switch.data.tokenizer import Tokenizer
from megatron_switch.errors import DataError

KEYS = (
    "encoder_tokens",
    "encoder_padding",
    "decoder_tokens",
    "decoder_padding",
    "labels",
    "loss_mask",
)
"""Entries of a sample: the encoder's have its length, the others the decoder's."""

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning.

    Attributes:
        end: Ends a source and a target.
        padding: Fills up, and starts a target.
    """

    end: int
    padding: int

    @classmethod
    def of(cls, built: Any, vocab_size: int) -> "SpecialTokens":
        """Return those of a tokenizer that Megatron built."""
        try:
            padding = built.pad
        except (AttributeError, NotImplementedError, NameError, ValueError):
            padding = None
        usable = isinstance(padding, int) and 0 <= padding < vocab_size
        return cls(end=int(built.eod), padding=int(padding) if usable else int(built.eod))


def sentinel_ids(built: Any) -> tuple[int, ...]:
    """Return the ids of ``<extra_id_0>``, ``<extra_id_1>``, ...; empty where there is none.

    Args:
        built: A tokenizer that Megatron built.

    Raises:
        DataError: A number between the first and the last is missing.
    """
    try:
        pieces: dict[int, str] = built.inv_vocab
    except (AttributeError, NotImplementedError):
        return ()
    found = {
        int(match[1]): number
        for number, piece in pieces.items()
        if (match := _SENTINEL.fullmatch(piece))
    }
    missing = [str(number) for number in range(len(found)) if number not in found]
    if missing:
        raise DataError(
            f"The tokenizer has {len(found)} sentinels <extra_id_N>, but not those of N = "
            f"{', '.join(missing[:5])}. Span corruption counts them from 0: use a tokenizer that "
            "has them all (megatron-switch prepare --sentinels 100)."
        )
    return tuple(found[number] for number in range(len(found)))


def encoder_decoder_sample(
    source: Sequence[int] | np.ndarray[Any, Any],
    target: Sequence[int] | np.ndarray[Any, Any],
    *,
    source_length: int,
    target_length: int,
    special: SpecialTokens,
) -> dict[str, Tensor]:
    """Return a sample, filled up on the right.

    Args:
        source: Tokens of the encoder, end token included, at most ``source_length``.
        target: Tokens to predict, at most ``target_length``.
        source_length: Positions of the encoder.
        target_length: Positions of the decoder.
        special: What fills up and starts.

    Returns:
        The entries of :data:`KEYS`, each of shape (S,).
    """
    encoder_S, encoder_padding_S = _filled(source, source_length, special.padding)
    labels_S, decoder_padding_S = _filled(target, target_length, special.padding)
    decoder_S = labels_S.roll(1)
    decoder_S[0] = special.padding
    return {
        "encoder_tokens": encoder_S,
        "encoder_padding": encoder_padding_S,
        "decoder_tokens": decoder_S,
        "decoder_padding": decoder_padding_S,
        "labels": labels_S,
        "loss_mask": 1 - decoder_padding_S,
    }


def without_loss(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sample as one that only fills up a batch."""
    return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of a tokenizer of this package."""
    return SpecialTokens.of(tokenizer.built, tokenizer.vocab_size)


def _filled(
    tokens: Sequence[int] | np.ndarray[Any, Any], length: int, padding: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of one side."""
    assert len(tokens) <= length, (len(tokens), length)
    filled_S = torch.full((length,), padding, dtype=torch.int64)
    filled_S[: len(tokens)] = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
    return filled_S, (torch.arange(length) >= len(tokens)).long()
