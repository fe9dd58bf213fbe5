"""A Switch model made of a dense one, wherever that comes from."""

import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_switch.architecture.layer_pattern import Stack, sparse_layers
from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.convert.architectures import model_of_checkpoint, name_map_of
from megatron_switch.checkpoint.convert.conversion import (
    plan_import,
    write_release,
)
from megatron_switch.checkpoint.convert.megatron_source import open_weights, stored_args
from megatron_switch.checkpoint.convert.upcycling import Upcycling, upcycle
from megatron_switch.checkpoint.formats.atomic_folder import folder_put_in_place
from megatron_switch.checkpoint.formats.dist_writer import TensorChunk
from megatron_switch.checkpoint.formats.hf_folder import copy_tokenizer
from megatron_switch.checkpoint.formats.source_settings import (
    TOKENIZER_FOLDER,
    copy_settings,
    keep_settings,
)
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.checkpoint.formats.tokenizer_files import tokenizer_flags
from megatron_switch.checkpoint.load.files import LoadContext, checkpoint_folder, find_checkpoint
from megatron_switch.commands.checkpoints.next_steps import next_steps
from megatron_switch.commands.checkpoints.written_arguments import written_arguments
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.training.arguments.stored_arguments import (
    model_attributes,
    tokenizer_attributes,
)
from megatron_switch.training.logs.known_warnings import known_warnings_hidden
from megatron_switch.utils.progress import bytes_progress
from megatron_switch.utils.units import size_text


