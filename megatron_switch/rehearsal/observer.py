"""Observes one training step: memory, collectives and floating-point operations.

The observer is a dispatch mode of torch, so it sees every operator of Megatron, of our layers and
of autograd alike, on real tensors and on fake ones. It changes nothing, except that a rehearsal
gives it results for operators that need values or other ranks.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from megatron_switch.rehearsal.collective_trace import COLLECTIVES, CollectiveCall, CollectiveTrace
from megatron_switch.rehearsal.memory import LiveMemory, Peak, held_by
from megatron_switch.upstream.private import TorchDispatchMode, in_autograd_node, operator_packet

_aten = torch.ops.aten

_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""torch's formulas by operator, and its formula of fused attention for the CPU's operator too."""

Implementation = Callable[..., Any]
"""Called instead of an operator, with the operator, its arguments and its keyword arguments."""


@dataclass(frozen=True)
class Observation:
    """Memory, collectives and operations of one step.

    Attributes:
        state: Bytes that outlive the step, by kind: weights, gradients, optimizer.
        parameters: Number of parameters, by kind: dense, expert.
        peak: Memory at the moment at which most is alive.
        calls: Collectives in order.
        forward_flops: Operations of matrix products in forward passes, recomputed ones included.
        backward_flops: The same in backward passes.
    """

    state: Mapping[str, int]
    parameters: Mapping[str, int]
    peak: Peak
    calls: list[CollectiveCall] = field(repr=False)
    forward_flops: int
    backward_flops: int


class StepObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Sees every operator; enter it before the model is built.

    Args:
        replaced: Implementations of single operators; their results are not counted as memory.
        run: Implementation of all others.
    """

    def __init__(
        self,
        replaced: Mapping[Any, Implementation] | None = None,
        run: Implementation | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replaced = replaced or {}
        self._run = _run if run is None else run
        self.memory = LiveMemory()
        self._log: CollectiveTrace | None = None
        self._flops = [0, 0]  # in forward, in backward passes

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and record what it did."""
        kwargs = kwargs or {}
        if func in COLLECTIVES and self._log is not None:
            self._log.add(func, args)
        replaced = self._replaced.get(func)
        if replaced is not None:
            return replaced(func, args, kwargs)
        result = self._run(func, args, kwargs)
        if self._log is not None:
            formula = _FLOPS.get(operator_packet(func))
            if formula is not None:
                in_backward = in_autograd_node() and not torch.is_grad_enabled()
                self._flops[in_backward] += formula(*args, **kwargs, out_val=result)
        self._see(result, self._on_host(args))
        return result

    def begin(self, model: list[torch.nn.Module], optimizer: Any) -> dict[str, int]:
        """Start observing; return the bytes that outlive a step, by kind."""
        self._log = CollectiveTrace()
        self._flops = [0, 0]
        gc.collect()  # garbage in cycles is not memory of a step
        return self.memory.classify(held_by(model, optimizer))

    def end(self, model: list[torch.nn.Module], state: Mapping[str, int]) -> Observation:
        """Stop observing; return what was seen since :meth:`begin`."""
        assert self._log is not None, "begin() comes first"
        log, self._log = self._log, None
        parameters = {"dense": 0, "expert": 0}
        for parameter in (each for chunk in model for each in chunk.parameters()):
            part = "dense" if getattr(parameter, "allreduce", True) else "expert"
            parameters[part] += parameter.numel()
        return Observation(state, parameters, self.memory.peak(), log.calls, *self._flops)

    def observing(
        self, train_step: Callable[..., Any], report: Callable[[Observation], None]
    ) -> Callable[..., Any]:
        """Return a training step that takes two, observes the second, and ends the run.

        Args:
            train_step: Megatron's.
            report: Receives the observation, before :class:`SystemExit` with code 0.
        """

        def observed_train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            config: Any,
            forward_backward_func: Any,
            **kwargs: Any,
        ) -> Any:
            def step(forward_backward: Callable[..., Any]) -> None:
                train_step(
                    forward_step_func,
                    data_iterator,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    config,
                    forward_backward,
                    **kwargs,
                )

            def short(*, num_microbatches: int, **named: Any) -> Any:
                # As few as every schedule can work with: one for each stage. But offloading plans
                # later steps from all micro-batches of the first.
                fewest = min(num_microbatches, config.pipeline_model_parallel_size)
                if config.fine_grained_activation_offloading:
                    fewest = num_microbatches
                return forward_backward_func(num_microbatches=fewest, **named)

            def observed(**named: Any) -> Any:
                self.memory.in_forward_backward = True
                try:
                    return forward_backward_func(**named)
                finally:
                    self.memory.in_forward_backward = False

            step(short)
            _gather_while_computing(model, config)
            state = self.begin(model, optimizer)
            step(observed)
            report(self.end(model, state))
            raise SystemExit(0)

        return observed_train_step

    def _on_host(self, args: tuple[Any, ...]) -> bool:
        """Return whether an operator works on the host, which is where its first tensor is."""
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        return isinstance(first, Tensor) and self.memory.is_on_host(first)

    def _see(self, result: Any, on_host: bool) -> None:
        if isinstance(result, Tensor):
            self.memory.see(result, on_host=on_host)
        elif isinstance(result, list | tuple):
            for each in result:
                self._see(each, on_host)


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _gather_while_computing(model: Sequence[nn.Module], config: Any) -> None:
    """Let forward passes gather the weights from now on, as Megatron's loop does after one step."""
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.enable_forward_pre_hook()
            if chunk.ddp_config.align_param_gather:
                syncs = [each.start_param_sync for each in chunks]
                config.param_sync_func = syncs if len(syncs) > 1 else syncs[0]
