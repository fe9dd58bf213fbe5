"""Write a ``torch_dist`` checkpoint chunk by chunk, without a model.

torch's own writer keeps every tensor of a file in memory until the file ends; this one keeps none.
Each chunk is computed, appended to its file, and released before the next one. The files are those
that Megatron writes: data files, the common state as one object, ``.metadata``, and
``metadata.json`` last.

A chunk holds a function that computes it, because the plan of all chunks is checked before any
tensor is read: together the chunks of a key must tile its shape.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_switch.checkpoint.formats.dist_metadata import COMMON_STATE_KEY
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.upstream.private import StorageInfo

_FILE_BYTES = 4 * 2**30
"""Size at which the next data file is begun; a chunk is never divided."""


@dataclass(frozen=True)
class TensorChunk:
    """A region of a tensor of the new checkpoint, and how to make it."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    region: Region
    make: Callable[[], Tensor] = field(compare=False, repr=False)
    rank: int = 0
    """Which rank's file it goes to, where ranks matter."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.numel * self.dtype.itemsize


def write_dist_checkpoint(
    folder: Path,
    chunks: Sequence[TensorChunk],
    objects: Mapping[str, bytes],
    common_state: Mapping[str, Any],
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write one iteration's folder.

    Args:
        folder: Folder to fill; it must exist and be empty.
        chunks: Every region of every tensor.
        objects: Entries that are no tensors, as ``torch.save`` wrote them.
        common_state: What is equal on all ranks.
        workers: Threads that each make and write chunks; memory grows with their number.
        on_bytes: Called with the size of each chunk that was written.
    """
    _check_tiling(chunks)
    index = Metadata(state_dict_metadata=_tensor_entries(chunks), storage_data={})
    index.storage_meta = StorageMeta()
    entries = {**objects, COMMON_STATE_KEY: serialized([dict(common_state)])}
    stop = Event()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        parts = [
            pool.submit(_write_file, folder, name, some, on_bytes, stop)
            for name, some in _files(chunks, workers)
        ]
        try:
            done, _ = wait(parts, return_when=FIRST_EXCEPTION)
            for part in done:
                index.storage_data.update(part.result())
        except BaseException:  # the other threads stop after their chunk, not after their file
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    index.storage_data.update(_write_objects(folder, entries))
    index.state_dict_metadata.update({key: BytesStorageMetadata() for key in entries})
    # Last the two files without which a checkpoint counts as incomplete.
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(description), encoding="utf-8")


def serialized(value: Any) -> bytes:
    """Return a value as ``torch.save`` stores it."""
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


EMPTY_EXTRA_STATE = serialized([None])
"""Entry of a layer that has no extra state."""


def _check_tiling(chunks: Iterable[TensorChunk]) -> None:
    sizes: dict[str, int] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    shapes = {}
    for chunk in chunks:
        assert (chunk.key, chunk.region.offsets) not in seen, f"{chunk.key} is written twice"
        seen.add((chunk.key, chunk.region.offsets))
        sizes[chunk.key] = sizes.get(chunk.key, 0) + chunk.region.numel
        shapes[chunk.key] = chunk.shape
    # Offsets differ and sizes add up: with regions from one grid, that is a tiling.
    for key, size in sizes.items():
        assert size == Region.whole(shapes[key]).numel, f"{key} is not written whole"


def _tensor_entries(chunks: Iterable[TensorChunk]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.key not in entries:
            entries[chunk.key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=chunk.dtype),
                size=torch.Size(chunk.shape),
                chunks=[],
            )
        place = ChunkStorageMetadata(
            offsets=torch.Size(chunk.region.offsets), sizes=torch.Size(chunk.region.sizes)
        )
        entries[chunk.key].chunks.append(place)
    return entries


def _files(chunks: Sequence[TensorChunk], workers: int) -> list[tuple[str, list[TensorChunk]]]:
    """Assign chunks to files: by rank, and by size within a rank."""
    per_worker = -(-sum(chunk.nbytes for chunk in chunks) // workers)
    limit = min(_FILE_BYTES, max(per_worker, 1))
    files: list[tuple[str, list[TensorChunk]]] = []
    by_rank = attrgetter("rank")
    for rank, some in groupby(sorted(chunks, key=by_rank), by_rank):
        number, size = 0, limit  # so that the first chunk opens a file
        for chunk in some:
            if size >= limit:
                files.append((f"__{rank}_{number}.distcp", []))
                number, size = number + 1, 0
            files[-1][1].append(chunk)
            size += chunk.nbytes
    return files


def _write_file(
    folder: Path,
    name: str,
    chunks: Iterable[TensorChunk],
    on_bytes: Callable[[int], None],
    stop: Event,
) -> dict[MetadataIndex, StorageInfo]:
    places: dict[MetadataIndex, StorageInfo] = {}
    with (folder / name).open("wb") as stream:
        for chunk in chunks:
            if stop.is_set():
                break
            tensor = chunk.make().to(chunk.dtype)
            assert tuple(tensor.shape) == chunk.region.sizes, f"{chunk.key}: {tuple(tensor.shape)}"
            index = MetadataIndex(chunk.key, torch.Size(chunk.region.offsets))
            places[index] = _append(stream, name, _own_storage(tensor))
            del tensor  # before the next one is made: the bound on memory
            on_bytes(chunk.nbytes)
    return places


def _append(stream: BinaryIO, name: str, tensor: Tensor) -> StorageInfo:
    offset = stream.tell()
    torch.save(tensor, stream)
    return StorageInfo(name, offset, stream.tell() - offset)


def _own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor that has its storage alone: ``torch.save`` writes all of the storage."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_objects(folder: Path, entries: Mapping[str, bytes]) -> dict[MetadataIndex, StorageInfo]:
    name = "__0_objects.distcp"
    places = {}
    with (folder / name).open("wb") as stream:
        for key, content in entries.items():
            places[MetadataIndex(key)] = StorageInfo(name, stream.tell(), len(content))
            stream.write(content)
    return places
