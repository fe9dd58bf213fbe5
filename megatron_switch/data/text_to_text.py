"""Pairs of texts from JSON lines: what an encoder-decoder is fine-tuned on.

Each line is an object with the strings ``input`` and ``target``; other keys and blank lines are
ignored. Anything else is refused, with file and line, before training starts. Lines are read by
offset, and tokenised when they are needed.

A text that is too long is cut: the source still ends with the end token, the target does not,
because it does not end there. :func:`count_cut` counts them.

Order: every epoch has a permutation of its own, drawn from (seed, split, epoch), so a sample's
number is all that its content depends on. A split is a part of one permutation of all lines, drawn
from the seed, because such files are often sorted.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_switch.data.encoder_decoder import SpecialTokens, encoder_decoder_sample, without_loss
from megatron_switch.errors import DataError

SUFFIX = ".jsonl"
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN = 3
_SPLITTING = 2**31  # no split has this number, so the two random streams differ


@dataclass(frozen=True)
class Pair:
    """One example."""

    source: str
    target: str


class PairFiles:
    """The pairs of one or more files, by number.

    Args:
        paths: Files, in order.

    Raises:
        DataError: A file cannot be read, or holds no line.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        offsets = [_line_offsets(path) for path in self._paths]
        self._offsets = np.concatenate(offsets)
        self._files = np.repeat(np.arange(len(offsets)), [len(each) for each in offsets])

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._offsets)

    def __getitem__(self, number: int) -> Pair:
        """Return a pair.

        Raises:
            DataError: The line holds none.
        """
        path = self._paths[self._files[number]]
        with path.open("rb") as file:
            file.seek(int(self._offsets[number]))
            return _pair(file.readline(), f"{path}, byte {self._offsets[number]}")


def check_pairs(path: Path) -> int:
    """Read a whole file, and return the number of its pairs.

    Raises:
        DataError: A line holds no pair; the first few such lines are named.
    """
    count, faults = 0, []
    for number, line in _numbered_lines(path):
        try:
            _pair(line, f"{path}, line {number}")
            count += 1
        except DataError as error:
            faults.append(str(error))
    if faults:
        more = f" and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
        raise DataError(
            f"{len(faults):,} of {count + len(faults):,} lines are no pair of texts:\n  "
            + "\n  ".join(faults[:_SHOWN])
            + f"{more}\nA line is an object with two strings: "
            '{"input": "translate English to German: Hello", "target": "Hallo"}.'
        )
    if count == 0:
        raise DataError(f"{path} holds no line: there is nothing to train on.")
    return count


def count_cut(
    path: Path, tokenizer: Any, *, source_length: int, target_length: int
) -> tuple[str, ...]:
    """Tokenise a whole checked file, and return messages on what will be cut.

    Args:
        path: File of pairs.
        tokenizer: A tokenizer that Megatron built.
        source_length: Positions of the encoder, end token included.
        target_length: Positions of the decoder, end token included.

    Returns:
        A sentence for each side of which anything is cut.

    Raises:
        DataError: The tokenizer cannot read a text.
    """
    lengths = []
    for number, line in _numbered_lines(path):
        pair = _pair(line, str(path))
        try:
            tokens = [tokenizer.tokenize(text) for text in (pair.source, pair.target)]
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: the tokenizer cannot read it ({error}). NullTokenizer "
                "reads numbers only; texts need --tokenizer-type and --tokenizer-model."
            ) from error
        lengths.append([len(each) + 1 for each in tokens])
    sides = zip(*lengths, strict=True)
    limits = (
        ("inputs", "--seq-length", source_length),
        ("targets", "--decoder-seq-length", target_length),
    )
    notes = []
    for side, (name, flag, limit) in zip(sides, limits, strict=True):
        cut = sum(length > limit for length in side)
        if cut:
            notes.append(
                f"{path}: {cut:,} of {len(side):,} {name} are longer than {flag} {limit} tokens "
                f"and lose their end (the longest has {max(side):,})."
            )
    return tuple(notes)


def split_numbers(count: int, parts: Sequence[int], *, seed: int) -> list[np.ndarray[Any, Any]]:
    """Divide the numbers below ``count`` into parts of the given sizes.

    Args:
        count: Number of pairs.
        parts: Sizes; they add up to ``count``.
        seed: Seed of the run.
    """
    order = np.random.default_rng([seed, _SPLITTING]).permutation(count)
    return np.split(order, np.cumsum(parts)[:-1])


class TextToText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of pairs, epoch after epoch.

    Args:
        pairs: Where the texts are.
        numbers: Which of the pairs belong to this split.
        num_samples: Length of the data set; None for one epoch.
        tokenizer: A tokenizer that Megatron built.
        source_length: Positions of the encoder.
        target_length: Positions of the decoder.
        special: End and padding token.
        seed: Seed of the run.
        split: 0 for training, 1 for validation, 2 for test.
    """

    def __init__(
        self,
        pairs: PairFiles,
        numbers: np.ndarray[Any, Any],
        num_samples: int | None,
        *,
        tokenizer: Any,
        source_length: int,
        target_length: int,
        special: SpecialTokens,
        seed: int,
        split: int,
    ) -> None:
        self._pairs = pairs
        self._numbers = numbers
        self._num_samples = len(numbers) if num_samples is None else num_samples
        self._tokenizer = tokenizer
        self._source_length = source_length
        self._target_length = target_length
        self._special = special
        self._key = (seed, split)
        self._epoch: tuple[int, np.ndarray[Any, Any]] = (-1, numbers)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Return a sample; that of None fills up a batch and has no loss."""
        pair = self._pairs[self._pair_of(0 if index is None else int(index))]
        source = self._tokenizer.tokenize(pair.source)[: self._source_length - 1]
        target = [*self._tokenizer.tokenize(pair.target), self._special.end]
        sample = encoder_decoder_sample(
            [*source, self._special.end],
            target[: self._target_length],
            source_length=self._source_length,
            target_length=self._target_length,
            special=self._special,
        )
        return without_loss(sample) if index is None else sample

    def _pair_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self._numbers))
        if self._epoch[0] != epoch:
            draw = np.random.default_rng([*self._key, epoch])
            self._epoch = (epoch, draw.permutation(self._numbers))
        return int(self._epoch[1][place])


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    _refuse_unreadable(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _line_offsets(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return where the lines begin that are not blank."""
    _refuse_unreadable(path)
    offsets, place = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                offsets.append(place)
            place += len(line)
    return np.array(offsets, dtype=np.int64)


def _refuse_unreadable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(len(_GZIP_MAGIC))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}). Correct --data-path, --train-data-path, "
            "--valid-data-path or --test-data-path."
        ) from error
    if start == _GZIP_MAGIC:
        raise DataError(f"{path} is compressed, but lines are read by offset. Unpack it (gunzip).")


def _pair(line: bytes, where: str) -> Pair:
    """Return the pair of a line.

    Raises:
        DataError: With where it is and what is wrong.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 ({error.reason}).") from error
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: is a JSON {type(value).__name__}, not an object.")
    for key in ("input", "target"):
        if key not in value:
            raise DataError(f"{where}: has no {key!r}; its keys are {sorted(value)}.")
        if not isinstance(value[key], str):
            raise DataError(f"{where}: {key!r} is no string but {type(value[key]).__name__}.")
    return Pair(value["input"], value["target"])