@dataclass(frozen=True)
class _Dense:
    """The dense model, wherever it came from."""

    model: Architecture
    chunks: tuple[TensorChunk, ...]
    flags: dict[str, Any]
    """Flags of its tokenizer and precision."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    args: Namespace | None = None
    """Arguments of the run that trained it, where a checkpoint stores them."""
    folder: Path | None = None
    """Folder of that checkpoint."""


@known_warnings_hidden()
def upcycle_model(own: Namespace) -> None:
    """Upcycle a model as the flags of the command say.

    Raises:
        SwitchError: The model cannot be upcycled, and nothing was written; or it was, and its first
            loss is not known.
    """
    dense = _from_hf(own) if own.hf is not None else _from_megatron(own)
    model = _sparse(dense.model, own)
    how = Upcycling(model=model, scale=own.scale, router_scale=own.router_scale, seed=own.seed)
    chunks = upcycle(dense.chunks, how)
    flags = {**model.to_flags(), **dense.flags}
    args = written_arguments(flags, padded_vocab_size=model.padded_vocab_size)
    if dense.args is not None:
        _keep_settings_of(dense.args, args)
    size = sum(chunk.nbytes for chunk in chunks)
    with (
        bytes_progress("upcycling", size) as on_bytes,
        folder_put_in_place(own.save, needed_bytes=size, flag="--save") as folder,
    ):
        if own.hf is not None:
            copy_tokenizer(own.hf, folder / TOKENIZER_FOLDER)
            keep_settings(own.hf, folder / TOKENIZER_FOLDER)
        if dense.folder is not None:
            copy_settings(dense.folder, folder)
        write_release(
            folder,
            chunks,
            name_map_of(model),
            args,
            workers=own.workers,
            on_bytes=on_bytes,
            is_untrained=True,
        )
    print(
        f"{own.save}: {own.num_experts} experts in {len(how.sparse)} "
        f"layer{'s' if len(how.sparse) > 1 else ''}, "
        f"{size_text(size)} (the dense model: "
        f"{size_text(sum(chunk.nbytes for chunk in dense.chunks))})."
    )
    for note in dense.notes:
        print(note)
    if own.text is not None:
        from megatron_switch.commands.checkpoints.first_loss import first_losses

        with redirect_stdout(sys.stderr):
            source = None if own.load is None else checkpoint_folder(own.load)
            losses = first_losses(own.text, args, dense_folder=source, hf=own.hf, new=own.save)
        print(losses.explained(own.scale, own.num_experts))
    print(next_steps(args, own.save, flags))


def _from_megatron(own: Namespace) -> _Dense:
    found = find_checkpoint(checkpoint_folder(own.load), context=LoadContext(can_start_anew=False))
    args = stored_args(found)
    weights, others, _ = open_weights(found, args)
    model = model_of_checkpoint(args)
    _refuse_sparse(model, found.folder)
    name_map_of(model).check_megatron(weights, others)
    chunks = tuple(
        TensorChunk(
            key, info.shape, info.dtype, Region.whole(info.shape), partial(weights.read, key)
        )
        for key, info in weights.tensors.items()
        if key not in others
    )
    names = ("tokenizer_type", "tokenizer_model", "vocab_size", "bf16", "fp16")
    flags = {name: getattr(args, name, None) for name in names}
    return _Dense(model, chunks, flags, args=args, folder=found.folder.parent)


def _keep_settings_of(dense: Namespace, args: Namespace) -> None:
    """Give the new model every setting that the dense one had, but for those of experts."""
    others = {"make_vocab_size_divisible_by"} | tokenizer_attributes()
    for name in model_attributes() | others:
        of_experts = name.startswith(("num_experts", "moe_", "switch_", "expert_"))
        if not of_experts and hasattr(dense, name) and hasattr(args, name):
            setattr(args, name, getattr(dense, name))


def _from_hf(own: Namespace) -> _Dense:
    plan = plan_import(own.hf)
    _refuse_sparse(plan.model.architecture, own.hf)
    tokenizer = (own.save / TOKENIZER_FOLDER).resolve()
    flags = tokenizer_flags(own.hf, tokenizer, plan.model.vocab_size)
    flags["bf16"] = plan.precision == torch.bfloat16
    flags["fp16"] = plan.precision == torch.float16
    return _Dense(plan.model.architecture, plan.chunks, flags, plan.model.notes)


def _refuse_sparse(model: Architecture, folder: Path) -> None:
    if model.num_experts:
        raise CheckpointError(
            f"{folder} is a model with {model.num_experts} experts; only a dense one can be "
            "upcycled."
        )


def _sparse(dense: Architecture, own: Namespace) -> Architecture:
    """Return the sparse model: which layers get experts, as wide as the MLPs they replace."""
    both, decoders = "--moe-layer-freq", "--switch-decoder-layer-freq"
    if own.switch_decoder_layer_freq is not None and dense.encoder is None:
        raise ConfigError(
            f"{decoders} is for an encoder-decoder, and the model is none. Use {both}."
        )
    stacks: dict[str, Any] = {}
    for name, stack in dense.stacks.items():
        flag, given, depth = both, own.moe_layer_freq, f"the {name} has layers"
        if name == "decoder" and own.switch_decoder_layer_freq is not None:
            flag, given = decoders, own.switch_decoder_layer_freq
        elif name == "decoder" and dense.encoder is not None:
            depth += f", or name its layers with {decoders}"
        stacks[name] = Stack.switch(stack.num_layers)
        if given is not None:
            layers = sparse_layers(given, stack.num_layers, flag=flag, depth=depth)
            stacks[name] = Stack(stack.num_layers, layers)
    if not any(stack.sparse_layers for stack in stacks.values()):
        raise ConfigError(
            f"{both} gives experts to no layer, got {own.moe_layer_freq}. Set one of its entries "
            "to 1."
        )
    # Routing and losses are a Switch model's defaults, whatever the dense one was trained with.
    return replace(
        dense,
        **stacks,
        num_experts=own.num_experts,
        moe_ffn_hidden_size=dense.ffn_hidden_size,
        routing={},
        moe_aux_loss_coeff=None,
        moe_z_loss_coeff=None,
        moe_input_jitter_eps=None,
        # A T5's dense layer has the dropout inside that its experts have; a GPT's has none.
        switch_expert_dropout=dense.hidden_dropout if dense.encoder is not None else 0.0,
    )
