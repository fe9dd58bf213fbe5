"""Watches one training step: memory, collectives and floating-point operations.

The observer stands where torch dispatches operators, so it sees what Megatron, our layers and
autograd do alike, on real tensors and on fake ones. It changes nothing, except that a rehearsal
gives it answers for operators which only a machine with values could compute.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from megatron_switch.rehearsal.collective_trace import COLLECTIVES, Call, CollectiveLog
from megatron_switch.rehearsal.memory import LiveMemory, Peak, held_by
from megatron_switch.upstream.private import TorchDispatchMode, in_autograd_node, operator_packet

_aten = torch.ops.aten

_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""torch's formulas by operator, and its formula of fused attention for the CPU's operator too."""

Answer = Callable[..., Any]


@dataclass(frozen=True)
class Observation:
    """What was seen of one step.

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
    calls: list[Call] = field(repr=False)
    forward_flops: int
    backward_flops: int


class StepObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Sees every operator; enter it before the model is built.

    Args:
        answers: What to call instead of an operator, with the operator and its arguments; what it
            returns is not counted as memory.
        run: What to call with every other operator and its arguments.
    """

    def __init__(
        self, answers: Mapping[Any, Answer] | None = None, run: Answer | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers or {}
        self._run = _run if run is None else run
        self.memory = LiveMemory()
        self._log: CollectiveLog | None = None
        self._flops = [0, 0]  # in forward, in backward passes

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and note what it did."""
        kwargs = kwargs or {}
        if func in COLLECTIVES and self._log is not None:
            self._log.add(func, args)
        answer = self._answers.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        result = self._run(func, args, kwargs)
        if self._log is not None:
            formula = _FLOPS.get(operator_packet(func))
            if formula is not None:
                in_backward = in_autograd_node() and not torch.is_grad_enabled()
                self._flops[in_backward] += formula(*args, **kwargs, out_val=result)
        self._see(result, self._on_host(args))
        return result

    def begin(self, model: list[torch.nn.Module], optimizer: Any) -> dict[str, int]:
        """Start to observe; return the bytes that outlive a step, by kind."""
        self._log = CollectiveLog()
        self._flops = [0, 0]
        gc.collect()  # what nobody holds any longer is not memory of a step
        return self.memory.classify(held_by(model, optimizer))

    def end(self, model: list[torch.nn.Module], state: Mapping[str, int]) -> Observation:
        """Stop to observe; return what was seen since :meth:`begin`."""
        assert self._log is not None, "begin() comes first"
        log, self._log = self._log, None
        parameters = {"dense": 0, "expert": 0}
        for parameter in (each for chunk in model for each in chunk.parameters()):
            part = "dense" if getattr(parameter, "allreduce", True) else "expert"
            parameters[part] += parameter.numel()
        return Observation(state, parameters, self.memory.peak(), log.calls, *self._flops)

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
