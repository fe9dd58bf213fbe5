"""Losses against their formulas in float64, and shares of ranks against the whole."""

from itertools import pairwise

import pytest
import torch

from megatron_switch.errors import ConfigError
from megatron_switch.moe.losses import (
    load_balancing_loss,
    load_balancing_share,
    router_z_loss,
    router_z_share,
)
from megatron_switch.moe.routing import count_tokens, router_probabilities

NUM_TOKENS, NUM_EXPERTS = 24, 5


@pytest.fixture
def logits_TE():
    torch.manual_seed(7)
    return torch.randn(NUM_TOKENS, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)


def formula(probs_TE, expert_T):
    """Equations (4)-(6) with alpha = 1, for one group without padding."""
    num_tokens, num_experts = probs_TE.shape
    fraction_E = torch.bincount(expert_T, minlength=num_experts) / num_tokens
    return num_experts * (fraction_E * probs_TE.mean(dim=0)).sum()


@pytest.mark.parametrize("num_experts", [1, 2, 16])
def test_balanced_routing_costs_one(num_experts):
    expert_T = torch.arange(4 * num_experts) % num_experts
    probs_TE = torch.full((4 * num_experts, num_experts), 1 / num_experts)
    assert load_balancing_loss(probs_TE, expert_T).item() == pytest.approx(1.0)


def test_collapsed_routing_costs_the_number_of_experts():
    probs_TE = torch.eye(8)[torch.zeros(6, dtype=torch.int64)]
    assert load_balancing_loss(probs_TE, torch.zeros(6, dtype=torch.int64)).item() == 8.0


def test_groups_and_padding_follow_the_formula(logits_TE):
    probs_TE = logits_TE.softmax(dim=1)
    expert_T = probs_TE.argmax(dim=1)
    group_T = torch.tensor([40, 7, 99]).repeat(NUM_TOKENS // 3)
    padding_T = torch.arange(NUM_TOKENS) % 5 == 0
    padding_T |= group_T == 99  # a group of nothing but padding

    expected = torch.stack(
        [
            formula(probs_TE[mine], expert_T[mine])
            for mine in ((group_T == 40) & ~padding_T, (group_T == 7) & ~padding_T)
        ]
    ).mean()
    actual = load_balancing_loss(probs_TE, expert_T, group_T=group_T, padding_T=padding_T)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, logits_TE, retain_graph=True)[0],
        torch.autograd.grad(expected, logits_TE)[0],
    )


def test_gradient_of_the_load_balancing_loss(logits_TE):
    expert_T = logits_TE.argmax(dim=1)
    group_T = torch.arange(NUM_TOKENS) % 2

    def loss(logits_TE):
        probs_TE = router_probabilities(logits_TE).probs_TE
        return load_balancing_loss(probs_TE, expert_T, group_T=group_T)

    assert torch.autograd.gradcheck(loss, logits_TE)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shares_of_ranks_add_up_to_the_loss(logits_TE, num_ranks):
    probabilities = router_probabilities(logits_TE)
    probs_TE, logsumexp_T = probabilities.probs_TE, probabilities.logsumexp_T
    expert_T = probs_TE.argmax(dim=1)
    group_T = torch.arange(NUM_TOKENS) // 12
    padding_T = torch.arange(NUM_TOKENS) % 7 == 0
    whole = load_balancing_loss(probs_TE, expert_T, group_T=group_T, padding_T=padding_T)
    whole = whole + router_z_loss(logits_TE, padding_T=padding_T)

    counts_GE = count_tokens(
        expert_T, num_experts=NUM_EXPERTS, num_groups=2, group_T=group_T, padding_T=padding_T
    )
    # Ranks hold unequal numbers of tokens, the last with three ranks none.
    bounds = [*[0, 9, NUM_TOKENS][:num_ranks], NUM_TOKENS]
    shares = 0.0
    for first, last in pairwise(bounds):
        mine = slice(first, last)
        shares += load_balancing_share(
            probs_TE[mine], counts_GE, group_T=group_T[mine], padding_T=padding_T[mine]
        )
        shares += router_z_share(
            logsumexp_T[mine], padding_T=padding_T[mine], num_tokens=(~padding_T).sum()
        )
    torch.testing.assert_close(shares, whole)
    torch.testing.assert_close(
        torch.autograd.grad(shares, logits_TE, retain_graph=True)[0],
        torch.autograd.grad(whole, logits_TE)[0],
    )


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_no_real_token_costs_nothing_and_has_a_gradient_of_zero(num_tokens):
    logits_TE = torch.randn(num_tokens, 4, requires_grad=True)
    padding_T = torch.ones(num_tokens, dtype=torch.bool)
    group_T = torch.zeros(num_tokens, dtype=torch.int64)
    expert_T = torch.zeros(num_tokens, dtype=torch.int64)
    loss = load_balancing_loss(
        router_probabilities(logits_TE).probs_TE, expert_T, group_T=group_T, padding_T=padding_T
    ) + router_z_loss(logits_TE, padding_T=padding_T)
    assert loss.item() == 0.0
    loss.backward()
    assert not logits_TE.grad.any()


def test_z_loss_follows_its_formula(logits_TE):
    padding_T = torch.arange(NUM_TOKENS) % 3 == 1
    expected = logits_TE[~padding_T].exp().sum(dim=1).log().square().mean()
    torch.testing.assert_close(router_z_loss(logits_TE, padding_T=padding_T), expected)
    torch.testing.assert_close(
        router_z_share(router_probabilities(logits_TE).logsumexp_T, padding_T=padding_T), expected
    )
    assert router_z_share(logits_TE.logsumexp(1), num_tokens=2 * NUM_TOKENS).item() == (
        pytest.approx(router_z_loss(logits_TE).item() / 2)
    )


def test_float32_is_accurate_for_many_tokens():
    torch.manual_seed(0)
    logits_TE = torch.randn(20_000, 8)
    expert_T = logits_TE.argmax(dim=1)
    exact = load_balancing_loss(logits_TE.double().softmax(1), expert_T).item()
    assert load_balancing_loss(logits_TE.softmax(1), expert_T).item() == pytest.approx(
        exact, rel=1e-6
    )


@pytest.mark.parametrize(
    ("probs_TE", "expert_T", "message"),
    [
        (torch.zeros(4, 2).half(), torch.zeros(4).long(), r"float32, got torch.float16"),
        (torch.zeros(4, 2), torch.zeros(5).long(), r"one expert a token, shape \(4,\), got \(5,\)"),
    ],
)
def test_bad_input_is_named(probs_TE, expert_T, message):
    with pytest.raises(ConfigError, match=message):
        load_balancing_loss(probs_TE, expert_T)
