"""Grouped products equal a loop over experts, whichever kernel computes them."""

import pytest
import torch
import torch.nn.functional as F

from megatron_switch.moe import grouped_linear as module
from megatron_switch.moe.grouped_linear import activated_grouped_linear, grouped_linear

I, O = 16, 24  # noqa: E741 - shape letters
COUNTS = [[3, 3, 3], [4, 0, 5], [0, 0, 7], [0, 0, 0]]


def loop(rows_RI, weight_eOI, counts):
    parts = zip(torch.split(rows_RI, counts), weight_eOI, strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


def activate(input_RH, gate_R):
    return F.gelu(input_RH) * gate_R.unsqueeze(1)


@pytest.fixture(params=COUNTS, ids=str)
def counts(request):
    return request.param


@pytest.fixture
def leaves(counts):
    return (
        torch.randn(sum(counts), I, dtype=torch.float64, requires_grad=True),
        torch.rand(sum(counts), dtype=torch.float64, requires_grad=True),
        torch.randn(len(counts), O, I, dtype=torch.float64, requires_grad=True),
    )


def check_same(function, expected, leaves):
    out, expected_out = function(*leaves), expected(*leaves)
    torch.testing.assert_close(out, expected_out)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, direction, allow_unused=True)
    expected_grads = torch.autograd.grad(expected_out, leaves, direction, materialize_grads=True)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_linear_equals_a_loop(counts, leaves):
    rows_RI, _, weight_eOI = leaves
    check_same(
        lambda rows, weight: grouped_linear(rows, weight, counts),
        lambda rows, weight: loop(rows, weight, counts),
        (rows_RI, weight_eOI),
    )


def test_activated_linear_equals_the_two_apart(counts, leaves):
    check_same(
        lambda rows, gate, weight: activated_grouped_linear(rows, gate, weight, counts, activate),
        lambda rows, gate, weight: loop(activate(rows, gate), weight, counts),
        leaves,
    )


def test_every_expert_gets_a_gradient_and_no_row_breaks_the_graph(counts, leaves):
    rows_RI, gate_R, weight_eOI = leaves
    out = activated_grouped_linear(rows_RI, gate_R, weight_eOI, counts, activate)
    out.sum().backward()
    for index, count in enumerate(counts):
        assert bool(weight_eOI.grad[index].any()) == (count > 0)
    assert rows_RI.grad.shape == rows_RI.shape


def test_frozen_weights_and_inputs_get_none(leaves, counts):
    rows_RI, gate_R, weight_eOI = leaves
    out = activated_grouped_linear(rows_RI, gate_R, weight_eOI.detach(), counts, activate)
    out.sum().backward()
    grouped_linear(rows_RI.detach(), weight_eOI, counts).sum().backward()
    assert weight_eOI.grad is not None


def test_the_kernel_for_unequal_groups_equals_the_loop(monkeypatch):
    counts = [4, 0, 5]
    rows = torch.randn(9, I).bfloat16().requires_grad_()
    weight = torch.randn(3, O, I).bfloat16().requires_grad_()
    direction = torch.randn(9, O).bfloat16()
    expected = grouped_linear(rows, weight, counts)
    expected_grads = torch.autograd.grad(expected, (rows, weight), direction)
    monkeypatch.setattr(module, "_has_grouped_kernel", lambda rows, width: True)
    out = grouped_linear(rows, weight, counts)
    grads = torch.autograd.grad(out, (rows, weight), direction)
    torch.testing.assert_close(out, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)
    assert not grads[1][1].any()


def test_the_kernel_is_used_where_it_exists(monkeypatch):
    class Rows:  # a CUDA tensor, as far as the question goes
        dtype, device, shape = torch.bfloat16, torch.device("cuda", 0), (5, 16)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert module._has_grouped_kernel(Rows(), 24)
    assert not module._has_grouped_kernel(Rows(), 20)  # rows would not start at 16 bytes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not module._has_grouped_kernel(Rows(), 24)
    assert not module._has_grouped_kernel(torch.empty(5, 16, dtype=torch.bfloat16), 24)


def test_what_is_kept_for_backward():
    kept = []

    def note(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    counts = [2, 3]
    rows, gate = torch.randn(5, I, requires_grad=True), torch.rand(5)
    weight = torch.randn(2, O, I, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        activated_grouped_linear(rows, gate, weight, counts, activate)
    assert kept == [(5, I), (5,), (2, O, I)]
