"""Sums that a router records, and what a report makes of them."""

from dataclasses import replace

import pytest
import torch

from megatron_switch.moe.metrics.routing_counts import (
    CAPACITY_FACTOR_SWEEP,
    RoutingReport,
    row_width,
    statistics_row,
)
from megatron_switch.moe.routing import route

E = 4
PLACES = {
    "sweep_capacities": tuple(range(1, 1 + len(CAPACITY_FACTOR_SWEEP))),
    "counts_micro_batch": True,
}


def row_of(expert_T, *, capacity=2, padding_T=None, balance=1.0, z=0.5, **places):
    """Return the row of tokens that choose the given experts."""
    logits_TE = 9.0 * torch.nn.functional.one_hot(torch.tensor(expert_T), E).float()
    return statistics_row(
        route(logits_TE, capacity=capacity, padding_T=padding_T),
        balance_share=torch.tensor(balance, requires_grad=True),
        z_share=torch.tensor(z),
        **(PLACES | places),
    )


def test_row_holds_sums():
    padding_T = torch.tensor([False] * 7 + [True])
    row = row_of([0, 0, 0, 0, 1, 1, 3, 2], padding_T=padding_T)
    assert row.dtype == torch.float64
    assert not row.requires_grad
    assert row.shape == (row_width(E),)
    losses, counts, sweep, load = torch.split(row, [2, 3, len(CAPACITY_FACTOR_SWEEP), E])
    assert losses.tolist() == [1.0, 0.5]
    assert counts.tolist() == [1, 7, 2]  # micro-batches, tokens, dropped
    # At 1, 2, 3, ... slots: 3 + 1, 2, 1, then none too many.
    assert sweep.tolist() == [4, 2, 1, 0, 0, 0, 0, 0]
    assert load.tolist() == [4, 2, 0, 1]


def test_report_divides_sums_of_micro_batches_and_ranks():
    # Layer 2: two micro-batches, the first one shared by two ranks. Layer 4: one, balanced.
    rows = torch.stack(
        [
            row_of([0, 0, 0], balance=0.5, z=1.0)
            + row_of([0, 1], balance=1.5, z=2.0, counts_micro_batch=False)
            + row_of([2, 2, 2, 2, 2], balance=4.0, z=1.0),
            row_of([0, 1, 2, 3]),
        ]
    )
    report = RoutingReport.of(rows, (2, 4))
    assert report.layer_numbers == (2, 4)
    assert report.balance_loss_L.tolist() == [3.0, 1.0]
    assert report.z_loss_L.tolist() == [2.0, 0.5]
    assert report.tokens_L.tolist() == [10, 4]
    assert report.dropped_L.tolist() == [4 / 10, 0.0]
    assert report.load_LE.tolist() == [[0.4, 0.1, 0.5, 0.0], [0.25] * 4]
    assert report.sweep_dropped_LF[0].tolist() == [0.6, 0.4, 0.2, 0.1, 0, 0, 0, 0]

    assert report.load_ratio_L.tolist() == [2.0, 1.0]
    assert report.scalars() == {
        "load_balancing_loss": 2.0,
        "z_loss": 1.25,
        "dropped": 0.2,
        "expert_load_max_over_mean": 2.0,
        "experts_below_half": 2.0,  # 1 of 10 and 0 of 10, where fair would be 2.5
        "dead_experts": 1.0,
    }
    assert report.per_layer() == {
        "load_balancing_loss": [3.0, 1.0],
        "z_loss": [2.0, 0.5],
        "dropped": [0.4, 0.0],
        "expert_load_max_over_mean": [2.0, 1.0],
    }


def test_exactly_half_is_not_below_half():
    report = RoutingReport.of(row_of([0, 1, 1, 2, 2, 3, 3, 3])[None], (1,))
    assert report.experts_below_half == 0
    assert report.dead_experts == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_report_of_nothing_is_finite(num_layers):
    rows = torch.zeros(num_layers, row_width(E), dtype=torch.float64)
    report = RoutingReport.of(rows, tuple(range(num_layers)))
    assert report.scalars()["load_balancing_loss"] == report.scalars()["dropped"] == 0.0
    assert report.load_ratio == 0.0
    assert report.dead_experts == num_layers * E


def test_padding_counts_nowhere():
    padding_T = torch.tensor([False, False, True, True])
    rows = [row_of([0, 1, 1, 0], padding_T=padding_T), row_of([0, 1])]
    assert torch.equal(*rows)
    reports = [replace(RoutingReport.of(row[None], (1,)), layer_numbers=()) for row in rows]
    assert reports[0].scalars() == reports[1].scalars()


def test_two_stacks_are_reported_apart_and_together():
    rows = torch.stack(
        [
            row_of([0, 0, 0], balance=0.5),
            row_of([0, 1, 2, 3], balance=1.5),
            row_of([1, 1, 1, 1, 2], balance=4.0),
        ]
    )
    report = RoutingReport.of(rows, (2, 4, 6), encoder_layers=4)
    stacks = report.stacks()
    assert list(stacks) == ["encoder", "decoder"]
    assert [part.layer_numbers for part in stacks.values()] == [(2, 4), (6,)]
    assert stacks["encoder"].balance_loss_L.tolist() == [0.5, 1.5]
    assert torch.equal(stacks["decoder"].load_LE, report.load_LE[2:])
    assert report.layer_names() == ("encoder_layer_1", "encoder_layer_3", "decoder_layer_1")
    scalars = report.scalars()
    assert scalars["load_balancing_loss"] == 2.0
    assert scalars["encoder_load_balancing_loss"] == 1.0
    assert scalars["decoder_load_balancing_loss"] == 4.0
    assert scalars["encoder_dropped"] == pytest.approx(1 / 6)
    assert scalars["decoder_dropped"] == pytest.approx(2 / 5)
    assert scalars["decoder_dead_experts"] == 2


def test_one_stack_has_no_parts():
    report = RoutingReport.of(torch.stack([row_of([0, 1])]), (2,))
    assert report.stacks() == {}
    assert report.layer_names() == ("layer_1",)
    assert not any(name.startswith(("encoder", "decoder")) for name in report.scalars())


def test_a_stack_without_experts_is_left_out():
    report = RoutingReport.of(torch.stack([row_of([0, 1])]), (2,), encoder_layers=4)
    assert list(report.stacks()) == ["encoder"]
