"""A Switch model made of a dense one, wherever that comes from."""

import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.checkpoint.convert.conversion import (
    open_weights,
    plan_import,
    stored_args,
    write_release,
)
from megatron_switch.checkpoint.convert.gpt_config import LAYOUTS, read_gpt_config
from megatron_switch.checkpoint.convert.gpt_model import GptModel, gpt_flags, gpt_from_args
from megatron_switch.checkpoint.convert.gpt_names import gpt_table
from megatron_switch.checkpoint.convert.name_map import NameTable
from megatron_switch.checkpoint.convert.t5_model import (
    T5Model,
    t5_flags,
    t5_from_args,
    t5_from_config,
)
from megatron_switch.checkpoint.convert.t5_names import t5_table
from megatron_switch.checkpoint.convert.upcycling import Upcycling, upcycle
from megatron_switch.checkpoint.formats.atomic_folder import folder_put_in_place
from megatron_switch.checkpoint.formats.dist_writer import Chunk
from megatron_switch.checkpoint.formats.hf_folder import CONFIG, copy_tokenizer, read_json
from megatron_switch.checkpoint.formats.source_settings import TOKENIZER_FOLDER, keep_settings
from megatron_switch.checkpoint.formats.tensor_source import Box
from megatron_switch.checkpoint.formats.tokenizer_files import tokenizer_flags
from megatron_switch.checkpoint.load.files import LoadContext, checkpoint_folder, find_checkpoint
from megatron_switch.commands.checkpoints.written_arguments import written_arguments
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.training.logs.known_warnings import known_warnings_hidden
from megatron_switch.utils.progress import bytes_progress
from megatron_switch.utils.units import size_text


@dataclass(frozen=True)
class _Dense:
    """The dense model, wherever it came from."""

    model: GptModel | T5Model
    chunks: tuple[Chunk, ...]
    flags: dict[str, Any]
    """Flags of its tokenizer and precision."""


@known_warnings_hidden()
def upcycle_model(own: Namespace) -> None:
    """Upcycle a model as the flags of the command say.

    Raises:
        SwitchError: The model cannot be upcycled, and nothing was written; or it was, and its first
            loss is not known.
    """
    dense = _from_hf(own) if own.hf is not None else _from_megatron(own)
    pattern = _pattern(own, dense.model.shape)
    model, table, how = _sparse(dense.model, pattern, own)
    chunks = upcycle(dense.chunks, how)
    flags = gpt_flags(model) if isinstance(model, GptModel) else t5_flags(model)
    padded = model.shape.padded_vocab_size
    args = written_arguments({**flags, **dense.flags}, padded_vocab_size=padded)
    size = sum(chunk.nbytes for chunk in chunks)
    with (
        bytes_progress("upcycling", size) as on_bytes,
        folder_put_in_place(own.save, needed_bytes=size, flag="--save") as folder,
    ):
        if own.hf is not None:
            copy_tokenizer(own.hf, folder / TOKENIZER_FOLDER)
            keep_settings(own.hf, folder / TOKENIZER_FOLDER)
        write_release(folder, chunks, table, args, workers=own.workers, on_bytes=on_bytes)
    print(
        f"{own.save}: {own.num_experts} experts in {len(how.sparse)} "
        f"layer{'s' if len(how.sparse) > 1 else ''}, "
        f"{size_text(size)} (the dense model: "
        f"{size_text(sum(chunk.nbytes for chunk in dense.chunks))})."
    )
    if own.text is not None:
        from megatron_switch.commands.checkpoints.first_loss import first_losses

        with redirect_stdout(sys.stderr):
            source = None if own.load is None else checkpoint_folder(own.load)
            losses = first_losses(own.text, args, dense_folder=source, hf=own.hf, new=own.save)
        print(losses.explained(own.scale, own.num_experts))


def _from_megatron(own: Namespace) -> _Dense:
    found = find_checkpoint(checkpoint_folder(own.load), context=LoadContext(can_start_anew=False))
    args = stored_args(found)
    weights, others, _ = open_weights(found, args)
    model: GptModel | T5Model
    if getattr(args, "switch_arch", "gpt") == "t5":
        model = t5_from_args(args, weights.tensors, vocab_size=None)
        table = t5_table(model.shape, switch=True)
    else:
        model = gpt_from_args(args)
        table = gpt_table(model.shape)
    if model.shape.num_experts:
        raise CheckpointError(
            f"{found.folder} is a model with {model.shape.num_experts} experts; only a dense one "
            "can be upcycled."
        )
    table.check_megatron(weights, others)
    chunks = tuple(
        Chunk(key, info.shape, info.dtype, Box.whole(info.shape), partial(weights.read, key))
        for key, info in weights.tensors.items()
        if key not in others
    )
    names = ("tokenizer_type", "tokenizer_model", "vocab_size", "bf16", "fp16")
    flags = {name: getattr(args, name, None) for name in names}
    return _Dense(model, chunks, flags)


