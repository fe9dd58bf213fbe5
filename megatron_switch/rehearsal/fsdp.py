"""Megatron-FSDP in a rehearsal: weights, gradients and optimizer state cut over ranks.

Megatron finds out which ranks share what with small tensors of rank numbers, which must have
values; and it gives memory of gathered weights back without an operator, which must be counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_switch.rehearsal.memory import LiveMemory
from megatron_switch.upstream.patching import Patch, applied
from megatron_switch.upstream.private import without_dispatch_modes

_RANKS = "rank numbers must have values"
_FSDP = "megatron.core.distributed.fsdp."
_BUFFER = f"{_FSDP}src.megatron_fsdp.param_and_grad_buffer:"


@contextmanager
def cut_over_ranks(memory: LiveMemory) -> Iterator[None]:
    """Let Megatron-FSDP work on tensors without values, for the length of a block.

    Args:
        memory: What counts.

    Raises:
        UpstreamError: The installed torch or Megatron-Core is not what the patches were checked
            against.
    """
    with applied(sharding_patches(memory)):
        yield


def sharding_patches(memory: LiveMemory) -> tuple[Patch, ...]:
    """Return the patches of :func:`cut_over_ranks`, without applying them."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(tensor: Tensor, *size: Any) -> None:
            original(tensor, *size)
            memory.resized(tensor)

        return resize

    def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_bucket_storage(self: Any, *args: Any, **kwargs: Any) -> Any:
            with memory.making("gathered"):
                return original(self, *args, **kwargs)

        return allocate_bucket_storage

    mesh = "torch.distributed.device_mesh:DeviceMesh."
    return (
        Patch(f"{mesh}__init__", _RANKS, wrapper=_with_values),
        Patch(f"{mesh}mesh", _RANKS, wrapper=_property_with_values),
        Patch(
            f"{_FSDP}mcore_fsdp_adapter:FullyShardedDataParallel._init_dist_index",
            _RANKS,
            wrapper=_with_values,
            sha256=("71a8eb4fd53bd0ac5e4f32a644a8d9184a1a6e14e7b470bf385dc57ceea28f69",),
        ),
        Patch(
            f"{_BUFFER}DataParallelBuffer.allocate_bucket_storage",
            "whole weights and gradients are counted apart",
            wrapper=gathering,
            sha256=("fd379a7dd35732ee5cdddc9a0a01f0473eebed10a04003ba00ef6389047fb4af",),
        ),
        Patch(
            f"{_BUFFER}_alloc_storage",
            "it takes memory",
            wrapper=counted,
            sha256=("6e3eec2dffd9b5c9cd9a50afa7c74a564dcdebe07fec80775bfa71a23d23e352",),
        ),
        Patch(
            f"{_BUFFER}_free_storage",
            "it gives memory back",
            wrapper=counted,
            sha256=("5da14a49139478d7779dcae1764be01e82bbb82e9a6ca604c6e9f8ccad002501",),
        ),
    )


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        with without_dispatch_modes():
            return original(*args, **kwargs)

    return real


def _property_with_values(original: property) -> property:
    assert original.fget is not None
    return property(_with_values(original.fget))
