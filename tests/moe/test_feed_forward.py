"""The experts' networks equal a loop over experts in float64, one block or many, gradients too."""

import pytest
import torch
import torch.nn.functional as F

from megatron_switch.moe import feed_forward as module
from megatron_switch.moe.feed_forward import _Block, feed_forward

D, FF = 6, 10
COUNTS = [[5], [3, 3, 3], [4, 0, 5], [0, 0, 7], [0, 0, 0]]


def swiglu(input_RH, key_R):
    glu_RF, linear_RF = input_RH.chunk(2, dim=1)
    return F.silu(glu_RF) * linear_RF


def masked(input_RH, key_R):
    return F.gelu(input_RH) * (key_R % 2).unsqueeze(1)


ACTIVATIONS = {"relu": None, "swiglu": swiglu, "by key": masked}


def plain(rows_RD, gate_R, first, second, counts, activate, key_R):
    """Scale the hidden activation, as Megatron does, and multiply expert by expert."""
    outs = []
    split = (torch.split(x, counts) for x in (rows_RD, gate_R, key_R))
    for rows, gate, key, one, two in zip(*split, first, second, strict=True):
        input_RH = rows @ one.mT
        hidden_RF = input_RH.relu() if activate is None else activate(input_RH, key)
        outs.append((hidden_RF * gate.unsqueeze(1)) @ two.mT)
    return torch.cat(outs)


@pytest.fixture(params=["an expert at a time", "all at once"])
def blocks(request, monkeypatch):
    if request.param == "all at once":
        whole = lambda counts, device: [  # noqa: E731
            _Block(slice(0, sum(counts)), slice(0, len(counts)), counts)
        ]
        monkeypatch.setattr(module, "_blocks", whole)


def leaves_of(counts, activate):
    width = 2 * FF if activate is swiglu else FF
    shapes = (sum(counts), D), (sum(counts),), (len(counts), width, D), (len(counts), D, FF)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("activate", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_equals_a_loop(counts, activate):
    leaves = leaves_of(counts, activate)
    key_R = torch.arange(sum(counts))
    out_RD = feed_forward(*leaves, counts, activate, key_R)
    expected_RD = plain(*leaves, counts, activate, key_R)
    torch.testing.assert_close(out_RD, expected_RD)
    direction_RD = torch.randn_like(out_RD)
    grads = torch.autograd.grad(out_RD, leaves, direction_RD)
    expected = torch.autograd.grad(expected_RD, leaves, direction_RD, materialize_grads=True)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_a_gate_of_zero_has_its_gradient():
    leaves = leaves_of([3], None)
    leaves[1].data[1] = 0.0
    key_R = torch.zeros(3)
    (grad_R,) = torch.autograd.grad(feed_forward(*leaves, [3]).sum(), leaves[1])
    (expected_R,) = torch.autograd.grad(plain(*leaves, [3], None, key_R).sum(), leaves[1])
    torch.testing.assert_close(grad_R, expected_R)
    assert grad_R[1] != 0


@pytest.mark.parametrize("frozen", range(4), ids=["rows", "gates", "first", "second"])
def test_frozen_inputs_get_none_and_change_nothing(frozen):
    leaves = leaves_of([2, 3], None)
    feed_forward(*leaves, [2, 3]).sum().backward()
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    leaves[frozen].requires_grad_(False)
    feed_forward(*leaves, [2, 3]).sum().backward()
    for number, (leaf, grad) in enumerate(zip(leaves, expected, strict=True)):
        if number == frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, grad)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("counts", [[3, 3], [4, 0]], ids=str)
def test_gradients_are_added_to_megatrons_buffers(counts):
    rows, gate, *weights = leaves_of(counts, None)
    grads = torch.autograd.grad(feed_forward(rows, gate, *weights, counts).sum(), weights)
    held = [torch.randn_like(weight) for weight in weights]
    for weight, buffer in zip(weights, held, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = buffer.clone(), False
    feed_forward(rows, gate, *weights, counts).sum().backward()
    for weight, buffer, grad in zip(weights, held, grads, strict=True):
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape  # Megatron's hooks ask for one
        torch.testing.assert_close(weight.main_grad, buffer + grad)


@pytest.mark.usefixtures("blocks")
def test_gradients_are_added_to_a_buffer_of_another_dtype_as_megatron_adds_them():
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves_of([2, 3], None)]
    leaves[1] = leaves[1].detach().float()
    weights = leaves[2:]
    grads = torch.autograd.grad(feed_forward(*leaves, [2, 3]).sum(), weights)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    feed_forward(*leaves, [2, 3]).sum().backward()
    for weight, grad in zip(weights, grads, strict=True):
        assert weight.grad_added_to_main_grad
        assert torch.equal(weight.main_grad, torch.ones(weight.shape).add_(grad))


def test_what_is_kept_for_backward():
    kept = []

    def note(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    leaves = leaves_of([2, 3], None)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        feed_forward(*leaves, [2, 3])
    inputs = [(5, D), (5,), (2, FF, D), (2, D, FF)]
    assert kept == [*inputs, (2, FF), (3, FF)]  # the hidden activation, expert by expert
