"""The experts' activation times the gate, between their two matrix products.

One pass forward and one backward. Values are bfloat16, float16 or float32 in memory and float32 in
registers alone, so the activation is rounded once, after the gate. Backward computes the activation
again from its input and sums the gate's gradient over the row in float32, in a fixed order.

Not here, because torch does them: dropout, clamped activations and an offset of the linear half.

Shape letters:

    R  rows, ordered by expert    F  hidden width    H  width of the input: F, or 2 F where gated
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_switch.kernels.launch import launch, vector

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
"""``gelu`` is the exact one, with the error function; ``gelu_tanh`` its approximation."""

_WIDEST = 1024
"""Columns that a program holds at a time: 8 a thread, 16 bytes of bfloat16."""


def activate(
    input_RH: Tensor, gate_R: Tensor, *, activation: Activation, gated_linear: bool = False
) -> Tensor:
    """Return ``activation(input) * gate``, or ``activation(first half) * second half * gate``.

    Args:
        input_RH: Output of the experts' first matrices, shape (R, H).
        gate_R: Router probability of each row, shape (R,), float32.
        activation: The function.
        gated_linear: Whether the input is two halves, as in SwiGLU (``silu``) and gated GELU.

    Returns:
        Shape (R, F), dtype of the input.
    """
    num_rows, width = input_RH.shape
    assert not gated_linear or width % 2 == 0, width
    gate_R = vector(gate_R, num_rows)
    hidden_RF: Tensor = _Activate.apply(input_RH, gate_R, activation, gated_linear)
    return hidden_RF


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_RH: Tensor, gate_R: Tensor, activation: Activation, gated_linear: bool
    ) -> Tensor:
        input_RH = input_RH.contiguous()
        num_rows, width = input_RH.shape
        width = width // 2 if gated_linear else width
        block = min(_WIDEST, triton.next_power_of_2(width))
        ctx.save_for_backward(input_RH, gate_R)
        ctx.constants = {"ACTIVATION": activation, "GATED": gated_linear, "BLOCK_F": block}
        hidden_RF = input_RH.new_empty(num_rows, width)
        launch(
            _forward_kernel,
            (num_rows, triton.cdiv(width, block)),
            *(input_RH, gate_R, hidden_RF, width),
            **ctx.constants,
        )
        return hidden_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        input_RH, gate_R = ctx.saved_tensors
        num_rows, width = grad_RF.shape
        grad_input_RH, grad_gate_R = torch.empty_like(input_RH), torch.empty_like(gate_R)
        launch(
            _backward_kernel,
            (num_rows,),
            *(input_RH, gate_R, grad_RF.contiguous(), grad_input_RH, grad_gate_R, width),
            **ctx.constants,
        )
        return grad_input_RH, grad_gate_R, None, None


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    """Return the activation and its derivative; what is not used is not computed."""
    if ACTIVATION == "relu":  # NaN stays NaN, as in torch
        value = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u); sqrt(8 / pi) = 1.596
        below = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * below
        inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = below + value * (1.0 - below) * inner_slope
    else:
        tl.static_assert(ACTIVATION == "silu", "unknown activation")
        below = tl.sigmoid(x)
        value = x * below
        slope = below + value * (1.0 - below)
    return value, slope


@triton.jit
def _forward_kernel(
    input_ptr,
    gate_ptr,
    hidden_ptr,
    width,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < width
    x_ptr = input_ptr + row * width * (2 if GATED else 1) + column
    hidden, _ = _value_and_slope(tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        hidden *= tl.load(x_ptr + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + row * width + column, hidden * tl.load(gate_ptr + row), mask=mask)


@triton.jit
def _backward_kernel(
    input_ptr,
    gate_ptr,
    grad_ptr,
    grad_input_ptr,
    grad_gate_ptr,
    width,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_ptr + row)
    dot = tl.zeros([BLOCK_F], tl.float32)
    for start in range(0, width, BLOCK_F):
        column = start + tl.arange(0, BLOCK_F)
        mask = column < width
        at = row * width * (2 if GATED else 1) + column
        grad = tl.load(grad_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
        value, slope = _value_and_slope(x, ACTIVATION)
        if GATED:
            linear = tl.load(input_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_input_ptr + at + width, grad * gate * value, mask=mask)
            value, slope = value * linear, slope * linear
        tl.store(grad_input_ptr + at, grad * gate * slope, mask=mask)
        dot += grad * value
    tl.store(grad_gate_ptr + row, tl.sum(dot, axis=0))
