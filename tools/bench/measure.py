"""Time of a forward and backward pass, whole and by phase.

Candidates run interleaved, round by round, in an order that rotates: a slow minute of the machine
hits all of them. With several ranks a pass ends when the last rank has ended. Phases are measured
in passes of their own, because looking costs time.

On a machine that others use as well, take the CPU's clock with one thread: it counts what the
process has worked, not what it has waited for its turn.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.candidate import Candidate
from bench.problem import Problem
from megatron_switch.upstream.patching import Patch, applied

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds that pass, and seconds that all threads of this process work."""

PHASES = ("route", "permute", "exchange", "experts", "combine")
"""Parts of a pass: from the tokens to gates and slots; into the order of experts; between ranks;
the experts' products; back to the tokens. Each counts in forward and in backward."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one pass, over all rounds."""

    median_ms: float
    minimum_ms: float


def time_all(
    candidates: Sequence[Candidate],
    problem: Problem,
    *,
    rounds: int,
    warmup: int,
    clock: str = "wall",
) -> dict[str, Times]:
    """Run all candidates interleaved; return their times by name. Every rank must call.

    Args:
        candidates: What to run.
        problem: This rank's problem.
        rounds: Passes of each candidate that are timed.
        warmup: Passes of each before that.
        clock: A name of :data:`CLOCKS`.
    """
    now_s = CLOCKS[clock]
    elapsed: dict[str, list[float]] = defaultdict(list)
    gc.collect()
    gc.disable()
    try:
        for number in range(warmup + rounds):
            first = number % len(candidates)
            for candidate in (*candidates[first:], *candidates[:first]):
                run = Pass(candidate, problem)
                _wait(problem)
                start_s = now_s()
                run()
                _wait(problem)
                elapsed[candidate.name].append(1e3 * (now_s() - start_s))
                candidate.forget_gradients()
    finally:
        gc.enable()
    return {
        name: Times(statistics.median(values[warmup:]), min(values[warmup:]))
        for name, values in elapsed.items()
    }


class Pass:
    """One forward and backward pass, with tokens that no pass before it has touched."""

    def __init__(self, candidate: Candidate, problem: Problem) -> None:
        """Draw the tokens."""
        self._forward = candidate.forward
        self.x_TD = problem.tokens_of(problem.rank).requires_grad_()
        self._gradient_TD = problem.output_gradient_of(problem.rank)

    def forward(self) -> Tensor:
        """Return the candidate's output."""
        return self._forward(self.x_TD)

    def backward(self, y: Tensor) -> None:
        """Give the output its gradient."""
        # The padded floor has a row for every slot, the dense one only for tokens that are kept.
        repeats = -(-len(y) // len(self._gradient_TD))
        gradient = self._gradient_TD if repeats == 1 else self._gradient_TD.repeat(repeats, 1)
        y.backward(gradient[: len(y)])

    def __call__(self) -> None:
        """Run both."""
        self.backward(self.forward())


def _wait(problem: Problem) -> None:
    """Let this device finish, and all ranks arrive."""
    if problem.sizes.device == "cuda":
        torch.cuda.synchronize()
    if problem.sizes.world > 1:
        dist.barrier()


def phases_ms(
    candidate: Candidate, problem: Problem, *, rounds: int, clock: str = "wall"
) -> dict[str, float]:
    """Return the milliseconds of each phase, in the fastest of some passes; empty for floors.

    Args:
        candidate: What to run.
        problem: This rank's problem; with several ranks the times are this rank's.
        rounds: Passes to choose from.
        clock: A name of :data:`CLOCKS`; a GPU's events are used where there is one.
    """
    if candidate.router_module is None:
        return {}
    results = []
    for _ in range(rounds):
        run = Pass(candidate, problem)
        _wait(problem)
        stamps = _Stamps(problem.sizes.device, clock)
        with stamps.watching(candidate):
            stamps.enter("route")
            y = run.forward()
            stamps.enter("combine")
            run.backward(y)
            stamps.enter("")
        _wait(problem)
        candidate.forget_gradients()
        results.append(stamps.total_ms())
    return min(results, key=lambda each: sum(each.values()))


class _Stamps:
    """Notes when a pass goes from one phase into another, forward and backward."""

    def __init__(self, device: str, clock: str) -> None:
        self._on_gpu, self._now_s = device == "cuda", CLOCKS[clock]
        self._entered: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """Begin a phase now, and end the one before it."""
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = self._now_s()
        self._entered.append((phase, moment))

    def total_ms(self) -> dict[str, float]:
        """Return the time of each phase."""
        total = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._entered, self._entered[1:], strict=False):
            total[phase] += start.elapsed_time(end) if self._on_gpu else 1e3 * (end - start)
        return total

    @contextmanager
    def watching(self, candidate: Candidate) -> Iterator[None]:
        """Hook into a candidate's modules, and into the exchange, for one pass."""
        assert candidate.router_module is not None
        hooks = [candidate.router_module.register_forward_hook(self._after_router)]
        for module in candidate.expert_modules:
            hooks.append(module.register_forward_pre_hook(self._before_experts))
            hooks.append(module.register_forward_hook(self._after_experts))
        exchange = Patch(
            "torch.distributed:all_to_all_single", "its time is taken", wrapper=self._exchange
        )
        try:
            with applied([exchange]):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_router(self, module: Any, args: Any, output: Any) -> None:
        self.enter("permute")
        self._enter_in_backward(output, "route")

    def _before_experts(self, module: Any, args: Any) -> None:
        self._enter_in_backward(args[0], "permute")
        self.enter("experts")

    def _after_experts(self, module: Any, args: Any, output: Any) -> None:
        self.enter("combine")
        self._enter_in_backward(output, "experts")

    def _enter_in_backward(self, values: Any, phase: str) -> None:
        """Begin a phase when the gradient of the first of ``values`` has been computed."""
        for value in _tensors(values):
            if value.requires_grad:
                value.register_hook(lambda gradient: self.enter(phase))
                return

    def _exchange(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all_single(
            output: Tensor,
            input: Tensor,
            output_split_sizes: Any = None,
            input_split_sizes: Any = None,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            sizes = (output_split_sizes, input_split_sizes)
            with self._inside("exchange"):
                work = original(output, input, *sizes, group, async_op)
            return work if work is None else _TimedWork(work, self)

        return all_to_all_single

    @contextmanager
    def _inside(self, phase: str) -> Iterator[None]:
        around = self._entered[-1][0]
        self.enter(phase)
        yield
        self.enter(around)


class _TimedWork:
    """A collective under way; waiting for it counts as exchange."""

    def __init__(self, work: Any, stamps: _Stamps) -> None:
        self._work, self._stamps = work, stamps

    def wait(self) -> None:
        with self._stamps._inside("exchange"):
            self._work.wait()


def _tensors(values: Any) -> Iterator[Tensor]:
    """Return the tensors of nested tuples, lists and dataclasses."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif hasattr(values, "__dataclass_fields__"):
        yield from _tensors(list(vars(values).values()))
