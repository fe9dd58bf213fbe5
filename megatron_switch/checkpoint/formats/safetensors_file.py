"""Safetensors files, one tensor in memory at a time.

The format is eight bytes of length, that many of JSON, and the tensors' bytes one after another.
The library maps files into memory or takes every tensor of a file at once; here a file is read by
seeking and written in one pass, because the sizes of all tensors are known before the first is
made. Files are the library's, both ways; a test compares them.

Source: the format's own description, https://github.com/huggingface/safetensors.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_switch.checkpoint.formats.tensor_source import Box, TensorInfo
from megatron_switch.errors import CheckpointError

_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAME_OF = {dtype: name for name, dtype in _NAMES.items()}
_LONGEST_HEADER = 100 * 2**20  # the library's own limit


class SafetensorsFile:
    """A file to read."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: The file is missing, damaged, or shorter than its header says.
        """
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            self._begin = 8 + length
            self._places = {key: tuple(entry["data_offsets"]) for key, entry in header.items()}
            self.tensors = {key: self._info(key, entry) for key, entry in header.items()}
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing.") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}.") from error
        self._check_places(size)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or a box of it; only rows of the first dim that are asked for are read.

        Raises:
            CheckpointError: The file ends early.
        """
        info = self.tensors[key]
        wanted = box or Box.whole(info.shape)
        if 0 in wanted.sizes:
            return torch.empty(wanted.sizes, dtype=info.dtype)
        if not info.shape:
            return self._bytes(key, 0, info.nbytes).view(info.dtype).reshape(())
        row_bytes = math.prod(info.shape[1:]) * info.dtype.itemsize
        first, count = wanted.offsets[0], wanted.sizes[0]
        raw = self._bytes(key, first * row_bytes, count * row_bytes)
        rows = raw.view(info.dtype).reshape(count, *info.shape[1:])
        outer = Box((first, *(0 for _ in info.shape[1:])), tuple(rows.shape))
        return rows if outer == wanted else rows[wanted.slices_in(outer)].clone()

    def _check_places(self, size: int) -> None:
        """Raise unless tensors lie one behind the other, as the format says, to the file's end."""
        expected = 0
        for key, (begin, end) in sorted(self._places.items(), key=lambda item: item[1]):
            if self._begin + end > size:
                raise CheckpointError(
                    f"{self._path} is cut off: {key} is expected to end at byte "
                    f"{self._begin + end}, but the file has {size}. Copy it again."
                )
            if begin != expected:
                raise CheckpointError(
                    f"{self._path} is damaged: {key} is expected to begin at byte "
                    f"{self._begin + expected}, behind the tensor before it, but its header says "
                    f"{self._begin + begin}. Copy it again."
                )
            expected = end
        if self._begin + expected != size:
            raise CheckpointError(
                f"{self._path} is damaged: its last tensor ends at byte {self._begin + expected}, "
                f"but the file has {size}. Copy it again."
            )

    def _info(self, key: str, entry: Any) -> TensorInfo:
        shape = tuple(int(size) for size in entry["shape"])
        if entry["dtype"] not in _NAMES:
            raise ValueError(f"{key} is of the unknown type {entry['dtype']}")
        info = TensorInfo(shape, _NAMES[entry["dtype"]], self._path)
        begin, end = self._places[key]
        if end - begin != info.nbytes:
            raise ValueError(f"{key} has {end - begin} bytes, but its shape {shape} needs another")
        return info

    def _bytes(self, key: str, offset: int, length: int) -> Tensor:
        raw = torch.empty(length, dtype=torch.uint8)
        view, done = memoryview(raw.numpy()), 0
        try:
            with self._path.open("rb", buffering=0) as stream:
                stream.seek(self._begin + self._places[key][0] + offset)
                while done < length and (count := stream.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self._path}: {key} cannot be read: {error}.") from error
        if done != length:
            raise CheckpointError(
                f"{self._path} ends within {key}: {length} bytes are expected, {done} were found."
            )
        return raw


@dataclass(frozen=True)
class Group:
    """Tensors that are made together, such as the three that are one in Megatron."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    make: Callable[[], Sequence[Tensor]] = field(compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize


def write_safetensors(path: Path, groups: Iterable[Group], on_bytes: Callable[[int], None]) -> None:
    """Write a file, making one group after another.

    Args:
        path: File to write.
        groups: What goes into it, in this order.
        on_bytes: Called with the size of each group that was written.
    """
    groups = list(groups)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for group in groups:
        for name, shape in zip(group.names, group.shapes, strict=True):
            end = at + math.prod(shape) * group.dtype.itemsize
            assert name not in header, f"{name} is written twice"
            header[name] = {
                "dtype": _NAME_OF[group.dtype],
                "shape": list(shape),
                "data_offsets": [at, end],
            }
            at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for group in groups:
            tensors = group.make()
            for name, shape, tensor in zip(group.names, group.shapes, tensors, strict=True):
                assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, not {shape}"
                raw = tensor.to(group.dtype).contiguous().reshape(-1).view(torch.uint8)
                stream.write(memoryview(raw.numpy()))
            del tensors
            on_bytes(group.nbytes)
