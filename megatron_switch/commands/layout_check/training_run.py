"""One case of a layout check: train a tiny model for a few steps, and note what it computed.

What trains is the product (:mod:`megatron_switch.training.loop.stepped_run`). This module adds
data and initial weights that are the same in every layout
(:mod:`megatron_switch.testing.global_start`), and monitors: forward hooks on the routers, and a
check of complete gradients.

Data: micro-batch ``m`` of step ``s`` is drawn from a generator with seed ``s * M + m``; rank ``r``
of ``n`` data-parallel ranks reads ``r``, ``r + n``, ... as Megatron's sampler does. Micro-batches
have unequal numbers of tokens in the loss, and some end in padding.

Shape letters: S positions, B micro-batch, D model, T tokens of this rank's part of a micro-batch.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from megatron_switch.commands.layout_check.cases import (
    MICRO_BATCH_SIZE,
    NUM_STEPS,
    SEQUENCE_LENGTH,
    VOCABULARY,
    Case,
)
from megatron_switch.commands.layout_check.values import Routed, Values
from megatron_switch.data.padding import PADDING_MASK
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.moe.routing import RoutedTokens
from megatron_switch.testing.context_attention import ContextAttention
from megatron_switch.testing.global_start import NamedTensors, set_weights
from megatron_switch.training.arguments.parser import CommandLine
from megatron_switch.training.loop.stepped_run import Outcome, StepHooks, SteppedRun, stepped_run

_EVALUATION_SEED = 1_000_000

Fault = Callable[[Sequence[nn.Module]], None]
"""Changes something of a model, once gradients are complete: how a test makes a layout wrong."""


def run_case(
    case: Case,
    flags: CommandLine,
    device: Literal["cuda", "cpu"],
    *,
    fault: Fault = lambda chunks: None,
) -> Values:
    """Train a case on the ranks of this process group, and return what this rank saw.

    Args:
        case: Layout and settings; its number of ranks is that of ``torch.distributed``.
        flags: Its flags, parsed.
        device: Where it trains; on the CPU, inside the emulation.
        fault: Called with the model's chunks in every step when all gradients are complete.
    """
    observer = _Observer()
    hooks = StepHooks(
        arguments=_let_attention_pass,
        layers=_with_context_attention if case.layout.cp > 1 else lambda layers: layers,
        start=observer.start,
        gradients=observer.note_gradients,
    )
    with stepped_run(flags, device, partial(_micro_batches, 0), hooks) as run:
        observer.watch(run, fault)
        for step in range(1, NUM_STEPS + 1):
            observer.begin(step)
            observer.note(f"step {step}", run.step())
            observer.note_clipping()
            if case.evaluates and step == 1:
                outcome = run.evaluate(partial(_micro_batches, _EVALUATION_SEED))
                observer.note("evaluation", outcome)
        run.sync_parameters()
        observer.note_tensors("parameter", lambda parameter: parameter.data)
    return observer.values


def _micro_batches(first_seed: int, rank: int, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the micro-batches of one data-parallel rank, without end."""
    seed = first_seed + rank
    while True:
        yield _micro_batch(seed)
        seed += size


def _micro_batch(seed: int) -> dict[str, Tensor]:
    shape = (MICRO_BATCH_SIZE, SEQUENCE_LENGTH)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=draw)
    counts_more_often = 0.4 + 0.6 * torch.rand((), generator=draw)
    counted = torch.rand(shape, generator=draw) < counts_more_often
    lengths_B1 = torch.randint(
        SEQUENCE_LENGTH // 2, 2 * SEQUENCE_LENGTH, (shape[0], 1), generator=draw
    )
    padding = torch.arange(SEQUENCE_LENGTH) >= lengths_B1
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (counted & ~padding).float(),
        "position_ids": torch.arange(SEQUENCE_LENGTH).repeat(shape[0], 1),
        PADDING_MASK: padding,
    }


def _let_attention_pass(args: Namespace) -> None:
    """Ask for Megatron's attention where context parallelism needs another: it is exchanged."""
    if args.context_parallel_size > 1:
        args.attention_backend = AttnBackend.local


