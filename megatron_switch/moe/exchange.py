"""Rows in motion: gathers by index, the all-to-all, and gather and reduce-scatter, with gradients.

Each operation is the transpose of another one here, so a backward pass is again one gather or one
collective, and nothing but integers is kept for it. Every rank of a group takes part in every
collective, forward and backward, also when it sends and receives no row.

Megatron's own mappings are not used: they allocate on ``torch.cuda.current_device()`` whatever the
device of their input, and cannot leave an exchange under way.

Shape letters: N rows of any kind, K copies of one row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class RowMap:
    """Where rows come from, and the transpose: where each source row went."""

    take: Tensor
    """int64 (N,): source row of each row, -1 for a row of zeros."""
    back: Tensor
    """int64 (sources, K): the rows that took this source row, -1 for none."""
    take_has_gaps: bool
    """Whether -1 may occur in ``take``."""
    back_has_gaps: bool
    """Whether -1 may occur in ``back``."""

    @classmethod
    def permutation(cls, take_N: Tensor) -> "RowMap":
        """Return the map of a reordering, in which every source row occurs exactly once."""
        back_N = torch.empty_like(take_N)
        back_N[take_N] = torch.arange(take_N.numel(), device=take_N.device)
        return cls(take_N, back_N.unsqueeze(1), take_has_gaps=False, back_has_gaps=False)


def gather_rows(x: Tensor, rows: RowMap) -> Tensor:
    """Return ``x[rows.take]``: the rows of ``x`` in their new places, zeros where there are none.

    Args:
        x: Source rows, shape (sources, ...).
        rows: The map.

    Returns:
        Shape (N, ...), dtype of ``x``.
    """
    taken: Tensor = _Take.apply(x, rows)
    return taken


def scatter_rows(x: Tensor, rows: RowMap) -> Tensor:
    """Return rows to their sources, the transpose of :func:`gather_rows`; copies are summed.

    Args:
        x: Rows, shape (N, ...).
        rows: The map that took them.

    Returns:
        Shape (sources, ...), dtype of ``x``; zeros for a source that nobody took.
    """
    put: Tensor = _Put.apply(x, rows)
    return put


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.has_gaps = rows.back_has_gaps
        ctx.save_for_backward(rows.back)
        return _take(x, rows.take, rows.take_has_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return _take(grad, back, ctx.has_gaps), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.has_gaps = rows.take_has_gaps
        ctx.save_for_backward(rows.take)
        return _take(x, rows.back, rows.back_has_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (take,) = ctx.saved_tensors
        return _take(grad, take, ctx.has_gaps), None


def _take(x: Tensor, index: Tensor, has_gaps: bool) -> Tensor:
    """Gather rows; with a second dim in ``index``, sum over it (in float32 for half precision)."""
    shape = index.shape + x.shape[1:]
    if x.shape[0] == 0:  # nothing to gather from: every index is -1
        rows = x.new_zeros(shape)
    else:
        flat = index.reshape(-1)
        rows = x.index_select(0, flat.clamp(min=0) if has_gaps else flat).view(shape)
        if has_gaps:
            missing = (index < 0).view(index.shape + (1,) * (x.ndim - 1))
            rows.masked_fill_(missing, 0)
    if index.ndim == 1:
        return rows
    return rows.squeeze(1) if index.shape[1] == 1 else rows.sum(dim=1)


class _Wire:
    """One all-to-all and, later, its transpose; at most one of them is under way."""

    def __init__(self, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> None:
        self.group, self.send, self.receive = group, send, receive
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def launch(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Start an exchange; what it returns must not be read before :meth:`land`."""
        rows = rows.contiguous()
        arriving = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(
            arriving, rows, receive, send, group=self.group, async_op=True
        )
        self._under_way = (work, arriving, rows)  # the sent rows are read until the end
        return arriving

    def land(self) -> Tensor:
        """Wait for the exchange under way and return what arrived."""
        assert self._under_way is not None, "waited for an exchange that was not started"
        work, arrived, _ = self._under_way
        work.wait()
        self._under_way = None
        return arrived


@dataclass(frozen=True)
class Exchange:
    """Rows under way between ranks; :meth:`arrive` waits for them.

    Backward runs the other way round: the gradients set out where the rows arrived, and are waited
    for where the rows set out. So what overlaps in forward overlaps in backward too.
    """

    rows: Tensor
    """The rows themselves where there is nobody to exchange with; else a stand-in for them that
    ties the two ends together in autograd's graph."""
    wire: _Wire | None

    @classmethod
    def start(
        cls, rows: Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]
    ) -> "Exchange":
        """Send rows to every rank of a group and leave them under way.

        Args:
            rows: Shape (sum(send), ...), ordered by destination.
            group: Ranks that exchange; all of them must call.
            send: Rows for each rank of the group.
            receive: Rows from each rank of the group.
        """
        if group.size() == 1:
            return cls(rows, None)
        wire = _Wire(group, send, receive)
        return cls(_SetOut.apply(rows, wire), wire)

    def arrive(self) -> Tensor:
        """Return the received rows, ordered by sender: shape (sum(receive), ...)."""
        if self.wire is None:
            return self.rows
        arrived: Tensor = _Arrive.apply(self.rows, self.wire)
        return arrived


class _SetOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: _Wire) -> Tensor:
        ctx.wire = wire
        wire.launch(rows, wire.send, wire.receive)
        return rows.new_zeros(()).expand(rows.shape)  # shape of the gradient, and no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.land(), None  # ``grad`` itself, complete now


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, wire: _Wire) -> Tensor:
        ctx.wire = wire
        return wire.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.launch(grad, ctx.wire.receive, ctx.wire.send), None


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of a group, in rank order; gradients are summed over ranks.

    Args:
        x: Shape (N, ...), the same on every rank.
        group: Ranks that hold the rows.
    """
    if group.size() == 1:
        return x
    gathered: Tensor = _Gather.apply(x, group)
    return gathered


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum rows over the ranks of a group and return this rank's share of them.

    Args:
        x: Shape (group size * N, ...), the same on every rank.
        group: Ranks that hold summands.
    """
    if group.size() == 1:
        return x
    share: Tensor = _ReduceScatter.apply(x, group)
    return share


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_and_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_and_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(share, x.contiguous(), group=group)
    return share
