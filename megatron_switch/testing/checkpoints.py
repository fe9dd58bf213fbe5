"""Compare two checkpoints tensor by tensor, and write small ones, without a model.

For tests that resume, reshard or convert: "the same" is a statement about every tensor
that was saved, weights and optimizer moments alike, and about the optimizer's step.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_switch.checkpoint.formats.dist_metadata import COMMON_STATE_KEY, read_index
from megatron_switch.checkpoint.load.files import TRACKER


@dataclass(frozen=True)
class Difference:
    """One tensor in which two checkpoints differ.

    Attributes:
        key: Its name in the checkpoint.
        kind: What differs; for ``values`` only, ``relative`` is a number.
        relative: Norm of the difference over the norm of the first; 0.0 for other kinds.
    """

    key: str
    kind: Literal["only in first", "only in second", "shape", "dtype", "values"]
    relative: float = 0.0


def compare_checkpoints(first: Path, second: Path, *, tolerance: float = 0.0) -> list[Difference]:
    """Return the tensors in which two ``torch_dist`` checkpoints differ.

    Args:
        first: Folder of one iteration.
        second: Folder of another.
        tolerance: Greatest relative difference in norm, per tensor, that counts as equal.
            With 0.0 every bit must be equal.
    """
    return compare_tensors(load_tensors(first), load_tensors(second), tolerance=tolerance)


def compare_tensors(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, tolerance: float = 0.0
) -> list[Difference]:
    """Return the tensors in which two state dicts differ; see :func:`compare_checkpoints`."""
    differences = [Difference(key, "only in first") for key in sorted(first.keys() - second.keys())]
    differences += [
        Difference(key, "only in second") for key in sorted(second.keys() - first.keys())
    ]
    for key in sorted(first.keys() & second.keys()):
        a, b = first[key], second[key]
        if a.shape != b.shape:
            differences.append(Difference(key, "shape"))
        elif a.dtype != b.dtype:
            differences.append(Difference(key, "dtype"))
        elif not torch.equal(a, b):
            relative = relative_difference(a, b)
            if not relative <= tolerance or tolerance == 0.0:  # a NaN is a difference too
                differences.append(Difference(key, "values", relative))
    return differences


def relative_difference(first: Tensor, second: Tensor) -> float:
    """Return ``|first - second| / |first|`` in float64; infinite where only ``first`` is zero."""
    norm = torch.linalg.vector_norm(first.double())
    return float(torch.linalg.vector_norm(first.double() - second.double()) / norm)


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, whole, by its key, on the CPU."""
    metadata = read_index(folder).state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*")
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def save_checkpoint(
    folder: Path,
    iteration: int | Literal["release"],
    tensors: Mapping[str, Tensor],
    common_state: Mapping[str, Any],
) -> Path:
    """Write a ``torch_dist`` checkpoint and its tracker as Megatron would, without Megatron.

    Args:
        folder: Where the tracker goes; created if need be.
        iteration: Iteration, or the word that stands for weights only.
        tensors: Whole tensors by their keys.
        common_state: What is equal on all ranks, such as ``args`` and ``iteration``.

    Returns:
        The folder of the iteration.
    """
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    target = folder / name
    target.mkdir(parents=True)
    state: dict[str, Any] = {**tensors, COMMON_STATE_KEY: [dict(common_state)]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*")
        save(
            state,
            storage_writer=FileSystemWriter(target),
            planner=DefaultSavePlanner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,  # it would lose empty dictionaries and lists
            ),
            no_dist=True,
        )
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (target / "metadata.json").write_text(json.dumps(description))
    (folder / TRACKER).write_text(str(iteration))
    return target
