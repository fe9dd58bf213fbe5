"""Safetensors files, one tensor in memory at a time.

Files are read with the library, which checks that tensors fill the file without overlap. It reads
at offsets (``pread``): a memory map would count as the process's own memory, all of the file, and
a file that shrinks or fails meanwhile would kill the process instead of raising.

The library writes what is in memory as a whole; here a file is written in one pass, because the
sizes of all tensors are known before the first is made.

Source: the format's own description, https://github.com/huggingface/safetensors.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_switch.checkpoint.formats.tensor_source import Region, TensorInfo
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


class SafetensorsFile:
    """A file to read."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: The file is missing or damaged, or holds a type that torch lacks.
        """
        self._path = path
        try:
            self._file = cast(Any, safe_open)(path, framework="pt", backend="pread")
        except FileNotFoundError:  # the library says so of what it may not read, too
            if path.exists():
                path.open("rb").close()
            raise CheckpointError(f"{path} is missing.") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is no safetensors file, or damaged, or cut off: {error}. Copy it again."
            ) from error
        self.tensors = {key: self._info(key) for key in self._file.offset_keys()}

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it; see :class:`TensorSource`.

        Raises:
            CheckpointError: The file ends early.
        """
        whole = Region.whole(self.tensors[key].shape)
        try:
            if region is None or region == whole:
                tensor: Tensor = self._file.get_tensor(key)
            else:
                tensor = self._file.get_slice(key)[region.slices_in(whole)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: {key} cannot be read: {error}.") from error
        return tensor

    def _info(self, key: str) -> TensorInfo:
        described = self._file.get_slice(key)
        if (name := described.get_dtype()) not in _NAMES:
            raise CheckpointError(f"{self._path}: {key} is of the unknown type {name}.")
        return TensorInfo(tuple(described.get_shape()), _NAMES[name], self._path)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are made together, such as the three that are one in Megatron."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    make: Callable[[], Sequence[Tensor]] = field(compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize


def write_safetensors(
    path: Path, groups: Iterable[TensorGroup], on_bytes: Callable[[int], None]
) -> None:
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
