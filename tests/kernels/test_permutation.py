"""Gather and scatter of rows by the kernels against those of the exchange in plain torch."""

import pytest
import torch
from support.compiled_kernels import Context, assert_compiles, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.kernels import permutation
from megatron_switch.moe import exchange

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts off digits where a GPU rounds, so an error is up to one unit, not a half.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random_map(num_sources: int, num_rows: int, copies: int) -> exchange.RowMap:
    """Place copies of sources in rows of their own; some copies get no row, some rows no copy."""
    place = torch.randperm(max(num_rows, num_sources * copies))[: num_sources * copies]
    copies_SK = place.where(place < num_rows, -1).view(num_sources, copies)
    source_N = torch.full((num_rows,), -1)
    source_SK = torch.arange(num_sources).unsqueeze(1).expand_as(copies_SK)
    source_N[copies_SK[copies_SK >= 0]] = source_SK[copies_SK >= 0]
    return exchange.RowMap(source_N, copies_SK, source_has_gaps=True, copies_have_gaps=True)


def assert_close(actual: torch.Tensor, oracle: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), oracle, rtol=tolerance, atol=tolerance)


# A row shorter than a block, one of several blocks, copies, no rows, and no sources.
SIZES = [(7, 11, 1, 5), (7, 4, 1, 1500), (5, 9, 3, 16), (3, 0, 1, 4), (0, 2, 1, 4)]


@pytest.mark.parametrize(("num_sources", "num_rows", "copies", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gather_is_that_of_torch(kernels, dtype, num_sources, num_rows, copies, width):
    rows = random_map(num_sources, num_rows, copies)
    x_SD = torch.randn(num_sources, width).to(dtype).requires_grad_()
    oracle_SD = x_SD.detach().double().requires_grad_()

    actual_ND = kernels.permutation.gather_rows(x_SD, rows.source, rows.copies)
    expected_ND = exchange.gather_rows(oracle_SD, rows)
    assert actual_ND.dtype == dtype
    assert torch.equal(actual_ND.double(), expected_ND)  # nothing is rounded

    grad_ND = torch.randn(num_rows, width).to(dtype)
    actual_ND.backward(grad_ND)
    expected_ND.backward(grad_ND.double())
    assert_close(x_SD.grad, oracle_SD.grad)


@pytest.mark.parametrize(("num_sources", "num_rows", "copies", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_a_scatter_is_that_of_torch(kernels, gated, dtype, num_sources, num_rows, copies, width):
    rows = random_map(num_sources, num_rows, copies)
    x_ND = torch.randn(num_rows, width).to(dtype).requires_grad_()
    gate_S = torch.rand(num_sources).requires_grad_() if gated else None
    oracle_ND = x_ND.detach().double().requires_grad_()

    actual_SD = kernels.permutation.scatter_rows(x_ND, rows.source, rows.copies, gate_S)
    expected_SD = exchange.scatter_rows(oracle_ND, rows)
    if gate_S is not None:
        oracle_gate_S = gate_S.detach().double().requires_grad_()
        expected_SD = expected_SD * oracle_gate_S.unsqueeze(1)
    assert actual_SD.dtype == dtype
    assert_close(actual_SD, expected_SD)

    grad_SD = torch.randn(num_sources, width).to(dtype)
    actual_SD.backward(grad_SD)
    expected_SD.backward(grad_SD.double())
    assert_close(x_ND.grad, oracle_ND.grad)
    if gate_S is not None:
        torch.testing.assert_close(gate_S.grad, oracle_gate_S.grad.float(), rtol=1e-5, atol=1e-4)


def test_what_is_dropped_is_exactly_zero_whatever_its_gate(kernels):
    rows_ND = torch.full((3, 4), torch.nan, requires_grad=True)
    gate_S = torch.tensor([torch.inf, torch.nan], requires_grad=True)
    source_N, copies_SK = torch.full((3,), -1), torch.full((2, 1), -1)
    y_SD = kernels.permutation.scatter_rows(rows_ND, source_N, copies_SK, gate_S)
    y_SD.backward(torch.full((2, 4), torch.nan))
    assert torch.equal(y_SD, torch.zeros(2, 4))
    assert torch.equal(rows_ND.grad, torch.zeros(3, 4))
    assert torch.equal(gate_S.grad, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_what_float32_cannot_hold_is_refused(kernels, dtype):
    source_N, copies_SK = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=str(dtype)):
        kernels.permutation.gather_rows(torch.ones(1, 4, dtype=dtype), source_N, copies_SK)


def fake_step(dtype: torch.dtype, width: int, copies: int):
    """Gather and scatter rows that claim to be on a GPU, forward and backward."""
    with FakeTensorMode():
        x_SD = torch.empty(400, width, device="cuda", dtype=dtype)
        source_N = torch.empty(500, device="cuda", dtype=torch.int64)
        copies_SK = torch.empty(400, copies, device="cuda", dtype=torch.int64)
        gate_S = torch.empty(400, device="cuda")
        ctx = Context()
        rows_ND = permutation._Gather.forward(ctx, x_SD, source_N, copies_SK)
        grad_x_SD, *_ = permutation._Gather.backward(ctx, torch.empty_like(rows_ND))
        y_SD = permutation._Scatter.forward(ctx, rows_ND, source_N, copies_SK, gate_S)
        grad_rows_ND, _, _, grad_gate_S = permutation._Scatter.backward(ctx, y_SD)
        return rows_ND, grad_x_SD, y_SD, grad_rows_ND, grad_gate_S


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_are_known_without_a_gpu(dtype):
    rows_ND, grad_x_SD, y_SD, grad_rows_ND, grad_gate_S = fake_step(dtype, width=64, copies=2)
    assert rows_ND.shape == grad_rows_ND.shape == (500, 64)
    assert y_SD.shape == grad_x_SD.shape == (400, 64)
    assert {t.dtype for t in (rows_ND, grad_rows_ND, y_SD, grad_x_SD)} == {dtype}
    assert (grad_gate_S.shape, grad_gate_S.dtype) == ((400,), torch.float32)
    assert rows_ND.device.type == grad_gate_S.device.type == "cuda"


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [
        (90, torch.bfloat16, 4096),
        *(
            pytest.param(capability, dtype, width, marks=pytest.mark.slow)
            for capability in (80, 90, 100)
            for dtype in DTYPES
            for width in (1, 1000, 4096)
        ),
    ],
)
def test_it_compiles_without_spilling_registers(capability, dtype, width):
    with launches_of(permutation) as launches:
        fake_step(dtype, width, copies=2)
    assert len(launches) == 5
    assert_compiles(launches, capability)
