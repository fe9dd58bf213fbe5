"""Tensors of a ``torch_dist`` checkpoint, read region by region without a model and without pickle.

The index is read with a closed list of classes
(:mod:`megatron_switch.checkpoint.formats.dist_metadata`), and each stored chunk with
``weights_only``. Only chunks that a region touches are read, one at a time, so one expert of a
stack costs the memory of one expert.

Layers that are all alike may be stacked on disk (``decoder.layers.mlp...`` with a layer dim in
front). :class:`LayeredSource` presents them under one key for each layer, as layers of different
kinds are stored.
"""

import io
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_switch.checkpoint.formats.dist_metadata import find_defect, read_index
from megatron_switch.checkpoint.formats.tensor_source import Region, TensorInfo, TensorSource
from megatron_switch.errors import CheckpointError


class DistSource:
    """The tensors of one iteration's folder, whole, whatever layout wrote them."""

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Args:
            folder: Folder of one iteration, such as ``checkpoints/release``.

        Raises:
            CheckpointError: The checkpoint is not complete.
        """
        defect = find_defect(folder)
        if defect is not None:
            raise CheckpointError(f"The checkpoint {folder} is not complete: {defect}")
        self.folder = folder
        self._index = read_index(folder)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its key."""
        return {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype, self.folder)
            for key, entry in self._entries()
        }

    @cached_property
    def objects(self) -> frozenset[str]:
        """Keys of everything that is no tensor."""
        tensors = {key for key, _ in self._entries()}
        return frozenset(self._index.state_dict_metadata.keys() - tensors)

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it; see :class:`TensorSource`."""
        info = self.tensors[key]
        wanted = region or Region.whole(info.shape)
        result: Tensor | None = None
        filled = 0  # elements
        for chunk in self.chunks(key):
            shared = wanted.intersection(chunk)
            if shared is None:
                continue
            stored = self._read_chunk(key, chunk)
            if chunk == wanted:
                return stored  # the usual case, without a second tensor
            if result is None:
                result = torch.empty(wanted.sizes, dtype=info.dtype)
            result[shared.slices_in(wanted)] = stored[shared.slices_in(chunk)]
            filled += shared.numel
        if filled != wanted.numel:  # the rest would be uninitialised memory
            raise CheckpointError(
                f"{self.folder / '.metadata'}: the chunks of {key} hold {filled} elements of "
                f"{wanted}, which needs {wanted.numel}. Take another iteration."
            )
        return torch.empty(wanted.sizes, dtype=info.dtype) if result is None else result

    def chunks(self, key: str) -> tuple[Region, ...]:
        """Return the regions in which a tensor is stored."""
        entry = cast(TensorStorageMetadata, self._index.state_dict_metadata[key])
        return tuple(Region(tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks)

    def read_object(self, key: str) -> bytes:
        """Return the bytes of an entry that is no tensor, to be copied without unpickling."""
        with self._stream(self._location(MetadataIndex(key), key)) as stream:
            return stream.read()

    def _entries(self) -> list[tuple[str, TensorStorageMetadata]]:
        return [
            (key, entry)
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]

    def _location(self, index: MetadataIndex, key: str) -> Any:
        location = self._index.storage_data.get(index)
        if location is None:
            raise CheckpointError(
                f"{self.folder / '.metadata'} names no file for {key}. Take another iteration."
            )
        return location

    def _read_chunk(self, key: str, chunk: Region) -> Tensor:
        location = self._location(MetadataIndex(key, torch.Size(chunk.offsets)), key)
        path = self.folder / location.relative_path
        try:
            with self._stream(location) as stream:
                stored = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises nearly anything on a damaged file
            raise CheckpointError(
                f"{path}: {key} is expected at byte {location.offset} as {chunk.sizes} "
                f"{self.tensors[key].dtype}, but no tensor can be read there "
                f"({type(error).__name__}). The file is damaged; take another iteration."
            ) from error
        dtype = self.tensors[key].dtype
        if not isinstance(stored, Tensor) or (tuple(stored.shape), stored.dtype) != (
            chunk.sizes,
            dtype,
        ):
            found = (
                f"{tuple(stored.shape)} {stored.dtype}"
                if isinstance(stored, Tensor)
                else type(stored).__name__
            )
            raise CheckpointError(
                f"{path}: {key} is {found} at byte {location.offset}, but the index says "
                f"{chunk.sizes} {dtype}. Take another iteration."
            )
        return stored

    def _stream(self, location: Any) -> BinaryIO:
        path = self.folder / location.relative_path
        return cast(BinaryIO, _FilePart(path, location.offset, location.length))


class LayeredSource:
    """Another source with one key for each layer, where it has layers stacked."""

    def __init__(
        self, source: TensorSource, depths: Mapping[str, int], *, ignored: Collection[str] = ()
    ) -> None:
        """Wrap ``source``.

        Args:
            source: Where tensors come from.
            depths: Layers of each block, ``encoder`` and ``decoder``.
            ignored: Keys that are shown as they are.
        """
        self._source = source
        self._places: dict[str, tuple[str, int] | None] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for key, info in source.tensors.items():
            if key in ignored or (match := _STACKED.fullmatch(key)) is None:
                self.tensors[key] = info
                self._places[key] = None
            elif info.shape[:1] != (depths.get(match[1]),):
                raise CheckpointError(
                    f"{info.file}: {key} has shape {info.shape}, but the stored arguments describe "
                    f"{depths.get(match[1])} layers in the {match[1]}. The arguments belong to "
                    "another checkpoint."
                )
            else:
                one = TensorInfo(info.shape[1:], info.dtype, info.file)
                for layer in range(info.shape[0]):
                    name = f"{match[1]}.layers.{layer}.{match[2]}"
                    self.tensors[name], self._places[name] = one, (key, layer)

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it; see :class:`TensorSource`."""
        at = self._places[key]
        if at is None:
            return self._source.read(key, region)
        stack, layer = at
        inner = region or Region.whole(self.tensors[key].shape)
        outer = Region((layer, *inner.offsets), (1, *inner.sizes))
        return self._source.read(stack, outer).squeeze(0)


_STACKED = re.compile(r"(encoder|decoder)\.layers\.(?!\d+\.)(.*)")


class _FilePart(io.RawIOBase):
    """A range of bytes of a file, as a file of its own that is not copied into memory."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Ends at the part's end, so that torch cannot read into the next tensor.
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
