"""Convert checkpoints between Hugging Face's format and Megatron's, without building a model.

A conversion is planned from headers alone: every tensor of the source has its place, every tensor
of the target its origin, sizes and types fit, the disk has room. Only then are tensors read, one at
a time, and written; the target appears under its name when it is whole.

Memory: one tensor of Megatron's (one expert, where experts are stacked) with its parts, for each
worker.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_switch.checkpoint.convert.architectures import (
    ExportedModel,
    ImportedModel,
    describe_export,
    describe_import,
)
from megatron_switch.checkpoint.convert.megatron_source import open_weights, stored_args
from megatron_switch.checkpoint.convert.name_map import MapEntry, NameMap
from megatron_switch.checkpoint.formats.atomic_folder import folder_put_in_place
from megatron_switch.checkpoint.formats.dist_writer import (
    EMPTY_EXTRA_STATE,
    TensorChunk,
    write_dist_checkpoint,
)
from megatron_switch.checkpoint.formats.hf_folder import (
    CONFIG,
    HuggingFaceSource,
    copy_tokenizer,
    read_json,
    write_json,
    write_weights,
)
from megatron_switch.checkpoint.formats.safetensors_file import TensorGroup
from megatron_switch.checkpoint.formats.source_settings import (
    GENERATION,
    NO_SETTINGS,
    TOKEN_IDS,
    TOKENIZER_FOLDER,
    SourceSettings,
    keep_settings,
)
from megatron_switch.checkpoint.formats.tensor_source import TensorSource
from megatron_switch.checkpoint.load.files import RELEASE, TRACKER, FoundCheckpoint
from megatron_switch.checkpoint.load.settings_agreement import UNTRAINED
from megatron_switch.errors import CheckpointError

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""What ``--dtype`` takes."""

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Import:
    """A model in Hugging Face's format, checked and ready to be written for Megatron."""

    folder: Path
    source: HuggingFaceSource
    model: ImportedModel
    chunks: tuple[TensorChunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def precision(self) -> torch.dtype:
        """Type of most of the weights."""
        return _most((chunk.dtype, chunk.nbytes) for chunk in self.chunks)


@dataclass(frozen=True)
class Export:
    """A Megatron checkpoint, checked and ready to be written in Hugging Face's format."""

    found: FoundCheckpoint
    args: Namespace
    model: ExportedModel
    groups: tuple[TensorGroup, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(group.nbytes for group in self.groups)

    @property
    def precision(self) -> torch.dtype:
        """Type of most of the weights."""
        return _most((group.dtype, group.nbytes) for group in self.groups)


def plan_import(hf: Path, *, dtype: str = "keep", multiple: int = 8) -> Import:
    """Plan a conversion to Megatron's format.

    Args:
        hf: Folder in Hugging Face's format.
        dtype: A key of :data:`DTYPES`.
        multiple: The vocabulary is padded with rows of zeros to a multiple of this.

    Raises:
        CheckpointError: Files are missing or damaged, tensors do not fit the configuration, or
            there is no name map for the architecture.
    """
    source = HuggingFaceSource(hf)
    config = read_json(hf / CONFIG)
    model = describe_import(config, str(hf / CONFIG), source.tensors, multiple=multiple)
    model.name_map.check_other_side(source)
    chunks = tuple(
        TensorChunk(
            key,
            entry.shape,
            DTYPES[dtype] or entry.packed_dtype(source),
            entry.region,
            partial(_packed, entry, source, DTYPES[dtype]),
        )
        for entry in model.name_map.entries
        for key in (entry.key, *entry.copies)
    )
    return Import(hf, source, model, chunks)


def write_import(
    plan: Import,
    args: Namespace,
    target: Path,
    *,
    workers: int = 1,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Write a planned conversion as a release: weights only, without an iteration.

    Args:
        plan: What :func:`plan_import` returned.
        args: Arguments to store: those of a run of the model, validated.
        target: Folder to make, with the tracker file in it.
        workers: Threads.
        on_bytes: Called with the size of each tensor that was written.

    Raises:
        CheckpointError: The target exists or its disk is full, or a tensor cannot be read.
    """
    with folder_put_in_place(target, needed_bytes=plan.nbytes, flag="--megatron") as folder:
        copy_tokenizer(plan.folder, folder / TOKENIZER_FOLDER)
        keep_settings(plan.folder, folder / TOKENIZER_FOLDER)
        write_release(
            folder, plan.chunks, plan.model.name_map, args, workers=workers, on_bytes=on_bytes
        )


def write_release(
    folder: Path,
    chunks: Iterable[TensorChunk],
    name_map: NameMap,
    args: Namespace,
    *,
    workers: int,
    on_bytes: OnBytes,
    is_untrained: bool = False,
) -> None:
    """Write weights as Megatron's release of a model, with its tracker.

    Args:
        folder: Folder to fill.
        chunks: The weights.
        name_map: The model's names; its extra states are written too.
        args: Arguments to store.
        workers: Threads.
        on_bytes: Called with the size of each chunk that was written.
        is_untrained: Whether no run has trained the model's experts yet.
    """
    release = folder / RELEASE
    release.mkdir()
    write_dist_checkpoint(
        release,
        tuple(chunks),
        dict.fromkeys(name_map.extra_states(), EMPTY_EXTRA_STATE),
        release_state(args) | ({UNTRAINED: True} if is_untrained else {}),
        workers=workers,
        on_bytes=on_bytes,
    )
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def release_state(args: Namespace) -> dict[str, Any]:
    """Return the common state of a release.

    ``non_homogeneous_layers`` makes Megatron look for one key for each layer, dense or not.
    """
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "non_homogeneous_layers": True,
        },
    }


def plan_export(
    found: FoundCheckpoint,
    *,
    architecture: str = "auto",
    dtype: str = "keep",
    vocab_size: int | None = None,
) -> Export:
    """Plan a conversion to Hugging Face's format.

    Args:
        found: The checkpoint.
        architecture: Model type to write, or ``auto``.
        dtype: A key of :data:`DTYPES`.
        vocab_size: Rows of the embedding to write; None for all, padding included.

    Raises:
        CheckpointError: The checkpoint is damaged, stores no arguments, holds other tensors than
            they describe, or no architecture fits.
    """
    args = stored_args(found)
    if vocab_size is not None and vocab_size > args.padded_vocab_size:
        raise CheckpointError(
            f"--vocab-size {vocab_size} asks for more rows than the embedding of {found.folder} "
            f"has: {args.padded_vocab_size}."
        )
    source, others, _ = open_weights(found, args)
    model = describe_export(args, wanted=architecture, vocab_size=vocab_size)
    model.name_map.check_megatron(source, others)
    chosen = DTYPES[dtype]
    groups = [
        TensorGroup(
            entry.names(),
            entry.shapes(),
            chosen or source.tensors[entry.key].dtype,
            partial(_unpacked, entry, source, chosen),
        )
        for entry in model.name_map.entries
    ]
    groups += [
        TensorGroup((part.name,), (part.shape,), groups[0].dtype, partial(_zeros, part.shape))
        for part in model.name_map.inert
    ]
    return Export(found, args, model, tuple(groups))


def write_export(
    plan: Export,
    target: Path,
    *,
    tokenizer: Callable[[Path], object] = lambda folder: None,
    settings: SourceSettings = NO_SETTINGS,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Write a planned conversion: weights, configuration, and whatever tokenizer is given.

    Args:
        plan: What :func:`plan_export` returned.
        target: Folder to make.
        tokenizer: Called with the folder, to put the tokenizer's files there.
        settings: Ids of the tokens with a meaning, and how to generate.
        on_bytes: Called with the size of each group of tensors that was written.

    Raises:
        CheckpointError: The target exists or its disk is full, or a tensor cannot be read.
    """
    with folder_put_in_place(target, needed_bytes=plan.nbytes, flag="--hf") as folder:
        tokenizer(folder)
        write_weights(folder, plan.groups, on_bytes=on_bytes)
        config = plan.model.config(str(plan.precision).removeprefix("torch."))
        config |= settings.token_ids
        write_json(folder / GENERATION, settings.generation or generation_config(config))
        write_json(folder / CONFIG, config)  # last: without it nothing opens the folder


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return what ``transformers`` writes next to a configuration."""
    taken = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    return {"_from_model_config": True, **taken}


def _packed(entry: MapEntry, source: TensorSource, dtype: torch.dtype | None) -> torch.Tensor:
    return _rounded(entry.pack(source), dtype, entry)


def _unpacked(
    entry: MapEntry, source: TensorSource, dtype: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    return tuple(_rounded(part, dtype, entry) for part in entry.unpack(source))


def _rounded(tensor: torch.Tensor, dtype: torch.dtype | None, entry: MapEntry) -> torch.Tensor:
    """Return a tensor in another type, after checking that all of its values are still finite."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not bool(torch.isfinite(result.sum(dtype=torch.float64))):
        largest = float(tensor.abs().max())
        raise CheckpointError(
            f"{entry.key} ({', '.join(entry.names())}) has values up to {largest:.6g}, which "
            f"{dtype} cannot hold. Convert with --dtype keep."
        )
    return result


def _zeros(shape: tuple[int, ...]) -> tuple[torch.Tensor]:
    return (torch.zeros(shape),)


def _most(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    total: dict[torch.dtype, int] = {}
    for dtype, nbytes in sizes:
        total[dtype] = total.get(dtype, 0) + nbytes
    return max(total, key=lambda dtype: total[dtype])
