"""The scores that a checkpoint's model gives to some tokens, whatever its architecture.

For comparisons: the model is built from the arguments stored in its checkpoint, in float32, on this
process's CPU, with the experts' capacity of evaluation, and needs no tokenizer. It exists for the
length of one call.

Shape letters: B sequences, S positions, V rows of the vocabulary.
"""

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_switch import parallel_state
from megatron_switch.checkpoint.convert.megatron_source import stored_args
from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import FoundCheckpoint, find_checkpoint
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.layout.grid import Layout
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.arguments.stored_arguments import with_stored_model
from megatron_switch.training.inference.trained_model import built_and_loaded
from megatron_switch.training.loop.global_state import process_groups, validate
from megatron_switch.training.loop.gpt_builder import resolve_dispatch

DROPLESS: Mapping[str, Any] = {"capacity": None, "eval_capacity_factor": -1.0}
"""Settings with which no token is dropped."""


@dataclass(frozen=True)
class Scored:
    """Scores, and how many tokens found their expert full."""

    scores_BSV: Tensor
    """Float32; S is the decoder's for an encoder-decoder."""
    routed: int
    """Tokens that routers saw, added up over the layers with experts."""
    dropped: int
    """Those of them that were dropped."""


def scores(
    folder: Path, tokens_BS: Tensor, targets_BS: Tensor | None = None, *, drop: bool = True
) -> Tensor:
    """Return a model's scores, float32, shape (B, S, V).

    Args:
        folder: Checkpoint folder, with the tracker file.
        tokens_BS: Tokens, int64; of an encoder-decoder, the encoder's.
        targets_BS: The decoder's tokens, for an encoder-decoder.
        drop: Whether experts have the capacity of evaluation; without it no token is dropped.

    Raises:
        SwitchError: The checkpoint cannot be loaded.
    """
    routing = {} if drop else DROPLESS
    return scored(find_checkpoint(folder), tokens_BS, targets_BS, routing=routing).scores_BSV


def scored(
    found: FoundCheckpoint,
    tokens_BS: Tensor,
    targets_BS: Tensor | None = None,
    *,
    routing: Mapping[str, Any] = MappingProxyType({}),
    rounded_to: torch.dtype = torch.float32,
) -> Scored:
    """Return a model's scores, and how many tokens were dropped.

    Args:
        found: The checkpoint.
        tokens_BS: Tokens, int64; of an encoder-decoder, the encoder's.
        targets_BS: The decoder's tokens, for an encoder-decoder.
        routing: Fields of :class:`SwitchConfig` that shall be others than the checkpoint's.
        rounded_to: Weights have values of this type; they are computed with in float32.

    Raises:
        SwitchError: The checkpoint cannot be loaded.
    """
    length = max(tokens_BS.size(1), 0 if targets_BS is None else targets_BS.size(1))
    args = _arguments(stored_args(found), length)
    with _quiet(), cuda_on_cpu():
        validate(args)
        args.padded_vocab_size = stored_args(found).padded_vocab_size
        switch = replace(SwitchConfig.from_args(args), **routing)
        switch = resolve_dispatch(args, switch, "cpu")
        with process_groups(args, Layout(args.world_size)):
            try:
                state = read_common_state(found.folder)
                module = built_and_loaded(args, switch, found.folder, state)
                round_weights(module, rounded_to)
                return _forward(module, tokens_BS, targets_BS)
            finally:
                parallel_state.destroy_model_parallel()


def round_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round every parameter to the values of another type, in place."""
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data.to(dtype))


def mean_loss(scores_BSV: Tensor, labels_BS: Tensor) -> float:
    """Return the mean cross-entropy of labels, in nats."""
    return float(F.cross_entropy(scores_BSV.flatten(0, 1).float(), labels_BS.flatten()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Megatron's remarks off the screen; errors arrive as exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)


def _arguments(stored: Namespace, length: int) -> Namespace:
    line = with_stored_model(parse_command_line(["--switch-device", "cpu"]), stored)
    args = line.args
    args.bf16 = args.fp16 = False  # weights of any type load into float32
    with cuda_on_cpu():
        fill_defaults(line, "cpu")
    args.micro_batch_size = 1
    args.perform_initialization = False  # every weight is read
    args.exit_signal_handler = False  # there is nothing to save: a signal ends the process
    args.seq_length = max(args.seq_length, length)
    if args.position_embedding_type != "learned_absolute":
        args.max_position_embeddings = max(args.max_position_embeddings, args.seq_length)
    args.tokenizer_type, args.vocab_size = "NullTokenizer", stored.padded_vocab_size - 1
    args.tokenizer_model = None
    return args


@torch.no_grad()
def _forward(module: Any, tokens_BS: Tensor, targets_BS: Tensor | None) -> Scored:
    kept: list[Tensor] = []
    for router in filter(lambda each: isinstance(each, SwitchRouter), module.modules()):
        router.register_forward_hook(lambda *call: kept.append(call[2][0].routing.kept_T))
    if targets_BS is not None:
        scores_BSV: Tensor = module(tokens_BS, targets_BS)
    else:
        position_BS = torch.arange(tokens_BS.size(1)).expand_as(tokens_BS)
        padding_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
        scores_BSV = module(tokens_BS, position_BS, None, padding_mask=padding_BS)
    routed = sum(kept_T.numel() for kept_T in kept)
    dropped = routed - sum(int(kept_T.sum()) for kept_T in kept)
    return Scored(scores_BSV.float(), routed, dropped)
