"""Laws of Switch routing that hold for every batch, tried on random ones.

Logits are small integers half of the time, so that ties and full experts are common; sizes include
no token, one token, one expert, capacities of zero and above the token count.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_switch.moe.losses import load_balancing_loss, load_balancing_share
from megatron_switch.moe.reference import switch_layer
from megatron_switch.moe.routing import (
    count_tokens,
    route,
    route_probs,
    router_probabilities,
    shift_slots,
)

ORDERS = ["first_come", "probability"]


@dataclass(frozen=True)
class Batch:
    """One rank's tokens, and the capacity they are routed with."""

    logits_TE: torch.Tensor
    group_T: torch.Tensor
    padding_T: torch.Tensor
    num_groups: int
    capacity: int

    @property
    def num_tokens(self):
        return self.logits_TE.shape[0]

    @property
    def num_experts(self):
        return self.logits_TE.shape[1]

    def route(self, **options):
        return route(
            self.logits_TE,
            capacity=self.capacity,
            group_T=self.group_T,
            padding_T=self.padding_T,
            **options,
        )


def make_batch(num_tokens, num_experts, num_groups, capacity, padding, seed, integers, bias=0.0):
    random = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, num_experts, generator=random)
    logits_TE[:, 0] += bias
    return Batch(
        logits_TE=logits_TE.round() if integers else logits_TE,
        group_T=torch.randint(num_groups, (num_tokens,), generator=random),
        padding_T=torch.rand(num_tokens, generator=random) < padding,
        num_groups=num_groups,
        capacity=capacity,
    )


batches = st.builds(
    make_batch,
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    num_groups=st.integers(1, 4),
    capacity=st.integers(0, 45),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
    integers=st.booleans(),
)


def every_corner(test):
    """Add the corners that random batches might miss."""
    for corner in (
        make_batch(1, 1, 1, 1, 0.0, 0, True),  # one token, one expert
        make_batch(7, 3, 1, 100, 0.0, 1, False),  # more slots than tokens
        make_batch(9, 4, 2, 2, 0.0, 2, False, bias=100.0),  # all tokens to one expert
        make_batch(6, 4, 2, 0, 0.0, 3, False),  # no token kept
        make_batch(5, 4, 1, 3, 1.0, 4, False),  # nothing but padding
        make_batch(0, 4, 1, 3, 0.0, 5, False),  # no token
    ):
        test = example(batch=corner)(test)
    return settings(max_examples=30, deadline=None)(test)


def slots_by_hand(batch, expert_T, priority):
    """Hand out slots to one token after the other, in the order of ``priority``."""
    taken = defaultdict(int)
    slots = [-1] * batch.num_tokens
    for row in sorted(range(batch.num_tokens), key=priority):
        if not batch.padding_T[row]:
            place = (batch.group_T[row].item(), expert_T[row].item())
            slots[row] = taken[place]
            taken[place] += 1
    return slots


@every_corner
@given(batch=batches)
def test_slots_are_handed_out_one_after_the_other(batch):
    routing = batch.route()
    probs_TE = batch.logits_TE.softmax(dim=1)
    for row, expert in enumerate(routing.expert_T.tolist()):
        values = probs_TE[row].tolist()
        assert expert == values.index(max(values))
        assert routing.gate_T[row].item() == max(values)
    assert routing.slot_T.tolist() == slots_by_hand(batch, routing.expert_T, lambda row: row)

    by_probability = batch.route(order="probability")
    assert torch.equal(by_probability.expert_T, routing.expert_T)
    gate = routing.gate_T.tolist()
    assert by_probability.slot_T.tolist() == slots_by_hand(
        batch, routing.expert_T, lambda row: (-gate[row], row)
    )


@pytest.mark.parametrize("order", ORDERS)
@every_corner
@given(batch=batches)
def test_kept_tokens_fill_slots_without_gaps_or_sharing(order, batch):
    routing = batch.route(order=order)
    kept_T = routing.kept_T
    assert torch.equal(kept_T, ~batch.padding_T & (routing.slot_T < batch.capacity))
    counts_GE = count_tokens(
        routing.expert_T,
        num_experts=batch.num_experts,
        num_groups=batch.num_groups,
        group_T=batch.group_T,
        padding_T=batch.padding_T,
    )
    assert torch.equal(counts_GE.sum(dim=0), routing.tokens_per_expert_E)
    assert counts_GE.sum() == (~batch.padding_T).sum()
    for group in range(batch.num_groups):
        for expert in range(batch.num_experts):
            mine = (batch.group_T == group) & (routing.expert_T == expert) & ~batch.padding_T
            count = counts_GE[group, expert].item()
            assert sorted(routing.slot_T[mine].tolist()) == list(range(count))
            assert (mine & kept_T).sum() == min(count, batch.capacity)


