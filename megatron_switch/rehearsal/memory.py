"""Memory of a rank: the sum of the storages that are alive, by what they are for.

A storage is counted from the operator that first returns a tensor on it until it is freed, whatever
views of it exist. That is what a GPU's allocator hands out, without its rounding, its fragments,
the CUDA context, libraries' work spaces and communicators; nor is it the resident memory of a
process. It is counted in the same way on real tensors and on fake ones.

Storages that outlive a step are told apart by who holds them: weights, gradients and optimizer
state, of dense layers and of experts. The others by when they were made: in a forward pass
(recomputed ones too), in a backward pass, or around both.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = (
    "dense weights",
    "expert weights",
    "dense gradients",
    "expert gradients",
    "dense optimizer",
    "expert optimizer",
    "activations",
    "backward",
    "other",
)
"""Kinds of memory. *activations* were made in a forward pass, *backward* in a backward pass, and
*other* before the step or around the two (batches, random states, the optimizer's work space)."""

_ACTIVATIONS, _BACKWARD, _OTHER = (KINDS.index(k) for k in ("activations", "backward", "other"))


@dataclass(frozen=True)
class Peak:
    """Memory at the moment at which most is alive.

    Attributes:
        by_kind: Bytes by the names of :data:`KINDS`.
    """

    by_kind: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.by_kind.values())


class LiveMemory:
    """Counts storages as they come and go."""

    def __init__(self) -> None:
        # By the address of a storage: its weak reference, its bytes, its kind.
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._now = [0] * len(KINDS)
        self._total = 0
        self._peak_total = 0
        self._peak = list(self._now)
        self.in_forward_backward = False

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that an operator returned, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        num_bytes = storage.nbytes()
        kind = self._kind_of_new()

        def freed(_: object) -> None:
            self._forget(address)

        self._live[address] = (weakref.ref(storage, freed), num_bytes, kind)
        self._now[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._peak_total:
            self._peak_total = self._total
            self._peak = list(self._now)

    def classify(self, held: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
        """Tell apart what lives now, and count the peak from here.

        Args:
            held: Tensors by kind; where several kinds hold one storage, the first wins.

        Returns:
            Bytes by kind, of the kinds in ``held``.
        """
        kinds = {
            tensor.untyped_storage()._cdata: KINDS.index(kind)
            for kind in reversed(tuple(held))
            for tensor in held[kind]
        }
        for tensor in (tensor for tensors in held.values() for tensor in tensors):
            self.see(tensor)
        self._now = [0] * len(KINDS)
        for address, (reference, num_bytes, _) in list(self._live.items()):
            kind = kinds.get(address, _OTHER)
            self._live[address] = (reference, num_bytes, kind)
            self._now[kind] += num_bytes
        self._peak_total, self._peak = self._total, list(self._now)
        return {kind: self._now[KINDS.index(kind)] for kind in held}

    def peak(self) -> Peak:
        """Return the most that lived at once since the last :meth:`classify`."""
        return Peak(dict(zip(KINDS, self._peak, strict=True)))

    def _kind_of_new(self) -> int:
        if not self.in_forward_backward:
            return _OTHER
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
            return _ACTIVATIONS  # with gradients on inside a backward pass: recomputed
        return _BACKWARD

    def _forget(self, address: int) -> None:
        _, num_bytes, kind = self._live.pop(address)
        self._now[kind] -= num_bytes
        self._total -= num_bytes


def held_by(model: Iterable[torch.nn.Module], optimizer: Any) -> dict[str, list[Tensor]]:
    """Return the tensors that model and optimizer hold from step to step, by kind.

    Args:
        model: Model chunks of this rank, wrapped for data parallelism or not.
        optimizer: Megatron's optimizer, a chain of optimizers or one.
    """
    held: dict[str, list[Tensor]] = {kind: [] for kind in KINDS[:6]}
    for parameter in (each for chunk in model for each in chunk.parameters()):
        part = "dense" if getattr(parameter, "allreduce", True) else "expert"
        held[f"{part} weights"].append(parameter)
        gradients = (getattr(parameter, "main_grad", None), parameter.grad)
        held[f"{part} gradients"] += [each for each in gradients if each is not None]
    for group, state in _groups(optimizer):
        part = "expert" if group["is_expert_parallel"] else "dense"
        held[f"{part} optimizer"] += [each for each in group["params"] if each is not None]
        held[f"{part} optimizer"] += state
    return held


def _groups(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], list[Tensor]]]:
    """Yield each parameter group of the torch optimizers, with the state of its parameters."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        if inner is None:  # a stage without parameters of this kind
            continue
        for group in inner.param_groups:
            states = (inner.state.get(each, {}) for each in group["params"])
            found = [v for state in states for v in state.values() if isinstance(v, Tensor)]
            yield group, found
