"""The warning must come when drops are the router's, say what would help, and come once."""

import torch

from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, RoutingReport
from megatron_switch.training.logs.drop_watch import CapacityFacts, DropWatch

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


def _report(dropped, sweep):
    return RoutingReport(
        layer_numbers=(2, 4),
        balance_loss_L=torch.ones(2),
        z_loss_L=torch.ones(2),
        tokens_L=torch.full((2,), 1024.0),
        dropped_L=torch.tensor(dropped),
        sweep_dropped_LF=torch.tensor([sweep, sweep]),
        load_LE=torch.full((2, 8), 0.125),
    )


def _said(facts, report, iterations, warm_up=10):
    said = []
    watch = DropWatch(facts, warm_up=warm_up, say=said.append)
    for iteration in range(1, iterations + 1):
        watch(report, iteration)
    return said


SWEEP_RATES = [0.2, 0.15, 0.12, 0.10, 0.03, 0.008, 0.0, 0.0]


def test_warns_once_with_the_smallest_factor_that_helps_and_its_cost():
    said = _said(FACTS, _report([0.08, 0.12], SWEEP_RATES), 200)
    assert len(said) == 1
    (text,) = said
    assert "10.0% of tokens were dropped" in text
    assert "layer 4 12.0%, layer 2 8.0%" in text
    assert "--moe-expert-capacity-factor 2.0 would drop 0.8%" in text
    # (2.0 - 1.25) * 512 rows * 2048 bytes * 2 layers = 1.5 MiB
    assert "1.5 MiB" in text
    assert "before you make the batch smaller" in text


def test_packed_rows_cost_only_the_tokens_that_are_kept_more():
    facts = CapacityFacts(**{**vars(FACTS), "padded": False})
    (text,) = _said(facts, _report([0.10, 0.10], SWEEP_RATES), 100)
    # (0.10 - 0.008) * 512 rows * 2048 bytes * 2 layers = 0.184 MiB
    assert "0.2 MiB" in text


def test_says_nothing_during_warm_up_at_low_drop_or_after_it_fell():
    assert _said(FACTS, _report([0.5, 0.5], SWEEP_RATES), 59, warm_up=10) == []
    assert _said(FACTS, _report([0.04, 0.04], SWEEP_RATES), 200) == []


def test_says_nothing_where_a_balanced_router_would_drop_as_much():
    # 16 tokens, 16 experts, one slot: a balanced router drops 35 % of them.
    facts = CapacityFacts(**{**vars(FACTS), "group_tokens": 16, "num_experts": 16, "capacity": 1})
    assert _said(facts, _report([0.36, 0.36], SWEEP_RATES), 200) == []


def test_names_the_loss_coefficient_where_no_factor_is_enough():
    (text,) = _said(FACTS, _report([0.4, 0.4], [0.4] * len(CAPACITY_FACTOR_SWEEP)), 100)
    assert "Even --moe-expert-capacity-factor 4.0 would drop 40.0%" in text
    assert "Raise --moe-aux-loss-coeff: the load is too uneven for a higher capacity" in text