@every_corner
@given(batch=batches)
def test_a_later_token_never_evicts_an_earlier_one(batch):
    whole = batch.route()
    for length in range(batch.num_tokens):
        prefix = route(
            batch.logits_TE[:length],
            capacity=batch.capacity,
            group_T=batch.group_T[:length],
            padding_T=batch.padding_T[:length],
        )
        assert torch.equal(prefix.slot_T, whole.slot_T[:length])
        assert torch.equal(prefix.kept_T, whole.kept_T[:length])


@every_corner
@given(batch=batches)
def test_ranks_that_know_what_came_before_route_like_one_rank(batch):
    """Split at random places, some parts empty; each part adds the counts of those before it."""
    whole = batch.route()
    bounds = torch.randint(batch.num_tokens + 1, (3,), generator=torch.Generator().manual_seed(1))
    bounds = [0, *sorted(bounds.tolist()), batch.num_tokens]
    probs_TE = router_probabilities(batch.logits_TE).probs_TE
    earlier_GE = torch.zeros(batch.num_groups, batch.num_experts, dtype=torch.int64)
    parts = []
    for first, last in pairwise(bounds):
        mine = {"group_T": batch.group_T[first:last], "padding_T": batch.padding_T[first:last]}
        # A rank does not know the whole group's capacity while it numbers its own tokens.
        local = route_probs(probs_TE[first:last], capacity=0, **mine)
        parts.append(
            shift_slots(
                local, earlier_GE=earlier_GE, group_T=mine["group_T"], capacity=batch.capacity
            )
        )
        earlier_GE = earlier_GE + count_tokens(
            local.expert_T, num_experts=batch.num_experts, num_groups=batch.num_groups, **mine
        )
    assert torch.equal(torch.cat([part.slot_T for part in parts]), whole.slot_T)
    assert torch.equal(torch.cat([part.kept_T for part in parts]), whole.kept_T)
    assert torch.equal(sum(part.tokens_per_expert_E for part in parts), whole.tokens_per_expert_E)
    assert all(part.capacity == whole.capacity for part in parts)


@every_corner
@given(batch=batches)
def test_the_load_balancing_loss_is_the_mean_over_groups_in_float64(batch):
    logits_TE = batch.logits_TE.double().requires_grad_()
    probs_TE = logits_TE.softmax(dim=1)
    expert_T = batch.route().expert_T
    terms = []
    for group in range(batch.num_groups):
        mine = (batch.group_T == group) & ~batch.padding_T
        if mine.any():
            fraction_E = torch.bincount(expert_T[mine], minlength=batch.num_experts) / mine.sum()
            terms.append(batch.num_experts * (fraction_E * probs_TE[mine].mean(dim=0)).sum())
    expected = torch.stack(terms).mean() if terms else probs_TE.sum() * 0

    groups = {"group_T": batch.group_T, "padding_T": batch.padding_T}
    actual = load_balancing_loss(router_probabilities(logits_TE).probs_TE, expert_T, **groups)
    counts_GE = count_tokens(
        expert_T, num_experts=batch.num_experts, num_groups=batch.num_groups, **groups
    )
    assert torch.equal(load_balancing_share(probs_TE, counts_GE, **groups), actual)
    torch.testing.assert_close(actual, expected, check_dtype=False)
    torch.testing.assert_close(
        torch.autograd.grad(actual, logits_TE)[0], torch.autograd.grad(expected, logits_TE)[0]
    )


@every_corner
@given(batch=batches)
def test_a_layer_made_of_route_equals_the_reference(batch):
    """Values and all gradients; rows that are dropped or padding are exactly zero."""
    width, hidden = 3, 4
    random = torch.Generator().manual_seed(batch.num_tokens)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_()

    x_TD, router_ED = leaf(batch.num_tokens, width), leaf(batch.num_experts, width)
    wi_EFD = leaf(batch.num_experts, hidden, width)
    wo_EDF = leaf(batch.num_experts, width, hidden)
    limits = {"capacity": batch.capacity, "group_T": batch.group_T, "padding_T": batch.padding_T}

    routing = route(x_TD @ router_ED.T, **limits)
    hidden_TF = torch.relu(torch.einsum("tfd,td->tf", wi_EFD[routing.expert_T], x_TD))
    y_TD = torch.einsum("tdf,tf->td", wo_EDF[routing.expert_T], hidden_TF)
    actual_TD = (routing.gate_T.unsqueeze(1) * y_TD).where(routing.kept_T.unsqueeze(1), 0.0)
    expected_TD = switch_layer(x_TD, router_ED, wi_EFD, wo_EDF, **limits)

    torch.testing.assert_close(actual_TD, expected_TD)
    assert not expected_TD[~routing.kept_T].any()
    weight_TD = torch.randn(expected_TD.shape, dtype=torch.float64, generator=random)
    if batch.num_tokens:
        leaves = (x_TD, router_ED, wi_EFD, wo_EDF)
        for actual, expected in zip(
            torch.autograd.grad((actual_TD * weight_TD).sum(), leaves),
            torch.autograd.grad((expected_TD * weight_TD).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected)
