"""Read the metadata of a ``torch_dist`` checkpoint without executing any of it.

A checkpoint of iteration N is a folder with three kinds of files: data files (``*.distcp``), an
index ``.metadata`` with the place of each tensor, and ``metadata.json``, which Megatron writes
last. Index and common state (iteration, arguments, schedule, optimizer hyper-parameters) are
pickles. torch reads both with an unpickler that executes what the file contains; here the index is
read with a closed list of classes and the common state with ``weights_only``. A file that names any
other class is refused, with that name.

No process group, no GPU and no model is needed, so checks run before a job starts.
"""

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_switch.checkpoint.formats.foreign_formats import (
    PLAIN_TORCH,
    ForeignFormat,
    format_by_names,
)
from megatron_switch.errors import CheckpointError

COMMON_STATE_KEY = "common_state/shard_0_1"
"""Index entry of what is no tensor and equal on all ranks."""

NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "common_state")
"""How the keys of all else in a Megatron checkpoint begin."""

_INDEX = ".metadata"
_DESCRIPTION = "metadata.json"
_SEPARATE_COMMON_STATE = "common.pt"  # where Megatron-Core before 0.17 kept it

_INDEX_CLASSES = {
    "torch": {"Size"},  # and data types, which are checked by their value
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron keeps every rank's plan in the index, for saves that reuse it.
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def read_backend(folder: Path) -> str:
    """Return the storage format that ``metadata.json`` names, ``torch_dist`` for ours.

    Raises:
        CheckpointError: The file is missing, or is not what Megatron writes.
    """
    path = folder / _DESCRIPTION
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["sharded_backend"])
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; it is written last.") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}.") from error


def read_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint: which tensor lies where in which file.

    Raises:
        CheckpointError: The file is missing or empty, is no index, or names a class that no
            index needs. Nothing it names has been executed.
    """
    path = folder / _INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    if not content:
        raise CheckpointError(f"{path} is empty.")
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path} cannot be read: {error!r}.") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, Mapping):
        raise CheckpointError(f"{path} is not the index of a torch_dist checkpoint.")
    return index


def data_file_sizes(index: Metadata) -> dict[str, int]:
    """Return the data files that an index refers to, with the bytes each must have at least.

    Raises:
        CheckpointError: An entry points outside of the checkpoint's folder.
    """
    sizes: dict[str, int] = {}
    for entry in index.storage_data.values():
        name = _inside(entry.relative_path)
        sizes[name] = max(sizes.get(name, 0), entry.offset + entry.length)
    return sizes


def find_defect(folder: Path) -> str | None:
    """Return why the checkpoint in ``folder`` cannot be loaded, or None if it is complete.

    Complete means: Megatron's last file is there, the index can be read, and every data
    file that the index refers to is there with all its bytes.
    """
    if not folder.is_dir():
        return f"{folder} does not exist."
    foreign = foreign_format(folder)
    if foreign is not None:
        return f"it is in {foreign.name}."
    try:
        backend = read_backend(folder)
        index = read_index(folder)
        sizes = data_file_sizes(index)
    except CheckpointError as error:
        return str(error)
    if backend != "torch_dist":
        return f"it is in the format {backend!r}."
    if COMMON_STATE_KEY not in index.state_dict_metadata:
        sizes[_SEPARATE_COMMON_STATE] = 1
    for name, size in sorted(sizes.items()):
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            return f"{path} is missing."
        if found < size:
            return f"{path} has {found} bytes, but the index needs {size}."
    return None


def foreign_format(folder: Path) -> ForeignFormat | None:
    """Return the format of a folder where it is recognisably not ``torch_dist``."""
    if (folder / _DESCRIPTION).exists():
        return None
    if not (folder / _INDEX).exists():
        return format_by_names(folder)
    try:
        keys = read_index(folder).state_dict_metadata
    except CheckpointError:
        return None
    # torch_dist keeps non-tensors as "name/shard_..." entries; the formats that hold
    # plain torch state dicts have them under their own names.
    if any(key.split(".")[0] in ("args", "checkpoint_version", "iteration") for key in keys):
        return PLAIN_TORCH
    return None


def read_common_state(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides tensors and per-rank objects.

    Args:
        folder: Folder of one iteration, such as ``checkpoints/iter_0000500``.

    Returns:
        Megatron's common state: ``args`` (an ``argparse.Namespace``), ``iteration``,
        ``checkpoint_version``, ``opt_param_scheduler``, ``content_metadata``, and the optimizer's
        hyper-parameters where they are equal on all ranks. What a run did not save is absent.

    Raises:
        CheckpointError: It cannot be read, or needs classes outside of Megatron's safe list.
    """
    # The import registers Megatron's safe classes with torch; it takes seconds, so the
    # functions above, which a login node may call, do without.
    import megatron.core  # noqa: F401

    index = read_index(folder)
    entry = index.storage_data.get(MetadataIndex(COMMON_STATE_KEY))
    path = folder / (_SEPARATE_COMMON_STATE if entry is None else _inside(entry.relative_path))
    try:
        if entry is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            with path.open("rb") as stream:
                stream.seek(entry.offset)
                content = io.BytesIO(stream.read(entry.length))
            (state,) = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything on a damaged file
        raise CheckpointError(
            f"The common state of the checkpoint in {path} cannot be read safely: {error}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"The common state of the checkpoint in {path} is no dictionary.")
    return state


class _IndexUnpickler(pickle.Unpickler):
    """Builds the plain records of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise CheckpointError(
            f"names {module}.{name}, which no index of a checkpoint needs. It was not executed; "
            "do not load this checkpoint unless you know who wrote it."
        )


def _inside(relative_path: str) -> str:
    path = PurePosixPath(relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"The index points to {relative_path!r}, outside of its own folder.")
    return str(path)
