"""Folders in Hugging Face's format: configuration, weights in one file or many, tokenizer.

Weights come from safetensors files or, for older models, from ``pytorch_model*.bin``, which torch
reads with ``weights_only``: no foreign file is ever unpickled. Only safetensors are written.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from megatron_switch.checkpoint.formats.safetensors_file import (
    SafetensorsFile,
    TensorGroup,
    write_safetensors,
)
from megatron_switch.checkpoint.formats.tensor_source import Region, TensorInfo, listing
from megatron_switch.checkpoint.formats.torch_file import TorchFile
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.fields import Fields, Source

CONFIG = "config.json"
_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
_INDEX = ".index.json"
SHARD_BYTES = 5 * 10**9
"""Size of a weight file, as in Hugging Face's libraries."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)


_INSTEAD = {
    "adapter_model.*": "It is an adapter (PEFT): merge it into its model first, with "
    "merge_and_unload and save_pretrained.",
    "snapshots": "It is a folder of the Hub's cache: name the one below snapshots.",
    "*.gguf": "It is quantized (GGUF): take the model that it was made of.",
    "consolidated.*": "These are the weights as Meta publishes them: take the folder with "
    "model.safetensors of the same model.",
    "latest_checkpointed_iteration.txt": "It is a Megatron checkpoint.",
}
"""What a folder without weights may hold instead, by a pattern of its files: the way out."""


class HuggingFaceSource:
    """The tensors of a folder, whatever files hold them."""

    def __init__(self, folder: Path) -> None:
        """Read headers and the index.

        Raises:
            CheckpointError: Files are missing or damaged, or disagree with the index.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"--hf {folder} is no folder, and nothing is downloaded. A model of the Hub is "
                "fetched with: hf download NAME --local-dir DIR"
            )
        self.folder = folder
        self._files: dict[Path, SafetensorsFile | TorchFile] = {}
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        index = self._index()
        for path in self._paths(index):
            self._add(path)
        if index is not None:
            self._check_index(*index)

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it; see :class:`TensorSource`."""
        return self._files[self._file_of[key]].read(key, region)

    def _index(self) -> tuple[Path, dict[str, str]] | None:
        for name in (_SAFETENSORS, _BIN):
            path = self.folder / (name + _INDEX)
            if path.exists() and not (self.folder / name).exists():
                entries = read_json(path).get("weight_map")
                if not isinstance(entries, dict) or not entries:
                    raise CheckpointError(f"{path} has no weight_map, which names each file.")
                return path, {str(key): str(value) for key, value in entries.items()}
        return None

    def _paths(self, index: tuple[Path, dict[str, str]] | None) -> list[Path]:
        if index is not None:
            path, entries = index
            names = sorted(set(entries.values()))
            outside = [name for name in names if PurePosixPath(name).name != name]
            if outside:
                raise CheckpointError(f"{path} points outside of its folder: {outside[0]}.")
            absent = [name for name in names if not (self.folder / name).is_file()]
            if absent:
                raise CheckpointError(
                    f"{path} names {len(names)} files, of which {len(absent)} are missing: "
                    f"{listing(absent)}. Download or copy them again."
                )
            return [self.folder / name for name in names]
        for name in (_SAFETENSORS, _BIN):
            if (self.folder / name).is_file():
                return [self.folder / name]
        hint = next(
            (hint for name, hint in _INSTEAD.items() if any(self.folder.glob(name))),
            "Name the folder that save_pretrained wrote.",
        )
        raise CheckpointError(
            f"{self.folder} holds no weights: neither {_SAFETENSORS}, {_BIN}, nor an index of "
            f"several such files. {hint}"
        )

    def _add(self, path: Path) -> None:
        file = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
        self._files[path] = file
        for key, info in file.tensors.items():
            if key in self.tensors:
                raise CheckpointError(
                    f"{key} is both in {self.tensors[key].file} and in {path}. Keep one of them."
                )
            self.tensors[key] = info
            self._file_of[key] = path

    def _check_index(self, path: Path, entries: Mapping[str, str]) -> None:
        wrong = [
            f"{key} in {name}"
            for key, name in entries.items()
            if key not in self.tensors or self._file_of[key].name != name
        ]
        if wrong:
            raise CheckpointError(
                f"{path} names tensors that are not in those files: {listing(wrong)}. "
                "Take the index that belongs to the files."
            )
        extra = self.tensors.keys() - entries.keys()
        if extra:
            raise CheckpointError(
                f"{path} does not name tensors that its files hold: {listing(extra)}. "
                "Take the index that belongs to the files."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        CheckpointError: The file is missing or holds no JSON object.
    """
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} is missing.")
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is no file that can be read. Copy it again.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is expected to hold a JSON object, not {value!r:.40}.")
    return value


def config_fields(config: Mapping[str, Any], where: str, model_type: str) -> Fields:
    """Return the values of a configuration, of which ``null`` is as good as none.

    A configuration is written by others, edited by hand and cut off by full disks.

    Args:
        config: Content of the file.
        where: The file, for messages.
        model_type: What the values are needed for, for messages.
    """
    advice = (
        f"A {model_type} model needs it. Correct the file, or take the one that belongs to the "
        "weights."
    )
    return Fields(config, Source(where, "", CheckpointError, advice, null_is_absent=True))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as ``save_pretrained`` does."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(
    folder: Path,
    groups: Sequence[TensorGroup],
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights as one safetensors file or, where they are many, several and an index."""
    shards: list[list[TensorGroup]] = [[]]
    size = 0
    for group in groups:
        if size and size + group.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    if len(shards) == 1:
        write_safetensors(folder / _SAFETENSORS, groups, on_bytes)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, on_bytes)
        weight_map.update({key: name for group in shard for key in group.names})
    total = sum(group.nbytes for group in groups)
    write_json(
        folder / (_SAFETENSORS + _INDEX),
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def copy_tokenizer(source: Path, target: Path) -> tuple[str, ...]:
    """Copy the files of a tokenizer from one folder to another; return their names."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if names:
        target.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return tuple(names)
