"""Tensors in files of any format: what they are, how they are read, what they must be.

A :class:`TensorSource` lists its tensors without reading them and reads any region of any of them,
so that a conversion plans with sizes and types alone, refuses what does not fit before it writes a
byte, and afterwards never holds more than the tensor at hand.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_switch.errors import CheckpointError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that a weight may have in a file."""


@dataclass(frozen=True)
class Region:
    """A part of a tensor: one offset and one size for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """Return the region that is the whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def row(cls, shape: Sequence[int], index: int) -> "Region":
        """Return row ``index`` of the first dim, which stays, with size 1."""
        return cls((index, *(0 for _ in shape[1:])), (1, *shape[1:]))

    def intersection(self, other: "Region") -> "Region | None":
        """Return the part that two regions of one tensor share, or None."""
        begin = tuple(map(max, self.offsets, other.offsets))
        end = tuple(map(min, self.ends, other.ends))
        sizes = tuple(e - b for b, e in zip(begin, end, strict=True))
        return None if any(size <= 0 for size in sizes) else Region(begin, sizes)

    def slices_in(self, outer: "Region") -> tuple[slice, ...]:
        """Return the index of this region in a tensor that holds ``outer``."""
        return tuple(
            slice(at - origin, at - origin + size)
            for at, origin, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index of each dim."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    """Where it is, for messages; a tensor in several files names their folder."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Tensors in files, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its key."""
        ...

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it, on the CPU, in storage of its own.

        Raises:
            CheckpointError: The file does not hold what was announced.
        """
        ...


def expect(source: TensorSource, key: str, shape: Sequence[int]) -> TensorInfo:
    """Return what is known of a tensor, after checking that it is what a model needs.

    Raises:
        CheckpointError: It is missing, has another shape, or is no floating-point number.
    """
    info = source.tensors.get(key)
    if info is None:
        raise CheckpointError(f"{place(source)} lacks {key}, expected with shape {tuple(shape)}.")
    if info.shape != tuple(shape):
        raise CheckpointError(
            f"{info.file}: {key} has shape {info.shape}, but the configuration needs "
            f"{tuple(shape)}. Correct the configuration, or take the files that belong to it."
        )
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"{info.file}: {key} is of type {info.dtype}, but a weight is expected to be one of "
            f"{', '.join(str(dtype) for dtype in FLOATS)}. Save the model in one of "
            "these types first."
        )
    return info


def place(source: TensorSource) -> Path:
    """Return the folder of a source, for messages about what is not in it."""
    files = {info.file for info in source.tensors.values()}
    first = min(files, default=Path())
    return first if first.is_dir() else first.parent


def check_finite(tensor: Tensor, key: str, file: Path) -> None:
    """Raise when a weight holds NaN or an infinity.

    Raises:
        CheckpointError: Naming file, key and how many elements are bad.
    """
    # A sum shows whether any is bad, without another tensor of the same size.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise CheckpointError(
            f"{file}: {key} holds {bad} elements that are NaN or infinite, of {tensor.numel()}; "
            "every weight is expected to be finite. Take an earlier checkpoint."
        )


def differing_bits(first: Tensor, second: Tensor) -> int:
    """Return how many elements of two tensors of one type and shape differ in any bit.

    Zero and minus zero differ, and a NaN equals itself.
    """
    integers = _INTEGERS[first.dtype.itemsize]
    one, two = (tensor.contiguous().view(integers) for tensor in (first, second))
    return 0 if torch.equal(one, two) else int((one != two).sum())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Return the first names of a set, sorted, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def common_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the type that holds every value of several tensors."""
    dtypes = [info.dtype for info in infos]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result
