"""The balanced drop rate is an expectation, so it must equal an enumerated one."""

from fractions import Fraction
from itertools import product

import pytest

from megatron_switch.planner.cost.drop_rate import balanced_drop_rate


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "capacity"),
    [(6, 2, 3), (5, 3, 1), (4, 4, 1), (7, 1, 3), (3, 2, 3)],
)
def test_equals_the_mean_over_every_possible_routing(num_tokens, num_experts, capacity):
    dropped = Fraction(0)
    for experts in product(range(num_experts), repeat=num_tokens):
        loads = [experts.count(expert) for expert in range(num_experts)]
        dropped += sum(max(0, load - capacity) for load in loads)
    expected = dropped / num_tokens / num_experts**num_tokens
    assert balanced_drop_rate(num_tokens, num_experts, capacity) == pytest.approx(float(expected))


def test_no_token_no_drop():
    assert balanced_drop_rate(0, 8, 4) == 0.0
