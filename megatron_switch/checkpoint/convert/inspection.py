"""Say what a folder holds, and what can be done with it.

Nothing is loaded: headers, the index and the stored arguments are read, and foreign formats are
recognised by the files they have.
"""

import shlex
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_switch.checkpoint.convert.architectures import describe_import
from megatron_switch.checkpoint.formats.dist_metadata import (
    NOT_WEIGHTS,
    foreign_format,
    read_common_state,
)
from megatron_switch.checkpoint.formats.dist_reader import DistSource
from megatron_switch.checkpoint.formats.foreign_formats import HUGGING_FACE
from megatron_switch.checkpoint.formats.hf_folder import CONFIG, HuggingFaceSource, read_json
from megatron_switch.checkpoint.formats.tensor_source import TensorInfo
from megatron_switch.checkpoint.load.files import FoundCheckpoint, LoadContext, find_checkpoint
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.units import size_text


@dataclass(frozen=True)
class Inspection:
    """What a folder holds, as lines of a table."""

    facts: dict[str, str]
    advice: str
    """What can be done with it."""


def inspect_folder(folder: Path) -> Inspection:
    """Return what a folder holds.

    Args:
        folder: Any folder: a Megatron checkpoint, one of its iterations, one in Hugging Face's
            format, or one in a format that only others read.

    Raises:
        CheckpointError: It does not exist, or holds nothing that looks like a checkpoint, or a
            damaged one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.")
    for each in (folder, *sorted(folder.glob("iter_*"))):
        foreign = foreign_format(each)
        if foreign is not None and foreign is not HUGGING_FACE:  # which is looked into below
            return Inspection({"format": foreign.name, "found": str(each)}, foreign.advice)
    if (folder / CONFIG).is_file():
        return _hugging_face(folder)
    if (folder / "metadata.json").is_file():
        number = folder.name.removeprefix("iter_")
        iteration = int(number) if number.isdecimal() else 0
        return _megatron(FoundCheckpoint(folder, iteration))
    return _megatron(find_checkpoint(folder, context=LoadContext("inspect", can_start_anew=False)))


def _hugging_face(folder: Path) -> Inspection:
    source = HuggingFaceSource(folder)
    config = read_json(folder / CONFIG)
    facts = {"format": "Hugging Face", "model type": str(config.get("model_type"))}
    facts |= _sizes(source.tensors)
    model = describe_import(config, str(folder / CONFIG), source.tensors, multiple=1)
    model.name_map.check_other_side(source)
    facts["name map"] = f"fits: {len(source.tensors)} tensors, every one known"
    facts |= {
        name: str(model.flags[name])
        for name in ("num-layers", "hidden-size", "num-experts", "moe-layer-freq")
        if name in model.flags
    }
    if model.notes:
        facts["notes"] = " ".join(model.notes)
    return Inspection(
        facts,
        f"Convert it with: convert hf-to-megatron --hf {shlex.quote(str(folder))} --megatron DIR",
    )


def _megatron(found: FoundCheckpoint) -> Inspection:
    source = DistSource(found.folder)
    state = read_common_state(found.folder)
    weights = {k: v for k, v in source.tensors.items() if not k.startswith(NOT_WEIGHTS)}
    others = {k: v for k, v in source.tensors.items() if k.startswith(NOT_WEIGHTS)}
    facts = {
        "format": "Megatron torch_dist",
        "iteration": "release" if found.is_release else str(found.iteration),
    }
    facts |= _sizes(weights)
    form = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if others:
        facts["optimizer state"] = f"{_size(others)}, {form or 'one record for each parameter'}"
    args = state.get("args")
    facts |= _described(args) if isinstance(args, Namespace) else {"arguments": "none stored"}
    if form == "dp_reshardable":
        advice = (
            "It resumes in its own layout only. For others load it there and save it with "
            "--dist-ckpt-optim-fully-reshardable."
        )
    else:
        advice = (
            "It loads in any layout (--load). Convert it with: convert megatron-to-hf --megatron "
            "DIR --hf DIR; rewrite it for a layout with: reshard"
        )
    return Inspection(facts, advice)


def _described(args: Namespace) -> dict[str, str]:
    def of(name: str) -> Any:
        return getattr(args, name, None)

    sizes = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "EP": "expert_model_parallel_size",
        "ETP": "expert_tensor_parallel_size",
    }
    layout = " ".join(f"{name} {of(key)}" for name, key in sizes.items() if of(key) is not None)
    written = "this program" if hasattr(args, "switch_recipe") else "stock Megatron"
    facts = {
        "written by": written,
        "architecture": str(of("switch_arch") or "gpt"),
        "layers": str(of("num_layers")),
        "width": str(of("hidden_size")),
        "vocabulary rows": str(of("padded_vocab_size")),
        "saved in layout": layout,
    }
    if of("num_experts"):
        facts["experts"] = f"{of('num_experts')} in layers {of('moe_layer_freq')}"
    return facts


def _sizes(tensors: Any) -> dict[str, str]:
    parameters = sum(_count(info) for info in tensors.values())
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in tensors.values())
    return {
        "parameters": f"{parameters:,}",
        "size": _size(tensors),
        "types": ", ".join(f"{name} ({count} tensors)" for name, count in dtypes.most_common()),
    }


def _count(info: TensorInfo) -> int:
    return info.nbytes // info.dtype.itemsize


def _size(tensors: Any) -> str:
    return size_text(sum(info.nbytes for info in tensors.values()))