def _with_context_attention(layers: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Let attention see the whole of a sequence that context parallelism has cut."""
    changed = []
    for layer in layers.layer_specs:
        attention = layer.submodules.self_attention
        parts = replace(attention.submodules, core_attention=ContextAttention)
        submodules = replace(layer.submodules, self_attention=replace(attention, submodules=parts))
        changed.append(replace(layer, submodules=submodules))
    return replace(layers, layer_specs=changed)


class _Observer:
    """Collects the values of one run on this rank."""

    def __init__(self) -> None:
        self.values = Values()
        self._step = 0
        self._calls: dict[int, int] = {}
        self._unclipped = 0.0
        self._run: SteppedRun
        self._named: NamedTensors
        self._fault: Fault

    def start(self, chunks: Sequence[nn.Module]) -> None:
        """Set the weights, and watch the routers."""
        set_weights(chunks)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SwitchRouter):
                    module.register_forward_hook(self._note_routing)

    def watch(self, run: SteppedRun, fault: Fault) -> None:
        """Learn whose gradients to note."""
        self._run, self._fault = run, fault
        self._named = NamedTensors(run.chunks)

    def begin(self, step: int) -> None:
        """Learn which step comes."""
        self._step = step
        self._calls = {}

    def note(self, name: str, outcome: Outcome) -> None:
        """Keep what a step or an evaluation logs."""
        scalars = self.values.scalars
        routing = outcome.routing
        if outcome.loss is not None:
            scalars[f"loss of {name}"] = outcome.loss
        if outcome.grad_norm is not None:
            scalars[f"norm of {name}"] = outcome.grad_norm
        for row, layer in enumerate(routing.layer_numbers):
            where = f"of {name}, layer {layer}"
            scalars[f"aux {where}"] = float(routing.balance_loss_L[row])
            scalars[f"z {where}"] = float(routing.z_loss_L[row])
            scalars[f"tokens {where}"] = float(routing.tokens_L[row])
            scalars[f"dropped {where}"] = float(routing.dropped_L[row])
            for expert, load in enumerate(routing.load_LE[row].tolist()):
                scalars[f"load {where}, expert {expert}"] = load

    def note_gradients(self) -> None:
        """Keep the gradients, complete on every rank and not yet clipped."""
        self._fault(self._run.chunks)
        if self._run.args.use_distributed_optimizer:
            for shard, whole, group in _shards(self._run.model):
                torch.distributed.all_gather_into_tensor(whole, shard.clone(), group=group)
        self.note_tensors(f"gradient {self._step}", _gradient)
        self._unclipped = self._gradient_norm()

    def note_clipping(self) -> None:
        """Keep the factor by which the optimizer has scaled the gradients that it owns."""
        if self._unclipped:  # a rank may own none
            factor = self._gradient_norm() / self._unclipped
            self.values.scalars[f"clip of step {self._step}"] = factor

    def note_tensors(self, kind: str, values_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Keep a copy of a tensor for every parameter."""
        for part in self._named.parts(values_of):
            copy = part.values.detach().to("cpu", copy=True)
            self.values.tensors.append((kind, replace(part, values=copy)))

    def _gradient_norm(self) -> float:
        """Return the norm of the gradients that this rank's optimizer updates weights with."""
        owned = [shard for shard, _, _ in _shards(self._run.model)]
        return math.sqrt(sum(float(shard.double().square().sum()) for shard in owned))

    def _note_routing(
        self, router: SwitchRouter, inputs: tuple[Any, ...], output: tuple[RoutedTokens, Tensor]
    ) -> None:
        if not (router.training and torch.is_grad_enabled()):
            return  # an evaluation, or the first of two passes through a recomputed layer
        x_BSD, padding_BS = (*inputs, None)[:2]
        layer = router.layer_number
        local = self._calls.get(layer, 0)
        self._calls[layer] = local + 1
        routing = output[0].routing
        with torch.no_grad():
            probs_TE = router.gating(x_BSD).softmax(dim=-1)
        best = probs_TE.topk(2, dim=-1).values
        replicas = mpu.get_data_parallel_world_size()
        noted = {
            "position_T": router.groups.positions(router.groups.rows(x_BSD, padding_BS)),
            "expert_T": routing.expert_T,
            "kept_T": routing.kept_T,
            "margin_T": best[:, 0] - best[:, 1],
        }
        self.values.routed.append(
            Routed(
                step=self._step,
                layer=layer,
                micro_batch=local * replicas + mpu.get_data_parallel_rank(),
                **{name: values.detach().to("cpu", copy=True) for name, values in noted.items()},
            )
        )


def _gradient(parameter: Any) -> Tensor:
    """Return the sum over micro-batches that Megatron's wrapper keeps beside the parameter."""
    gradient: Tensor = parameter.main_grad
    return gradient


def _shards(model: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Yield each gradient bucket: the part that this rank's optimizer owns, the whole, its ranks.

    Without the distributed optimizer every rank owns the whole.
    """
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                whole = bucket.grad_data
                if buffer.ddp_config.use_distributed_optimizer:
                    yield shard_buffer(whole, group.size())[group.rank()], whole, group
                else:
                    yield whole, whole, group
