"""Documents of each part of ``--split``, and the refusal of a part that gets none.

Megatron gives each split a range of documents, rounded, and loops forever over the epochs of an
empty one. The arithmetic is Megatron's.
"""

import math
from collections.abc import Collection

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_switch.errors import DataError

SPLITS = ("train", "validation", "test")


def check_splits(
    prefix: str, documents: int, split: str, *, read: Collection[str] = SPLITS
) -> None:
    """Raise DataError if a split that ``split`` asks for, and that is read, gets no document.

    Args:
        prefix: Path of the token files without suffix, for the message.
        documents: Number of documents in them.
        split: Value of ``--split``: weights of train, validation and test.
        read: The splits that the run reads.
    """
    counts = documents_of_splits(documents, split)
    empty = [name for name, count in counts.items() if count == 0 and name in read]
    if empty:
        shares = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(
            f"{prefix} has {documents} documents, and --split {split} leaves none for "
            f"{' and '.join(empty)} ({shares}). Give larger weights to what is empty (--split "
            "80,10,10), do without (--eval-iters 0), or cut the text into more documents "
            "(megatron-switch prepare --document-separator)."
        )


def split_weights(split: str) -> tuple[float, float, float]:
    """Return the weights of train, validation and test, which need not sum to 1.

    Args:
        split: Value of ``--split``; weights left out at its end are 0.

    Raises:
        DataError: It is not that.
    """
    words = [word.strip() for word in split.replace("/", ",").split(",") if word.strip()]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = []
    known = all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not (1 <= len(weights) <= len(SPLITS) and known and sum(weights) > 0):
        raise DataError(
            "--split takes the weights of train, validation and test data, at least 0 and not all "
            f"0, got {split!r}. Example: --split 98,1,1."
        )
    train, validation, test = weights + [0.0] * (len(SPLITS) - len(weights))
    return train, validation, test


def documents_of_splits(documents: int, split: str) -> dict[str, int]:
    """Return the number of documents of each split that has a weight."""
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return {
        name: round(span[1] * documents) - round(span[0] * documents)
        for name, span in zip(SPLITS, bounds, strict=True)
        if span is not None
    }
