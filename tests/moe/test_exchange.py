"""Gathers and collectives are what they say, and each backward is the transpose of its forward."""

import pytest
import torch
import torch.distributed as dist

from megatron_switch.moe.exchange import (
    Exchange,
    RowMap,
    all_gather_rows,
    gather_rows,
    reduce_scatter_rows,
    scatter_rows,
)
from megatron_switch.testing.ranks import run_ranks

# Four sources; row 1 has no copy, row 2 has two, and one row has no source.
WITH_GAPS = RowMap(
    source=torch.tensor([2, 0, -1, 3, 2]),
    copies=torch.tensor([[1, -1], [-1, -1], [0, 4], [3, -1]]),
    source_has_gaps=True,
    copies_have_gaps=True,
)
MATRIX = torch.zeros(5, 4).double()
MATRIX[[0, 1, 3, 4], [2, 0, 3, 2]] = 1.0


def test_gather_and_scatter_are_transposes_of_each_other():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gather_rows(x, WITH_GAPS), MATRIX @ x)
    torch.testing.assert_close(scatter_rows(y, WITH_GAPS), MATRIX.t() @ y)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, WITH_GAPS), x)
    assert torch.autograd.gradcheck(lambda y: scatter_rows(y, WITH_GAPS), y)


def test_missing_rows_are_zero_whatever_else_holds():
    x = torch.full((4,), torch.nan)
    x[2] = 1.0
    assert scatter_rows(gather_rows(x, WITH_GAPS), WITH_GAPS)[1] == 0.0
    assert gather_rows(x, WITH_GAPS)[2] == 0.0


def test_rows_without_a_source_are_zeros():
    empty = RowMap(torch.tensor([-1, -1]), torch.empty(0, 1, dtype=torch.int64), True, True)
    x = torch.empty(0, 3, requires_grad=True)
    y = gather_rows(x, empty)
    assert torch.equal(y, torch.zeros(2, 3))
    y.sum().backward()
    assert x.grad.shape == (0, 3)


def test_scattering_undoes_a_permutation():
    rows = RowMap.permutation(torch.randperm(7))
    x = torch.randn(7, 2)
    assert torch.equal(scatter_rows(gather_rows(x, rows), rows), x)


def test_copies_in_half_precision_are_summed_with_one_rounding():
    copies = 9
    rows = RowMap(torch.zeros(copies).long(), torch.arange(copies)[None], False, False)
    parts = torch.tensor([[256.0]] + [[0.75]] * (copies - 1), dtype=torch.bfloat16)
    assert scatter_rows(parts, rows).item() == 262.0  # one by one in bfloat16: 256


def _check_exchange(rank):
    group = dist.group.WORLD
    size = dist.get_world_size()
    # Rank r sends r rows to rank 0 and one row to each other: unequal, and some empty.
    send = [rank if peer == 0 else 1 for peer in range(size)]
    receive = [peer if rank == 0 else 1 for peer in range(size)]
    rows = torch.full((sum(send), 2), float(rank), requires_grad=True)
    arrived = Exchange.start(rows, group, send, receive).wait()
    expected = torch.arange(float(size)).repeat_interleave(torch.tensor(receive))
    assert torch.equal(arrived, expected[:, None].expand(-1, 2))
    (arrived * float(rank + 1)).sum().backward()
    receiver = torch.arange(1.0, size + 1).repeat_interleave(torch.tensor(send))
    assert torch.equal(rows.grad, receiver[:, None].expand(-1, 2))


def _check_in_flight(rank):
    group = dist.group.WORLD
    rows = torch.full((2, 1), float(rank))
    first = Exchange.start(rows, group, [1, 1], [1, 1])
    second = Exchange.start(rows * 10, group, [1, 1], [1, 1])
    assert torch.equal(second.wait(), torch.tensor([[0.0], [10.0]]))
    assert torch.equal(first.wait(), torch.tensor([[0.0], [1.0]]))
    with pytest.raises(AssertionError, match="was not started"):
        first.wait()


def _check_gather(rank):
    group = dist.group.WORLD
    size = dist.get_world_size()
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = all_gather_rows(x, group)
    assert torch.equal(gathered[:, 0], torch.arange(float(size)).repeat_interleave(2))
    (gathered * (rank + 1.0)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), sum(range(1, size + 1)) * 1.0))

    parts = torch.full((2 * size, 3), rank + 1.0, requires_grad=True)
    share = reduce_scatter_rows(parts, group)
    assert torch.equal(share, torch.full((2, 3), sum(range(1, size + 1)) * 1.0))
    (share * float(rank)).sum().backward()
    assert torch.equal(parts.grad[:, 0], torch.arange(float(size)).repeat_interleave(2))


def _check_alone(rank):
    group = dist.group.WORLD
    x = torch.randn(3, 2)
    assert all_gather_rows(x, group) is x
    assert reduce_scatter_rows(x, group) is x
    assert Exchange.start(x, group, [3], [3]).wait() is x


@pytest.mark.parametrize(
    ("check", "world_size"),
    [(_check_exchange, 3), (_check_in_flight, 2), (_check_gather, 3), (_check_alone, 1)],
)
def test_ranks_exchange_rows_as_planned(check, world_size):
    run_ranks(check, world_size)
