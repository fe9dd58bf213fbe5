"""The advice names the smallest capacity that helps, and its cost, by arithmetic."""

from dataclasses import replace

import pytest

from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP
from megatron_switch.training.logs.capacity_facts import CapacityFacts, capacity_advice

PADDED = CapacityFacts(
    factor=1.25,
    group_tokens=1024,
    capacity=160,
    num_experts=8,
    rank_tokens=512,
    bytes_per_row=2048,
    rank_sparse_layers=2,
    padded=True,
)
SWEEP = [0.2, 0.15, 0.12, 0.10, 0.03, 0.008, 0.0, 0.0]


@pytest.mark.parametrize(
    ("facts", "flag", "cost"),
    [
        # (2.0 - 1.25) * 512 rows * 2048 bytes * 2 layers
        (PADDED, "--moe-expert-capacity-factor 2.0", "1.5 MiB"),
        # Packed rows are those of the tokens that are kept more: (0.10 - 0.008) * 512
        (replace(PADDED, padded=False), "--moe-expert-capacity-factor 2.0", "0.2 MiB"),
        (replace(PADDED, absolute=True), "--switch-capacity 256", "1.5 MiB"),
    ],
)
def test_the_smallest_factor_that_helps_and_its_cost(facts, flag, cost):
    text = capacity_advice(facts, 0.10, SWEEP)
    assert text.startswith(f"{flag} would drop 0.8% and cost about {cost} more")


def test_where_no_factor_is_enough_none_is_advised():
    text = capacity_advice(PADDED, 0.4, [0.4] * len(CAPACITY_FACTOR_SWEEP))
    assert text == (
        "even --moe-expert-capacity-factor 4.0 would drop 40.0%, so the load is too uneven for a "
        "higher capacity factor to help"
    )
    above = replace(PADDED, factor=5.0)
    assert capacity_advice(above, 0.4, SWEEP).startswith("the load is too uneven")
