"""A warning comes when routing is the router's fault, names the cause first, and comes once."""

from dataclasses import replace

import pytest
import torch

from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.training.logs.balance_settings import BalanceSettings
from megatron_switch.training.logs.capacity_facts import CapacityFacts
from megatron_switch.training.logs.routing_watch import RoutingWatch

FACTS = CapacityFacts(
    factor=1.25,
    group_tokens=1024,
    capacity=160,
    num_experts=8,
    rank_tokens=512,
    bytes_per_row=2048,
    rank_sparse_layers=2,
    padded=True,
)
SETTINGS = BalanceSettings(coefficient=0.01, init_scale="0.1", lr=1e-3, warm_up=True)
SWEEP_RATES = [0.2, 0.15, 0.12, 0.10, 0.03, 0.008, 0.0, 0.0]
EVEN = [0.125] * 8


def routed(dropped, sweep=SWEEP_RATES, load=EVEN, tokens=1024.0):
    """Return a report of two layers; the loads are those of the second."""
    return RoutingReport(
        layer_numbers=(2, 4),
        balance_loss_L=torch.ones(2),
        z_loss_L=torch.ones(2),
        tokens_L=torch.full((2,), tokens),
        dropped_L=torch.tensor(dropped),
        sweep_dropped_LF=torch.tensor([sweep, sweep]),
        load_LE=torch.tensor([[1 / len(load)] * len(load), load]),
    )


def warnings_of(report, iterations, *, facts=FACTS, settings=SETTINGS, warm_up=10):
    """Return iteration and text of each warning of a run that routes alike all the time."""
    found = []
    watch = RoutingWatch(
        facts,
        settings,
        warm_up=warm_up,
        warn=lambda text, iteration: found.append((iteration, text)),
    )
    for iteration in range(1, iterations + 1):
        watch(report, iteration)
    return found


def test_high_drops_after_warm_up_are_reported_once_with_causes_in_order():
    ((iteration, text),) = warnings_of(routed([0.08, 0.12]), 200)
    assert iteration == 60
    assert text == (
        "Warning: 10.0% of tokens were dropped over the last 50 iterations (iteration 60; worst: "
        "layer 4 12.0%, layer 2 8.0%), more than the 0.0% of a balanced router at capacity factor "
        "1.25. In this order: 1. raise --moe-aux-loss-coeff, which is 0.01 (0.1 is strong). 2. "
        "lower --lr, which is 0.001, or lengthen its warm-up. 3. --moe-expert-capacity-factor 2.0 "
        # (2.0 - 1.25) * 512 rows * 2048 bytes * 2 layers = 1.5 MiB
        "would drop 0.8% and cost about 1.5 MiB more a rank and micro-batch; raise it before you "
        "make the batch smaller, because a smaller batch makes drops more frequent, not rarer."
    )


def test_without_a_balancing_loss_no_capacity_is_advised():
    settings = replace(SETTINGS, coefficient=0.0)
    ((_, text),) = warnings_of(routed([0.08, 0.12]), 200, settings=settings)
    assert text.endswith(
        "Nothing balances the load, because --moe-aux-loss-coeff is 0: set it to 0.01. Judge the "
        "capacity after that, not before."
    )
    assert "--moe-expert-capacity-factor" not in text


def test_nothing_is_said_during_warm_up_at_low_drop_or_after_it_fell():
    assert warnings_of(routed([0.5, 0.5]), 59) == []
    assert warnings_of(routed([0.04, 0.04]), 200) == []


def test_nothing_is_said_where_a_balanced_router_would_drop_as_much():
    # 16 tokens, 16 experts, one slot: a balanced router drops 35 % of them.
    facts = replace(FACTS, group_tokens=16, num_experts=16, capacity=1)
    assert warnings_of(routed([0.36, 0.36]), 200, facts=facts) == []


def onto_few(num_experts, busiest, dead):
    """Return loads: one expert takes a share, some take nothing, the others share the rest."""
    others = num_experts - dead - 1
    return [busiest, *[(1 - busiest) / others] * others, *[0.0] * dead]


def test_a_collapse_is_reported_at_the_tenth_iteration():
    load = onto_few(64, 47 / 64, 27)
    found = warnings_of(routed([0.68, 0.68], load=load), 200, warm_up=300)
    assert found == [
        (
            10,
            "Warning: at iteration 10 most tokens go to a few experts: 68.0% of tokens are "
            "dropped, and in layer 4 the busiest of 64 experts receives 73% of the tokens and 27 "
            "receive none (means of 5 iterations). This may pass while the balancing loss acts. "
            "If it does not: lower --lr, which is 0.001, or lengthen its warm-up; then raise "
            "--moe-aux-loss-coeff, which is 0.01 (0.1 is strong). A higher capacity factor does "
            "not help here.",
        )
    ]


def test_a_collapse_without_a_balancing_loss_names_that_alone():
    settings = replace(SETTINGS, coefficient=0.0)
    found = warnings_of(routed([0.68, 0.68]), 12, settings=settings)
    assert found[0][1].endswith(
        "(means of 5 iterations). Nothing balances the load, because --moe-aux-loss-coeff is 0: "
        "set it to 0.01."
    )


@pytest.mark.parametrize(
    ("report", "collapsed"),
    [
        (routed([0.64, 0.64]), False),
        (routed([0.66, 0.66]), True),
        (routed([0.1, 0.1], load=onto_few(64, 0.69, 0)), False),
        (routed([0.1, 0.1], load=onto_few(64, 0.71, 0)), True),
        (routed([0.1, 0.1], load=onto_few(64, 0.1, 25)), False),
        (routed([0.1, 0.1], load=onto_few(64, 0.1, 26)), True),
        # With fewer tokens experts stay empty by chance.
        (routed([0.1, 0.1], load=onto_few(64, 0.1, 26), tokens=1000.0), False),
        (routed([0.1, 0.1], load=[0.9, 0.1]), False),  # of two experts one is always busy
    ],
)
def test_what_counts_as_a_collapse(report, collapsed):
    assert bool(warnings_of(report, 20)) == collapsed


def test_drops_of_a_balanced_router_are_no_collapse():
    # 16 tokens, 64 experts, a quarter of a slot each: nearly all drops are for lack of slots.
    facts = replace(FACTS, group_tokens=1024, num_experts=64, capacity=4)
    assert facts.balanced_drop_rate() > 0.6
    assert warnings_of(routed([0.75, 0.75]), 20, facts=facts) == []
