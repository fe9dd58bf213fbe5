"""Grouped products equal a loop over experts, whichever kernel computes them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_switch.moe import grouped_products as module
from megatron_switch.moe.grouped_products import (
    grouped_matmul,
    grouped_outer,
    write_grouped_outer,
)

I, O = 16, 24  # noqa: E741 - shape letters
COUNTS = [[5], [3, 3, 3], [4, 0, 5], [0, 0, 7], [0, 0, 0]]


def loop_matmul(rows_RI, weight_eIO, counts):
    parts = zip(torch.split(rows_RI, counts), weight_eIO, strict=True)
    return torch.cat([rows @ weight for rows, weight in parts])


def loop_outer(grad_RO, rows_RI, counts):
    parts = zip(torch.split(grad_RO, counts), torch.split(rows_RI, counts), strict=True)
    return torch.stack([torch.einsum("ro,ri->oi", grad, rows) for grad, rows in parts])


def drawn(counts, dtype=torch.float64):
    return (
        torch.randn(sum(counts), I, dtype=dtype),
        torch.randn(sum(counts), O, dtype=dtype),
        torch.randn(len(counts), I, O, dtype=dtype),
    )


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_equal_a_loop(counts):
    rows_RI, grad_RO, weight_eIO = drawn(counts)
    expected = loop_matmul(rows_RI, weight_eIO, counts)
    torch.testing.assert_close(grouped_matmul(rows_RI, weight_eIO, counts), expected)
    # As the layer stores them: the weight transposed.
    stored_eOI = weight_eIO.mT.contiguous()
    torch.testing.assert_close(grouped_matmul(rows_RI, stored_eOI.mT, counts), expected)
    expected = loop_outer(grad_RO, rows_RI, counts)
    torch.testing.assert_close(grouped_outer(grad_RO, rows_RI, counts), expected)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_outer_products_are_written_or_added(counts):
    rows_RI, grad_RO, _ = drawn(counts)
    expected = loop_outer(grad_RO, rows_RI, counts)
    written = torch.full_like(expected, torch.nan)  # what is there is not read
    write_grouped_outer(written, grad_RO, rows_RI, counts, add=False)
    torch.testing.assert_close(written, expected)
    write_grouped_outer(written, grad_RO, rows_RI, counts, add=True)
    torch.testing.assert_close(written, 2 * expected)


@pytest.mark.parametrize("counts", [[3, 3], [4, 5]], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_every_product_is_counted(counts, add):
    rows_RI, grad_RO, weight_eIO = drawn(counts)
    sums = torch.zeros(len(counts), O, I, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        grouped_matmul(rows_RI, weight_eIO, counts)
        write_grouped_outer(sums, grad_RO, rows_RI, counts, add=add)
    assert counter.get_total_flops() == 2 * 2 * sum(counts) * I * O


def test_the_kernel_for_unequal_groups_equals_the_loop(monkeypatch):
    counts = [4, 0, 5]
    rows_RI, grad_RO, weight_eIO = drawn(counts, torch.bfloat16)
    expected = grouped_matmul(rows_RI, weight_eIO, counts), grouped_outer(grad_RO, rows_RI, counts)
    monkeypatch.setattr(module, "_has_grouped_kernel", lambda rows, width: True)
    actual = grouped_matmul(rows_RI, weight_eIO, counts), grouped_outer(grad_RO, rows_RI, counts)
    torch.testing.assert_close(actual, expected)
    assert not actual[1][1].any()


def test_the_kernel_is_used_where_it_exists(monkeypatch):
    class Rows:  # a CUDA tensor, as far as the question goes
        dtype, device, shape = torch.bfloat16, torch.device("cuda", 0), (5, 16)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert module._has_grouped_kernel(Rows(), 24)
    assert not module._has_grouped_kernel(Rows(), 20)  # rows would not start at 16 bytes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not module._has_grouped_kernel(Rows(), 24)
    assert not module._has_grouped_kernel(torch.empty(5, 16, dtype=torch.bfloat16), 24)
