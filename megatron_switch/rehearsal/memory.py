"""Memory of a rank: the sum of the live tensor storages, by kind.

A storage is counted from the operator that first returns a tensor on it until it is freed, whatever
views of it exist. That is what a GPU's allocator allocates, without its rounding and fragmentation,
the CUDA context, work spaces of libraries and communicators; it is not the resident memory of a
process. It is counted in the same way on real tensors and on fake ones.

Storages that outlive a step are classified by their owner: weights, gradients and optimizer state,
of dense layers and of experts. The others by when they were made: in a forward pass (recomputed
ones too), in a backward pass, or around both.

What Megatron moves to the host does not count as memory of the rank's device; it is counted apart.
What is computed from it stays there, until it is copied into a tensor of the device.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_switch.upstream.private import in_autograd_node, local_storage, storage_address

KINDS = (
    "dense weights",
    "expert weights",
    "dense gradients",
    "expert gradients",
    "dense optimizer",
    "expert optimizer",
    "activations",
    "backward",
    "gathered",
    "other",
)
"""Kinds of memory. *activations* were made in a forward pass, *backward* in a backward pass.
*gathered* are whole weights and gradients of the current layers, where ranks hold parts of them.
*other* was made before the step or around the two passes (batches, random states, the optimizer's
work space)."""

_ACTIVATIONS, _BACKWARD, _GATHERED, _OTHER = map(
    KINDS.index, ("activations", "backward", "gathered", "other")
)
_HOST = len(KINDS)


@dataclass(frozen=True)
class Peak:
    """Memory at the peak of a step.

    Attributes:
        by_kind: Bytes by the names of :data:`KINDS`, on the device.
        host: Most bytes that were alive on the host, of what Megatron moved there.
    """

    by_kind: Mapping[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.by_kind.values())


class LiveMemory:
    """Counts storages as they come and go."""

    def __init__(self) -> None:
        # By the address of a storage: a weak reference, which reports its end; bytes; kind.
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._now = [0] * (len(KINDS) + 1)
        self._peak = list(self._now)
        self._total = self._peak_total = self._peak_host = 0
        self._made_as: int | None = None
        self.in_forward_backward = False

    def see(self, tensor: Tensor, *, on_host: bool = False) -> None:
        """Count the storage of a tensor that an operator returned, if it is new.

        Args:
            tensor: The tensor; of one that is spread over ranks, the part of this rank.
            on_host: Whether a new storage is in the host's memory.
        """
        storage = local_storage(tensor)
        address = storage_address(storage)
        if address in self._live:
            return

        def freed(_: object) -> None:
            self._change(address, 0)
            del self._live[address]

        kind = _HOST if on_host else self._kind_of_new()
        self._live[address] = (weakref.ref(storage, freed), 0, kind)
        self._change(address, storage.nbytes())

    def resized(self, tensor: Tensor) -> None:
        """Count again the storage of a tensor that was freed or allocated in place."""
        storage = local_storage(tensor)
        address = storage_address(storage)
        if address in self._live:
            self._change(address, storage.nbytes())

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was counted as the host's."""
        if not self._now[_HOST]:
            return False
        found = self._live.get(storage_address(local_storage(tensor)))
        return found is not None and found[2] == _HOST

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Count storages that are made in this block as of a kind.

        Args:
            kind: One of :data:`KINDS`, or ``host``.
        """
        before, self._made_as = self._made_as, (*KINDS, "host").index(kind)
        try:
            yield
        finally:
            self._made_as = before

    def classify(self, held: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
        """Classify what lives now, and restart the peak.

        Args:
            held: Tensors by kind; a storage held by several kinds is of the first.

        Returns:
            Bytes by kind on the device, of the kinds in ``held``.
        """
        kinds = {
            storage_address(local_storage(tensor)): KINDS.index(kind)
            for kind in reversed(tuple(held))
            for tensor in held[kind]
        }
        for tensor in (tensor for tensors in held.values() for tensor in tensors):
            self.see(tensor)
        self._now = [0] * (len(KINDS) + 1)
        for address, (reference, num_bytes, kind) in list(self._live.items()):
            if kind != _HOST:
                kind = kinds.get(address, kind if kind == _GATHERED else _OTHER)
            self._live[address] = (reference, num_bytes, kind)
            self._now[kind] += num_bytes
        self._peak_total, self._peak = self._total, list(self._now)
        self._peak_host = self._now[_HOST]
        return {kind: self._now[KINDS.index(kind)] for kind in held}

    def peak(self) -> Peak:
        """Return the most that lived at once since the last :meth:`classify`."""
        by_kind = zip(KINDS, self._peak[:_HOST], strict=True)
        return Peak(dict(by_kind), self._peak_host)

    def _kind_of_new(self) -> int:
        if self._made_as is not None:
            return self._made_as
        if not self.in_forward_backward:
            return _OTHER
        if not in_autograd_node() or torch.is_grad_enabled():
            return _ACTIVATIONS  # with gradients on inside a backward pass: recomputed
        return _BACKWARD

    def _change(self, address: int, num_bytes: int) -> None:
        """Set the bytes of the storage at an address."""
        reference, before, kind = self._live[address]
        self._live[address] = (reference, num_bytes, kind)
        self._now[kind] += num_bytes - before
        if kind == _HOST:
            self._peak_host = max(self._peak_host, self._now[_HOST])
            return
        self._total += num_bytes - before
        if self._total > self._peak_total:
            self._peak_total = self._total
            self._peak = list(self._now)


def held_by(model: Iterable[torch.nn.Module], optimizer: Any) -> dict[str, list[Tensor]]:
    """Return the tensors that model and optimizer hold from step to step, by kind.

    Args:
        model: Model chunks of this rank, wrapped for data parallelism or not.
        optimizer: Megatron's optimizer, a chain of optimizers or one.
    """
    held: dict[str, list[Tensor]] = {kind: [] for kind in KINDS[:6]}
    for chunk in model:
        sharded = getattr(chunk, "param_and_grad_buffer", None)
        for part, what, tensor in _whole(chunk) if sharded is None else _cut_over_ranks(sharded):
            held[f"{part} {what}"].append(tensor)
    for group, state in _groups(optimizer):
        for parameter in (each for each in group["params"] if each is not None):
            expert = group["is_expert_parallel"] or _part(parameter) == "expert"
            part = "expert" if expert else "dense"
            held[f"{part} optimizer"] += [parameter, *state.get(parameter, ())]
    return held


def _part(parameter: Tensor) -> str:
    """Return whether a parameter is dense or an expert's; copies of Megatron-FSDP name theirs."""
    original = getattr(parameter, "orig_param", parameter)
    return "dense" if getattr(original, "allreduce", True) else "expert"


def _whole(chunk: torch.nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield part, kind and tensor of the parameters of a model chunk and of their gradients."""
    for parameter in chunk.parameters():
        part = _part(parameter)
        yield part, "weights", parameter
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if gradient is not None:
                yield part, "gradients", gradient


def _cut_over_ranks(buffer: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yield part, kind and tensor of what Megatron-FSDP holds of a model chunk on this rank."""
    for group in buffer.parameter_groups:
        part = "expert" if group.is_expert_param else "dense"
        for name, what in _FSDP_BUFFERS.items():
            found = getattr(group, name)
            if found is not None and found.data is not None:
                yield part, what, found.data


_FSDP_BUFFERS = {
    "model_weight_buffer": "weights",
    "main_grad_buffer": "gradients",
    "main_weight_buffer": "optimizer",
}


def _groups(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], dict[Any, list[Tensor]]]]:
    """Yield each parameter group of the torch optimizers, with the state of its parameters."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        if inner is None:  # a stage without parameters of this kind
            continue
        for group in inner.param_groups:
            states = {each: inner.state.get(each, {}) for each in group["params"]}
            yield (
                group,
                {
                    each: [value for value in state.values() if isinstance(value, Tensor)]
                    for each, state in states.items()
                },
            )
