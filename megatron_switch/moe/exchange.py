"""Moving rows with gradients: gathers by index, the all-to-all, all-gather and reduce-scatter.

Each operation is the transpose of another one here, so a backward pass is again one gather or one
collective, and nothing but integers is kept for it. Every rank of a group takes part in every
collective, forward and backward, also when it sends and receives no row.

Megatron's own mappings are not used: they allocate on ``torch.cuda.current_device()`` whatever the
device of their input, and have no asynchronous all-to-all.

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
    """Which source row each row is a copy of, and the transpose: which rows copy each source row.

    Both directions are kept, so that the transpose of a gather is again a gather: on CUDA an
    accumulating scatter would be neither deterministic nor as fast.
    """

    source: Tensor
    """int64 (N,): source row of each row, -1 for a row of zeros."""
    copies: Tensor
    """int64 (sources, K): the rows that copy this source row, -1 for none."""
    source_has_gaps: bool
    """Whether -1 may occur in ``source``."""
    copies_have_gaps: bool
    """Whether -1 may occur in ``copies``."""

    @classmethod
    def permutation(cls, source_N: Tensor) -> "RowMap":
        """Return the map of a reordering, in which every source row occurs exactly once."""
        inverse_N = torch.empty_like(source_N)
        inverse_N[source_N] = torch.arange(source_N.numel(), device=source_N.device)
        return cls(source_N, inverse_N.unsqueeze(1), source_has_gaps=False, copies_have_gaps=False)


def gather_rows(x: Tensor, rows: RowMap) -> Tensor:
    """Return ``x[rows.source]``, with zeros where a row has no source.

    Args:
        x: Source rows, shape (sources, ...).
        rows: The map.

    Returns:
        Shape (N, ...), dtype of ``x``.
    """
    gathered: Tensor = _GatherRows.apply(x, rows)
    return gathered


def scatter_rows(x: Tensor, rows: RowMap) -> Tensor:
    """Return rows to their sources, the transpose of :func:`gather_rows`; copies are summed.

    Args:
        x: Rows, shape (N, ...).
        rows: The map by which they were gathered.

    Returns:
        Shape (sources, ...), dtype of ``x``; zeros for a source without copies.
    """
    scattered: Tensor = _ScatterRows.apply(x, rows)
    return scattered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.has_gaps = rows.copies_have_gaps
        ctx.save_for_backward(rows.copies)
        return _gather(x, rows.source, rows.source_has_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (copies,) = ctx.saved_tensors
        return _gather(grad, copies, ctx.has_gaps), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.has_gaps = rows.source_has_gaps
        ctx.save_for_backward(rows.source)
        return _gather(x, rows.copies, rows.copies_have_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        return _gather(grad, source, ctx.has_gaps), None


def _gather(x: Tensor, index: Tensor, has_gaps: bool) -> Tensor:
    """Gather rows; with a second dim in ``index``, sum over it (in float32 for half precision)."""
    shape = index.shape + x.shape[1:]
    if x.shape[0] == 0:  # nothing to gather from: every index is -1
        rows = x.new_zeros(shape)
    else:
        flat = index.reshape(-1)
        # A gap reads row 0 and is zeroed afterwards, whatever row 0 holds (NaN too).
        rows = x.index_select(0, flat.clamp(min=0) if has_gaps else flat).view(shape)
        if has_gaps:
            missing = (index < 0).view(index.shape + (1,) * (x.ndim - 1))
            rows.masked_fill_(missing, 0)
    if index.ndim == 1:
        return rows
    return rows.squeeze(1) if index.shape[1] == 1 else rows.sum(dim=1)


class AsyncAllToAll:
    """One all-to-all and, later, its transpose; at most one of them is in flight."""

    def __init__(self, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> None:
        self.group, self.send, self.receive = group, send, receive
        self._in_flight: tuple[Any, Tensor, Tensor] | None = None

    def start(self, rows: Tensor, *, transposed: bool = False) -> Tensor:
        """Start the exchange of rows, or of gradients in the opposite direction.

        Returns:
            The buffer that is being filled; it must not be read before :meth:`wait`.
        """
        send, receive = (self.receive, self.send) if transposed else (self.send, self.receive)
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(
            received, rows, receive, send, group=self.group, async_op=True
        )
        self._in_flight = (work, received, rows)  # the sent rows are read until the end
        return received

    def wait(self) -> Tensor:
        """Wait for the exchange in flight and return what was received."""
        assert self._in_flight is not None, "waited for an exchange that was not started"
        work, received, _ = self._in_flight
        work.wait()
        self._in_flight = None
        return received


@dataclass(frozen=True)
class Exchange:
    """Rows in flight between ranks; :meth:`wait` returns what was received.

    Backward runs the other way round: the exchange of gradients starts where the rows were waited
    for, and is waited for where theirs was started. So what overlaps in forward overlaps in
    backward too.
    """

    rows: Tensor
    """The rows themselves where there is nobody to exchange with; else a placeholder that ties the
    two ends together in autograd's graph."""
    transfer: AsyncAllToAll | None

    @classmethod
    def start(
        cls, rows: Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]
    ) -> "Exchange":
        """Send rows to every rank of a group and leave them in flight.

        Args:
            rows: Shape (sum(send), ...), ordered by destination.
            group: Ranks that exchange; all of them must call.
            send: Rows for each rank of the group.
            receive: Rows from each rank of the group.
        """
        if group.size() == 1:
            return cls(rows, None)
        transfer = AsyncAllToAll(group, send, receive)
        return cls(_StartExchange.apply(rows, transfer), transfer)

    def wait(self) -> Tensor:
        """Return the received rows, ordered by sender: shape (sum(receive), ...)."""
        if self.transfer is None:
            return self.rows
        received: Tensor = _WaitForExchange.apply(self.rows, self.transfer)
        return received


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.start(rows)
        return rows.new_zeros(()).expand(rows.shape)  # shape of the gradient, and no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # ``grad`` is the buffer that _WaitForExchange.backward returned before it was filled.
        return ctx.transfer.wait(), None


class _WaitForExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.start(grad, transposed=True), None


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of a group, in rank order; gradients are summed over ranks.

    Args:
        x: Shape (N, ...), the same on every rank.
        group: Ranks that hold the rows.
    """
    if group.size() == 1:
        return x
    gathered: Tensor = _AllGather.apply(x, group)
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


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(share, x.contiguous(), group=group)
    return share
