"""The router's kernel against softmax, argmax and losses in plain torch."""

from typing import Any

import pytest
import torch
from support.compiled_kernels import Context, assert_compiles, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.kernels import router
from megatron_switch.moe.losses import load_balancing_share, router_z_share
from megatron_switch.moe.routing import count_tokens, route_probs, router_probabilities

# Less than a tile, many tiles, a last tile cut off; experts that are no power of two.
SIZES = [(12, 5, 2), (3, 100, 3), (70, 300, 2), (600, 8, 2), (20, 1, 1)]


def random_case(num_tokens: int, num_experts: int) -> tuple[Any, Any]:
    return torch.randn(num_tokens, num_experts) * 3, torch.rand(num_tokens) < 0.2


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_groups"), SIZES)
def test_values_and_gradients_are_those_of_torch(kernels, num_tokens, num_experts, num_groups):
    logits_TE, padding_T = random_case(num_tokens, num_experts)
    actual_TE, oracle_TE = logits_TE.clone().requires_grad_(), logits_TE.double().requires_grad_()

    top = kernels.router.top_expert(actual_TE, num_groups=num_groups, padding_T=padding_T)
    scores = router_probabilities(oracle_TE)
    routing = route_probs(scores.probs_TE, capacity=1, padding_T=padding_T)
    real_TE = scores.probs_TE.masked_fill(padding_T.unsqueeze(1), 0.0)
    prob_sum_GE = real_TE.view(num_groups, -1, num_experts).sum(dim=1)

    torch.testing.assert_close(top.expert_T, routing.expert_T)
    actual = (top.gate_T, top.logsumexp_T, top.prob_sum_GE)
    expected = (routing.gate_T, scores.logsumexp_T, prob_sum_GE)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)

    grads = [torch.randn_like(result) for result in actual]
    torch.autograd.backward(actual, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    torch.testing.assert_close(actual_TE.grad, oracle_TE.grad.float(), rtol=1e-5, atol=1e-6)


def test_both_losses_come_from_its_results(kernels):
    num_tokens, num_experts, num_groups = 48, 6, 2
    logits_TE, padding_T = random_case(num_tokens, num_experts)
    group_T = torch.arange(num_tokens) // (num_tokens // num_groups)
    actual_TE, oracle_TE = logits_TE.clone().requires_grad_(), logits_TE.double().requires_grad_()

    top = kernels.router.top_expert(actual_TE, num_groups=num_groups, padding_T=padding_T)
    counts_GE = count_tokens(
        top.expert_T,
        num_experts=num_experts,
        num_groups=num_groups,
        group_T=group_T,
        padding_T=padding_T,
    )
    tokens_G1 = counts_GE.sum(dim=1, keepdim=True)
    weight_GE = num_experts * counts_GE / tokens_G1**2 / num_groups
    balance = (weight_GE * top.prob_sum_GE).sum()
    z = router_z_share(top.logsumexp_T, padding_T=padding_T)

    scores = router_probabilities(oracle_TE)
    expected_balance = load_balancing_share(
        scores.probs_TE, counts_GE, group_T=group_T, padding_T=padding_T
    )
    expected_z = router_z_share(scores.logsumexp_T, padding_T=padding_T)
    torch.testing.assert_close(balance, expected_balance.float())
    torch.testing.assert_close(z, expected_z.float())
    (balance + z).backward()
    (expected_balance + expected_z).backward()
    torch.testing.assert_close(actual_TE.grad, oracle_TE.grad.float(), rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lowest_expert_also_those_that_rounding_makes(kernels):
    logits_TE = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0 + 2**-23]])
    expert_T = kernels.router.top_expert(logits_TE).expert_T
    assert expert_T.tolist() == logits_TE.softmax(dim=1).argmax(dim=1).tolist()
    assert expert_T.tolist()[:2] == [1, 0]


def test_a_row_that_is_not_finite_keeps_an_expert_in_range_and_shows_in_its_gate(kernels):
    logits_TE = torch.zeros(4, 5)
    logits_TE[1, 3], logits_TE[2, 1], logits_TE[3, 0] = torch.nan, torch.inf, -torch.inf
    top = kernels.router.top_expert(logits_TE)
    assert top.expert_T.tolist() == logits_TE.softmax(dim=1).argmax(dim=1).tolist() == [0, 0, 0, 1]
    assert top.gate_T.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_no_tokens_sum_to_zero(kernels, num_groups):
    logits_TE = torch.zeros(0, 4, requires_grad=True)
    top = kernels.router.top_expert(logits_TE, num_groups=num_groups)
    assert top.gate_T.shape == (0,)
    assert torch.equal(top.prob_sum_GE, torch.zeros(num_groups, 4))
    top.prob_sum_GE.sum().backward()
    assert logits_TE.grad.shape == (0, 4)


def test_a_result_that_no_loss_uses_adds_no_gradient(kernels):
    logits_TE = torch.randn(6, 4, requires_grad=True)
    kernels.router.top_expert(logits_TE).gate_T.sum().backward()
    expected_TE = logits_TE.detach().clone().requires_grad_()
    expected_TE.softmax(dim=1).amax(dim=1).sum().backward()
    torch.testing.assert_close(logits_TE.grad, expected_TE.grad)


def fake_step(num_experts: int, num_tokens: int = 4096, num_groups: int = 2):
    """Run forward and backward on tensors that claim to be on a GPU."""
    with FakeTensorMode():
        logits_TE = torch.empty(num_tokens, num_experts, device="cuda")
        padding_T = torch.empty(num_tokens, device="cuda", dtype=torch.bool)
        ctx = Context()
        results = router._TopExpert.forward(ctx, logits_TE, num_groups, padding_T)
        grads = [torch.empty_like(result) for result in results[1:]]
        grad_TE, *_ = router._TopExpert.backward(ctx, None, *grads)
        return results, grad_TE


def test_shapes_are_known_without_a_gpu():
    (expert_T, gate_T, logsumexp_T, prob_sum_GE), grad_TE = fake_step(2048)
    assert {t.device.type for t in (expert_T, gate_T, logsumexp_T, prob_sum_GE)} == {"cuda"}
    assert (expert_T.shape, expert_T.dtype) == ((4096,), torch.int64)
    assert gate_T.shape == logsumexp_T.shape == (4096,)
    assert prob_sum_GE.shape == (2, 2048)
    assert (grad_TE.shape, grad_TE.dtype) == ((4096, 2048), torch.float32)


# Triton compiles numbers that are 1 in, here the experts and the tokens of a group.
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("capability", "num_experts", "num_tokens"),
    [
        (90, 2048, 4096),
        *(
            pytest.param(capability, *sizes, marks=pytest.mark.slow)
            for capability in (80, 90, 100)
            for sizes in ((1, 2), (8, 4096), (100, 4096), (128, 4096), (2048, 4096))
        ),
    ],
)
def test_it_compiles_without_spilling_registers(capability, num_experts, num_tokens):
    with launches_of(router) as launches:
        fake_step(num_experts, num_tokens)
    assert len(launches) == 2
    assert_compiles(launches, capability)
