"""The activation's kernels against torch's functions, alone and between the experts' products."""

import pytest
import torch
import torch.nn.functional as F
from support.compiled_kernels import Context, assert_compiles, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.kernels import activation
from megatron_switch.moe.grouped_linear import activated_grouped_linear

FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts off digits where a GPU rounds, so an error is up to one unit, not a half.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def expected_hidden(name, input_RH, gate_R, gated_linear):
    if gated_linear:
        first_RF, second_RF = input_RH.chunk(2, dim=1)
        hidden_RF = FUNCTIONS[name](first_RF) * second_RF
    else:
        hidden_RF = FUNCTIONS[name](input_RH)
    return (hidden_RF * gate_R.unsqueeze(1)).to(input_RH.dtype)


def assert_close(actual: torch.Tensor, oracle: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), oracle, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("gated_linear", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# A row of two blocks, the second cut off; and no rows.
@pytest.mark.parametrize(("num_rows", "width"), [(2, 1100), (0, 8)])
def test_values_and_gradients_are_those_of_torch(
    kernels, name, gated_linear, dtype, num_rows, width
):
    input_RH = (torch.randn(num_rows, width * (1 + gated_linear)) * 2).to(dtype).requires_grad_()
    gate_R = torch.rand(num_rows).requires_grad_()
    oracle_RH, oracle_gate_R = (t.detach().double().requires_grad_() for t in (input_RH, gate_R))

    actual_RF = kernels.activation.activate(
        input_RH, gate_R, activation=name, gated_linear=gated_linear
    )
    expected_RF = expected_hidden(name, oracle_RH, oracle_gate_R, gated_linear)
    assert actual_RF.dtype == dtype
    assert_close(actual_RF, expected_RF)

    grad_RF = torch.randn(num_rows, width).to(dtype)
    actual_RF.backward(grad_RF)
    expected_RF.backward(grad_RF.double())
    assert_close(input_RH.grad, oracle_RH.grad)
    torch.testing.assert_close(gate_R.grad, oracle_gate_R.grad.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_far_out_are_those_of_torch(kernels, name):
    far = torch.tensor([[-1e4, -30.0, -0.0, 0.0, 30.0, 1e4]])
    inputs = [far.clone().requires_grad_() for _ in range(2)]
    gate_R = torch.ones(1)
    actual = kernels.activation.activate(inputs[0], gate_R, activation=name)
    expected = expected_hidden(name, inputs[1], gate_R, gated_linear=False)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan(kernels, name):
    input_RH = torch.tensor([[torch.nan, 1.0]])
    hidden_RF = kernels.activation.activate(input_RH, torch.ones(1), activation=name)
    assert hidden_RF.isnan().tolist() == [[True, False]]


def test_it_serves_the_experts_second_product(kernels):
    """With the counts of three experts, one of them without rows."""
    counts, width, model = [3, 0, 2], 6, 4
    tensors = [torch.randn(5, 2 * width), torch.rand(5), torch.randn(3, model, width)]
    actual_inputs = [t.clone().requires_grad_() for t in tensors]
    oracle_inputs = [t.double().requires_grad_() for t in tensors]

    def by_kernel(input_RH, gate_R):
        return kernels.activation.activate(input_RH, gate_R, activation="silu", gated_linear=True)

    def by_torch(input_RH, gate_R):
        return expected_hidden("silu", input_RH, gate_R, gated_linear=True)

    actual_RD = activated_grouped_linear(*actual_inputs, counts, by_kernel)
    expected_RD = activated_grouped_linear(*oracle_inputs, counts, by_torch)
    torch.testing.assert_close(actual_RD, expected_RD.float(), rtol=1e-5, atol=1e-5)
    actual_RD.square().sum().backward()
    expected_RD.square().sum().backward()
    for actual, oracle in zip(actual_inputs, oracle_inputs, strict=True):
        torch.testing.assert_close(actual.grad, oracle.grad.float(), rtol=1e-5, atol=1e-5)


def fake_step(name: str, gated_linear: bool, dtype: torch.dtype, width: int):
    """Run forward and backward on rows that claim to be on a GPU."""
    with FakeTensorMode():
        input_RH = torch.empty(500, width * (1 + gated_linear), device="cuda", dtype=dtype)
        ctx, gate_R = Context(), torch.empty(500, device="cuda")
        hidden_RF = activation._Activate.forward(ctx, input_RH, gate_R, name, gated_linear)
        grad_RH, grad_R, *_ = activation._Activate.backward(ctx, torch.empty_like(hidden_RF))
        return hidden_RF, grad_RH, grad_R


@pytest.mark.parametrize("gated_linear", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_are_known_without_a_gpu(dtype, gated_linear):
    hidden_RF, grad_RH, grad_R = fake_step("silu", gated_linear, dtype, width=64)
    assert hidden_RF.shape == (500, 64)
    assert grad_RH.shape == (500, 64 * (1 + gated_linear))
    assert hidden_RF.dtype == grad_RH.dtype == dtype
    assert (grad_R.shape, grad_R.dtype) == ((500,), torch.float32)
    assert hidden_RF.device.type == grad_R.device.type == "cuda"


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("capability", "name", "gated_linear", "dtype", "width"),
    [
        (90, "relu", False, torch.bfloat16, 4096),
        (90, "gelu", True, torch.bfloat16, 4096),
        *(
            pytest.param(capability, name, gated, dtype, width, marks=pytest.mark.slow)
            for capability in (80, 90, 100)
            for name in FUNCTIONS
            for gated in (False, True)
            for dtype, width in ((torch.bfloat16, 4096), (torch.float16, 100), (torch.float32, 1))
        ),
    ],
)
def test_it_compiles_without_spilling_registers(capability, name, gated_linear, dtype, width):
    with launches_of(activation) as launches:
        fake_step(name, gated_linear, dtype, width)
    assert len(launches) == 2
    assert_compiles(launches, capability)
