"""Choice, slots and counts in small cases; :mod:`test_properties` has the general laws."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron_switch.errors import ConfigError
from megatron_switch.moe.losses import load_balancing_share, router_z_share
from megatron_switch.moe.routing import (
    assign_slots,
    count_tokens,
    route,
    route_probs,
    router_probabilities,
    shift_slots,
)


def logits_for(experts, num_experts):
    return torch.nn.functional.one_hot(torch.tensor(experts), num_experts).float()


@pytest.mark.parametrize("num_experts", [1, 2, 8, 33])
def test_ties_go_to_the_lowest_expert(num_experts):
    routing = route(torch.zeros(5, num_experts), capacity=2)
    assert routing.expert_T.tolist() == [0] * 5
    assert routing.gate_T.tolist() == pytest.approx([1 / num_experts] * 5)
    assert routing.slot_T.tolist() == [0, 1, 2, 3, 4]
    assert routing.kept_T.tolist() == [True, True, False, False, False]
    tied_late = torch.zeros(1, num_experts + 2)
    tied_late[0, -2:] = 7.0
    assert route(tied_late, capacity=1).expert_T.item() == num_experts


def test_padding_takes_no_slot_and_is_never_kept():
    padding_T = torch.tensor([True, False, False, True, False])
    routing = route(torch.zeros(5, 3), capacity=2, padding_T=padding_T)
    assert routing.slot_T.tolist() == [-1, 0, 1, -1, 2]
    assert routing.kept_T.tolist() == [False, True, True, False, False]
    assert routing.tokens_per_expert_E.tolist() == [3, 0, 0]


def test_groups_need_be_neither_small_nor_consecutive():
    group_T = torch.tensor([10**12, 3, 10**12, 3, 0], dtype=torch.int64)
    routing = route(torch.zeros(5, 4), capacity=1, group_T=group_T)
    assert routing.slot_T.tolist() == [0, 0, 1, 1, 0]
    assert route(torch.zeros(2, 4), capacity=1, group_T=torch.tensor([5, 5]).int()).slot_T[1] == 1


def test_order_by_probability_prefers_larger_gates_then_earlier_tokens():
    probs_TE = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.3, 0.7]])
    routing = route_probs(probs_TE, capacity=2, order="probability")
    assert routing.slot_T.tolist() == [2, 0, 3, 1, 0]
    assert routing.kept_T.tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("order", ["first_come", "probability"])
def test_no_tokens_take_no_slots(order):
    routing = route(
        torch.zeros(0, 4),
        capacity=3,
        group_T=torch.zeros(0, dtype=torch.int64),
        padding_T=torch.zeros(0, dtype=torch.bool),
        order=order,
    )
    assert routing.slot_T.shape == routing.gate_T.shape == routing.kept_T.shape == (0,)
    assert routing.tokens_per_expert_E.tolist() == [0] * 4


def test_dtypes_are_those_promised():
    routing = route(torch.randn(6, 3), capacity=2)
    assert routing.expert_T.dtype == routing.slot_T.dtype == torch.int64
    assert routing.tokens_per_expert_E.dtype == torch.int64
    assert routing.gate_T.dtype == torch.float32
    assert routing.kept_T.dtype == torch.bool
    assert route(torch.randn(6, 3).double(), capacity=2).gate_T.dtype == torch.float64


def test_capacity_of_zero_keeps_nothing():
    assert not route(torch.randn(6, 3), capacity=0).kept_T.any()


def test_softmax_and_logsumexp_have_the_gradients_of_torch():
    torch.manual_seed(0)
    logits_TE = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    probabilities = router_probabilities(logits_TE)
    torch.testing.assert_close(probabilities.probs_TE, logits_TE.softmax(1))
    torch.testing.assert_close(probabilities.logsumexp_T, logits_TE.logsumexp(1))

    def both(logits_TE):
        result = router_probabilities(logits_TE)
        return result.probs_TE, result.logsumexp_T

    assert torch.autograd.gradcheck(both, logits_TE)
    assert torch.autograd.gradgradcheck(both, logits_TE)


def test_the_gate_carries_the_gradient_of_the_full_softmax():
    torch.manual_seed(0)
    logits_TE = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight_T = torch.randn(7, dtype=torch.float64)
    (route(logits_TE, capacity=1).gate_T * weight_T).sum().backward()
    expected_TE = torch.autograd.grad((logits_TE.softmax(1).amax(1) * weight_T).sum(), logits_TE)[0]
    torch.testing.assert_close(logits_TE.grad, expected_TE)


def test_shift_slots_adds_earlier_tokens_and_leaves_padding_alone():
    padding_T = torch.tensor([False, False, True, False, False])
    group_T = torch.tensor([0, 0, 0, 1, 1])
    here = route(logits_for([0, 1, 1, 0, 0], 2), capacity=9, group_T=group_T, padding_T=padding_T)
    earlier_GE = torch.tensor([[2, 0], [1, 5]], dtype=torch.int32)
    there = shift_slots(here, earlier_GE=earlier_GE, group_T=group_T, capacity=2)
    assert there.slot_T.tolist() == [2, 0, -1, 1, 2]
    assert there.kept_T.tolist() == [False, True, False, True, False]
    assert there.capacity == 2
    assert there.slot_T.dtype == torch.int64
    assert there.tokens_per_expert_E.tolist() == here.tokens_per_expert_E.tolist() == [3, 1]


def test_count_tokens_by_group():
    counts_GE = count_tokens(
        torch.tensor([0, 1, 1, 2, 1]),
        num_experts=3,
        num_groups=3,
        group_T=torch.tensor([0, 0, 2, 2, 2]),
        padding_T=torch.tensor([False, False, False, False, True]),
    )
    assert counts_GE.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("order", ["first_come", "probability"])
def test_nothing_reads_a_value_or_depends_on_one(order):
    """Fake tensors have no values: a host read or a shape that depends on data raises."""
    with FakeTensorMode():
        logits_TE = torch.randn(16, 4, requires_grad=True)
        group_T = torch.zeros(16, dtype=torch.int64)
        padding_T = torch.zeros(16, dtype=torch.bool)
        probabilities = router_probabilities(logits_TE)
        routing = route_probs(
            probabilities.probs_TE, capacity=3, group_T=group_T, padding_T=padding_T, order=order
        )
        counts_GE = count_tokens(
            routing.expert_T, num_experts=4, num_groups=2, group_T=group_T, padding_T=padding_T
        )
        routing = shift_slots(routing, earlier_GE=counts_GE, group_T=group_T, capacity=5)
        balance = load_balancing_share(
            probabilities.probs_TE, counts_GE, group_T=group_T, padding_T=padding_T
        )
        z = router_z_share(probabilities.logsumexp_T, padding_T=padding_T)
        (routing.gate_T.sum() + balance + z).backward()
        assert logits_TE.grad.shape == (16, 4)


@pytest.mark.parametrize("grouped", [False, True])
def test_backward_keeps_the_probabilities_once(grouped):
    """Gate, load-balancing loss and z-loss together keep 4 * T * E bytes and O(T)."""
    num_tokens, num_experts = 512, 64
    group_T = torch.arange(num_tokens) // 128 if grouped else None
    padding_T = torch.arange(num_tokens) % 128 > 120 if grouped else None
    logits_TE = torch.randn(num_tokens, num_experts, requires_grad=True)
    kept_bytes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        probabilities = router_probabilities(logits_TE)
        routing = route_probs(
            probabilities.probs_TE, capacity=9, group_T=group_T, padding_T=padding_T
        )
        counts_GE = count_tokens(
            routing.expert_T,
            num_experts=num_experts,
            num_groups=4 if grouped else 1,
            group_T=group_T,
            padding_T=padding_T,
        )
        balance = load_balancing_share(
            probabilities.probs_TE, counts_GE, group_T=group_T, padding_T=padding_T
        )
        z = router_z_share(probabilities.logsumexp_T, padding_T=padding_T)
        loss = (routing.gate_T.square().sum() + balance) + z
    loss.backward()
    probabilities_bytes = 4 * num_tokens * num_experts
    assert probabilities_bytes <= sum(kept_bytes.values())
    assert sum(kept_bytes.values()) <= probabilities_bytes + 40 * num_tokens


@pytest.mark.parametrize(
    ("logits_TE", "options", "message"),
    [
        (torch.zeros(4), {}, r"shape \(tokens, experts\) .* got \(4,\)\. Flatten"),
        (torch.zeros(4, 0), {}, r"at least one expert, got \(4, 0\)"),
        (torch.zeros(4, 2).bfloat16(), {}, r"float32, got torch.bfloat16.*--moe-router-dtype fp32"),
        (torch.zeros(4, 2), {"capacity": -1}, r"at least 0 slots, got -1\. Set --switch-capacity"),
        (torch.zeros(4, 2), {"order": "random"}, r"--switch-drop-order must be .* got 'random'"),
        (torch.zeros(4, 2), {"group_T": torch.zeros(3).long()}, r"shape \(4,\), got \(3,\)"),
        (torch.zeros(4, 2), {"group_T": torch.zeros(4)}, r"integer a token.*float32"),
        (torch.zeros(4, 2), {"padding_T": torch.zeros(2, 2).bool()}, r"\(4,\), got \(2, 2\)"),
        (torch.zeros(4, 2), {"padding_T": torch.zeros(4)}, r"True for padding.*float32.*polarity"),
    ],
)
def test_bad_input_is_named(logits_TE, options, message):
    with pytest.raises(ConfigError, match=message):
        route(logits_TE, **{"capacity": 2} | options)


def test_assign_slots_without_groups_is_a_count_per_expert():
    assert assign_slots(torch.tensor([2, 0, 2, 2, 0]), num_experts=3).tolist() == [0, 0, 1, 2, 1]
