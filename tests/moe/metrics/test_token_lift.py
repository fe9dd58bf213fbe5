"""Lifts of a routing small enough to count by hand."""

import torch

from megatron_switch.moe.metrics.token_lift import TokenLift, highest_lifts


def test_lift_is_how_much_more_often_a_token_goes_to_an_expert():
    token_T = torch.tensor([7, 7, 7, 7, 3, 3, 9, 9])
    expert_T = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])
    first, second = highest_lifts(token_T, expert_T, num_experts=2, num_tokens=5, min_count=2)
    # Expert 0 gets 4 of 8 tokens: token 7 goes there 3 times of 4, token 9 as often as any.
    assert first == [TokenLift(token=7, lift=1.5, share=0.75, count=3)]
    assert second == [TokenLift(token=3, lift=2.0, share=1.0, count=2)]


def test_rare_tokens_and_idle_experts_give_nothing():
    token_T, expert_T = torch.tensor([1, 2, 2, 2]), torch.tensor([0, 1, 1, 1])
    lifts = highest_lifts(token_T, expert_T, num_experts=3, num_tokens=5, min_count=2)
    assert [[one.token for one in expert] for expert in lifts] == [[], [2], []]


def test_equal_lifts_are_ordered_by_count_and_cut():
    token_T = torch.tensor([1, 1, 2, 2, 2, 3, 3, 4])
    expert_T = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    (first, _) = highest_lifts(token_T, expert_T, num_experts=2, num_tokens=1, min_count=1)
    assert [one.token for one in first] == [2]


def test_tokens_that_always_go_to_one_expert_are_ordered_by_count_despite_rounding():
    # Computed as count * N / (n(t) * n(e)), equal lifts of such counts differ in the last bit.
    counts = [3, 7, 11, 13, 29, 41]
    token_T = torch.cat(
        [torch.full((count,), count) for count in counts] + [torch.zeros(23)]
    ).long()
    expert_T = (token_T == 0).long()
    (first, _) = highest_lifts(token_T, expert_T, num_experts=2, num_tokens=9, min_count=1)
    assert [one.token for one in first] == counts[::-1]
    assert {one.share for one in first} == {1.0}
