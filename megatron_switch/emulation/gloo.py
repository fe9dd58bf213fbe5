"""What gloo lacks beside NCCL: collectives of unequal sizes, and groups that cost no thread each.

**Unequal sizes.** NCCL gathers and reduce-scatters tensors of unequal sizes, which Megatron's
expert tensor parallelism needs as soon as experts receive different numbers of tokens; gloo
refuses. It can exchange unequal sizes all to all, though, as long as they are given as lists. Every
rank passes the same list of shapes, so all ranks choose the same way.

**Threads.** torch gives every gloo group a transport device of its own, and each device a thread
that wakes every 10 ms. Megatron makes dozens of groups a rank, groups of one rank included: eight
ranks on two cores then lose a fifth of their time to idle threads. One device serves any number of
groups.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Collective = Callable[..., Any]


def with_sizes_as_lists(original: _Collective) -> _Collective:
    """Wrap ``torch.distributed.all_to_all_single``: sizes may be tensors, as NCCL allows."""

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = (_as_list(output_split_sizes), _as_list(input_split_sizes))
        return original(output, input, *sizes, group, async_op)

    return all_to_all_single


def gathering_unequal_sizes(original: _Collective) -> _Collective:
    """Wrap ``torch.distributed.all_gather``: the first dimensions may differ."""

    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if _equal(tensor_list):
            return original(tensor_list, tensor, group, async_op)
        assert not async_op, "gathering unequal sizes over gloo is synchronous"
        rows = [len(part) for part in tensor_list]
        copies = torch.cat([tensor] * len(tensor_list))  # one for every rank
        gathered = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        dist.all_to_all_single(gathered, copies, rows, [len(tensor)] * len(rows), group)
        for part, received in zip(tensor_list, torch.split(gathered, rows), strict=True):
            part.copy_(received)
        return None

    return all_gather


def scattering_unequal_sizes(original: _Collective) -> _Collective:
    """Wrap ``torch.distributed.reduce_scatter``: the first dimensions may differ."""

    def reduce_scatter(
        output: Tensor,
        input_list: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _equal(input_list):
            return original(output, input_list, op, group, async_op)
        assert not async_op, "reducing unequal sizes over gloo is synchronous"
        assert op == dist.ReduceOp.SUM, f"reducing unequal sizes over gloo sums; asked for {op}"
        num_ranks, mine = len(input_list), len(output)
        received = output.new_empty((num_ranks * mine, *output.shape[1:]))
        sizes = ([mine] * num_ranks, [len(part) for part in input_list])
        dist.all_to_all_single(received, torch.cat(input_list), *sizes, group)
        output.copy_(received.reshape(num_ranks, *output.shape).sum(dim=0))
        return None

    return reduce_scatter


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, Tensor) else sizes


def _equal(parts: list[Tensor]) -> bool:
    return all(part.shape == parts[0].shape for part in parts)


class GroupsOnOneDevice:
    """Takes the place of ``torch.distributed.ProcessGroupGloo`` where torch makes groups."""

    def __init__(self, original: Any) -> None:
        """Start without a device.

        Args:
            original: The class that groups are instances of.
        """
        self._original = original
        self._device: Any = None

    def __call__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any
    ) -> Any:
        """Make a group.

        Args:
            store: Where its ranks meet.
            rank: This rank's place in it.
            size: Its ranks.
            timeout: How long a collective may take.
            **settings: Further options of this version of torch.
        """
        if self._device is None:  # made late, because its thread does not survive a fork
            self._device = self._original.create_default_device()
        options = self._original._Options()
        options._devices = [self._device]
        options._timeout = timeout
        for name, value in settings.items():
            setattr(options, name, value)
        return self._original(store, rank, size, options)

    def __instancecheck__(self, instance: object) -> bool:
        """Return whether a group is gloo's, as the class does."""
        return isinstance(instance, self._original)

    def __getattr__(self, name: str) -> Any:
        """Return what the class has under that name."""
        return getattr(self._original, name)
