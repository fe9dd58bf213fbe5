"""Memory of a forward and backward pass: what is kept for backward, and the peak."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.candidate import Candidate
from bench.measure import Pass
from bench.problem import Problem


@dataclass(frozen=True)
class Memory:
    """Bytes of one pass."""

    kept: int
    """Kept for backward: what autograd saved, weights left out, each storage counted whole."""
    kept_outside: int
    """The same, without what was saved while experts ran."""
    peak: int
    """Most bytes alive at a time, beyond those that were before: gradients included."""


def memory_of(candidate: Candidate, problem: Problem) -> Memory:
    """Return what a pass keeps for backward, and its peak; every rank must call.

    Args:
        candidate: What to run.
        problem: This rank's problem.
    """
    saved = _Saved(candidate)
    run = Pass(candidate, problem)
    with saved.watching(candidate):  # not backward, which may compute again what it needs
        y = run.forward()
    run.backward(y)
    del y
    candidate.forget_gradients()
    run = Pass(candidate, problem)
    peak = _cuda_peak(run) if problem.sizes.device == "cuda" else _cpu_peak(run)
    candidate.forget_gradients()
    inside, outside = sum(saved.inside.values()), sum(saved.outside.values())
    return Memory(kept=inside + outside, kept_outside=outside, peak=peak)


class _Saved:
    """The storages that autograd saves, inside experts and outside; a tensor counts where first."""

    def __init__(self, candidate: Candidate) -> None:
        self._weights = {_storage(parameter) for parameter in candidate.parameters}
        self._depth = 0
        self.inside: dict[int, int] = {}
        self.outside: dict[int, int] = {}

    @contextmanager
    def watching(self, candidate: Candidate) -> Iterator[None]:
        hooks = []
        for module in candidate.expert_modules:
            hooks.append(module.register_forward_pre_hook(lambda *_: self._move(1)))
            hooks.append(module.register_forward_hook(lambda *_: self._move(-1)))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed):
            yield
        for hook in hooks:
            hook.remove()

    def _move(self, step: int) -> None:
        self._depth += step

    def _pack(self, tensor: Tensor) -> Tensor:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if key not in self._weights and key not in self.outside and key not in self.inside:
            (self.inside if self._depth else self.outside)[key] = size
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cuda_peak(run: Pass) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(run: Pass) -> int:
    with LiveBytes() as live:
        run()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts a storage from the operator that makes it until it is freed."""

    def __init__(self) -> None:
        """Start from zero: what was there before does not count."""
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the storages that it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