def _from_hf(own: Namespace) -> _Dense:
    plan = plan_import(own.hf)
    where = str(own.hf / CONFIG)
    config = read_json(own.hf / CONFIG)
    model: GptModel | T5Model
    if config["model_type"] in LAYOUTS:
        model = read_gpt_config(config, where, multiple=8)
    else:
        model = t5_from_config(config, where, plan.source.tensors, multiple=8)
    if model.shape.num_experts:
        raise CheckpointError(
            f"{own.hf} is a model with {model.shape.num_experts} experts; only a dense one can be "
            "upcycled."
        )
    tokenizer = (own.save / TOKENIZER_FOLDER).resolve()
    flags = tokenizer_flags(own.hf, tokenizer, plan.model.vocab_size)
    flags["bf16"] = plan.precision == torch.bfloat16
    flags["fp16"] = plan.precision == torch.float16
    return _Dense(model, plan.chunks, flags)


def _pattern(own: Namespace, shape: Any) -> dict[str, list[int]]:
    """Return for each stack which layers get experts."""
    depths = {"decoder": shape.num_layers} if hasattr(shape, "num_layers") else None
    if depths is None:
        depths = {"encoder": shape.num_encoder_layers, "decoder": shape.num_decoder_layers}
    both = ("--moe-layer-freq", own.moe_layer_freq)
    of_decoder = ("--switch-decoder-layer-freq", own.switch_decoder_layer_freq)
    if of_decoder[1] is not None and "encoder" not in depths:
        raise ConfigError(
            f"{of_decoder[0]} is for an encoder-decoder, and the model is none. Use {both[0]}."
        )
    given = dict.fromkeys(depths, both)
    if of_decoder[1] is not None:
        given["decoder"] = of_decoder
    patterns = {
        stack: Stack.switch(depth).layer_freq
        if given[stack][1] is None
        else _spelled(*given[stack], stack, depth)
        for stack, depth in depths.items()
    }
    if not any(map(sum, patterns.values())):
        raise ConfigError(
            f"{both[0]} gives experts to no layer, got {own.moe_layer_freq}. Set one of its "
            "entries to 1."
        )
    return patterns


def _spelled(flag: str, text: str, stack: str, depth: int) -> list[int]:
    """Return the layers of a stack that get experts, as a flag spells them."""
    words = text.strip("[] ").split(",")
    if any(word.strip() not in ("0", "1") for word in words):
        raise ConfigError(
            f"{flag} says of each layer whether it gets experts, as in [0,1,0,1]; got {text}."
        )
    if len(words) != depth:
        other = ", or name its layers with --switch-decoder-layer-freq" * (stack == "decoder")
        raise ConfigError(
            f"{flag} has {len(words)} entries, but the {stack} has {depth} layers. Write one for "
            f"each{other if flag == '--moe-layer-freq' else ''}."
        )
    return [int(word) for word in words]


def _sparse(
    dense: GptModel | T5Model, pattern: dict[str, list[int]], own: Namespace
) -> tuple[GptModel | T5Model, NameTable, Upcycling]:
    """Return the sparse model, its names, and how it comes to be."""
    layers = {
        stack: tuple(i for i, is_set in enumerate(p) if is_set) for stack, p in pattern.items()
    }
    sparse = {(stack, layer) for stack, each in layers.items() for layer in each}
    common: dict[str, Any] = {
        "num_experts": own.num_experts,
        "sparse": sparse,
        "scale": own.scale,
        "router_scale": own.router_scale,
        "seed": own.seed,
    }
    if isinstance(dense, GptModel):
        shape = replace(
            dense.shape,
            num_experts=own.num_experts,
            expert_hidden_size=dense.shape.ffn_hidden_size,
            sparse_layers=layers["decoder"],
        )
        model = replace(dense, shape=shape, routing={})  # Switch's defaults
        how = Upcycling(unit="gated" if shape.gated else "other", **common)
        return model, gpt_table(shape), how
    t5_shape = replace(
        dense.shape,
        num_experts=own.num_experts,
        encoder_sparse=layers["encoder"],
        decoder_sparse=layers["decoder"],
    )
    how = Upcycling(
        unit="gated" if t5_shape.gated else "relu",
        layers_before=t5_shape.num_encoder_layers,
        **common,
    )
    return replace(dense, shape=t5_shape, losses={}), t5_table(t5_shape, switch=True), how
