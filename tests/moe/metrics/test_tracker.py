"""The tracker logs what routers did: once, summed over all ranks, evaluation apart."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from support.layout_case import E, Layout, Part, start_groups
from support.switch_case import LAYER, Case, Oracle, Tracker, build_layer, new_tracker, run_part

from megatron_switch.moe.metrics.routing_counts import row_width
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker, record_routing
from megatron_switch.testing.ranks import run_ranks

LOSSES = ("load_balancing_loss", "z_loss")


class Writer:
    """Remembers what TensorBoard or Weights & Biases would have got."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, iteration):
        self.scalars[name, iteration] = value

    def log(self, scalars, iteration):
        for name, value in scalars.items():
            self.scalars[name, iteration] = value


def uniform_row(balance=1.0, z=0.5, tokens_per_expert=2, dropped=0, num_experts=E):
    """Return the row of one micro-batch of balanced routing."""
    tokens = tokens_per_expert * num_experts
    numbers = [balance, z, 1, tokens, dropped] + [0] * 8 + [tokens_per_expert] * num_experts
    row = torch.tensor(numbers, dtype=torch.float64)
    assert row.shape == (row_width(num_experts),)
    return row


def test_one_report_a_step_and_then_it_is_empty():
    reports = []
    tracker = SwitchMetricsTracker(
        (2, 4), E, on_report=lambda *report: reports.append(report), layer_interval=5
    )
    tracker.record_row(2, uniform_row(balance=1.0, dropped=4), training=True)
    tracker.record_row(2, uniform_row(balance=2.0), training=True)
    tracker.record_row(4, uniform_row(balance=4.0), training=True)
    board, wandb = Writer(), Writer()
    text = tracker.report(0.5, 3, writer=board, wandb_writer=wandb, track_names=["z_loss"])
    assert text == (
        " dropped: 0.1250 | expert load max/mean: 1.00 | experts below half: 0 | dead experts: 0 |"
    )
    assert board.scalars == wandb.scalars
    assert board.scalars == {
        ("load_balancing_loss", 3): 2.75,
        ("z_loss", 3): 0.5,
        ("dropped", 3): 0.125,
        ("expert_load_max_over_mean", 3): 1.0,
        ("experts_below_half", 3): 0.0,
        ("dead_experts", 3): 0.0,
    }
    tracker.report(0.5, 4)
    assert [iteration for _, iteration in reports] == [3, 4]
    assert reports[0][0].balance_loss_L.tolist() == [1.5, 4.0]
    assert reports[1][0].tokens_L.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("flag", "interval"), [(True, 100), (False, 3)])
def test_per_layer_values_carry_megatrons_names(flag, interval):
    tracker = SwitchMetricsTracker((2, 4), E, layer_interval=interval)
    tracker.record_row(4, uniform_row(balance=4.0), training=True)
    board = Writer()
    tracker.report(1.0, 3, writer=board, per_layer_logging=flag)
    assert board.scalars["moe/load_balancing_loss_layer_3", 3] == 4.0  # layers count from 0 here
    assert board.scalars["moe/load_balancing_loss_layer_1", 3] == 0.0
    assert len(board.scalars) == 6 + 4 * 2
    tracker.report(1.0, 4, writer=board)
    assert ("moe/z_loss_layer_1", 4) not in board.scalars


def test_evaluation_and_training_never_mix():
    tracker = Tracker((1,))
    with torch.inference_mode():  # generating may come first
        tracker.record_row(1, uniform_row(balance=9.0, dropped=8), training=False)
    tracker.record_row(1, uniform_row(balance=1.0), training=True)
    tracker.record_row(1, uniform_row(balance=7.0, dropped=8), training=False)
    assert tracker.step().scalars()["load_balancing_loss"] == 1.0
    evaluation = tracker.report_evaluation()
    assert evaluation.dropped == 1.0
    assert evaluation.balance_loss == 8.0
    assert tracker.report_evaluation().tokens_L.tolist() == [0.0]


def test_rows_stay_where_a_captured_graph_adds_to_them():
    tracker = Tracker((1,))
    tracker.record_row(1, uniform_row(), training=True)
    rows = tracker.metrics["training"].values
    tracker.step()
    rows += uniform_row(balance=3.0)  # what a replayed graph does, without Python
    assert tracker.step().balance_loss == 3.0
    rows += uniform_row()
    tracker.clear()  # Megatron's, after warm-up and after evaluation
    assert tracker.step().tokens_L.tolist() == [0.0]


def test_a_model_without_experts_logs_nothing():
    tracker = SwitchMetricsTracker((), 1)
    assert tracker.report(1.0, 1, writer=Writer()) == ""
    assert tracker.report_evaluation() is None


def test_other_programs_trackers_are_left_alone():
    set_moe_metrics_tracker(MoEMetricsTracker())
    record_routing(1, uniform_row(), training=True)
    assert not get_moe_metrics_tracker().metrics


NAN = float("nan")


class Loop:
    """Megatron's console sums: ``training_log`` without its text."""

    def __init__(self, tracker, log_interval):
        self.tracker, self.log_interval = tracker, log_interval
        self.sums, self.iteration, self.lines = {}, 0, []

    def step(self, value, *, skipped=False):
        self.iteration += 1
        for name, counts in (("advanced", not skipped), ("skipped", skipped)):
            key = f"{name} iterations"
            self.sums[key] = self.sums.get(key, 0) + int(counts)
        self.tracker.record_row(1, uniform_row(balance=value, z=value), training=True)
        self.tracker.report(1.0, self.iteration, total_loss_dict=self.sums)
        first = self.iteration == 1
        if first or self.iteration % self.log_interval == 0:
            steps = max(1, self.sums["advanced iterations"])
            self.lines.append(tuple(self.sums[name].item() / steps for name in LOSSES))
            if not first:
                for name in LOSSES:
                    self.sums[name] = torch.tensor([0.0])
                self.sums |= {"advanced iterations": 0, "skipped iterations": 0}


@pytest.mark.parametrize(
    ("log_interval", "steps", "lines"),
    [
        # The first line does not reset Megatron's sums, so the second covers both.
        (1, [1.0, 2.0, 4.0], [1.0, 1.5, 4.0]),
        (1, [None, None, 2.0, None, 4.0], [NAN, NAN, 2.0, NAN, 4.0]),
        (2, [1.0, None, None, 3.0, 5.0, 7.0], [1.0, 1.0, 3.0, 6.0]),
        (3, [None, None, 6.0, None, None, None, 1.0, None, 2.0], [NAN, 6.0, NAN, 1.5]),
    ],
)
def test_skipped_steps_do_not_count_in_console_averages_and_megatron_leaves_out_nan(
    log_interval, steps, lines
):
    loop = Loop(SwitchMetricsTracker((1,), E), log_interval)
    for value in steps:
        loop.step(100.0 if value is None else value, skipped=value is None)
    for name, found in zip(LOSSES, zip(*loop.lines, strict=True), strict=True):
        assert found == pytest.approx(lines, rel=0, abs=0, nan_ok=True), name


def test_a_rank_that_recorded_nothing_reports_the_same():
    run_ranks(_check_idle_rank, 2)


def _check_idle_rank(rank):
    tracker = new_tracker()
    if rank == 0:
        tracker.record_row(LAYER, uniform_row(balance=2.0, dropped=2), training=True)
        tracker.record_row(LAYER, uniform_row(dropped=4), training=False)
    assert tracker.step().balance_loss == 2.0
    assert tracker.report_evaluation().dropped == 0.5


def test_logged_values_depend_on_neither_layout_nor_number_of_micro_batches():
    run_ranks(_check_layouts, 4)


def _check_layouts(rank):
    layout = Layout(4, tp=2, ep=2)
    part = Part(layout, start_groups(layout))
    case = Case(config={"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}, padding=True)
    oracle = Oracle(case, num_microbatches=2)
    layer = build_layer(case, layout, part.groups)
    tracker = new_tracker()
    for repeats in (1, 3):  # the same micro-batches again: the same means
        for _ in range(repeats):
            run_part(layer, oracle, part)
            run_part(layer.eval(), oracle, part)
            with torch.no_grad():  # the first of two passes through a recomputed layer
                layer.train()(torch.zeros(4, 2, 6, dtype=torch.float64))
        oracle.check_report(tracker.step(), repeats)
    evaluation = tracker.report_evaluation()
    torch.testing.assert_close(evaluation.balance_loss_L[0], oracle.expected["balance"].mean())
    assert evaluation.tokens_L.tolist() == [4 * (~oracle.padding_T).sum()]
    slot_T = torch.tensor(oracle.slot_T)
    over = (slot_T >= oracle.capacity_at(2.0)).sum() / (slot_T >= 0).sum().double()
    assert evaluation.dropped_L.tolist() == [over]
    dist.barrier()


def test_the_stacks_of_an_encoder_decoder_have_names_of_their_own():
    tracker = SwitchMetricsTracker((2, 4), E, encoder_layers=2, layer_interval=1)
    tracker.record_row(2, uniform_row(balance=1.0, dropped=4), training=True)
    tracker.record_row(4, uniform_row(balance=3.0), training=True)
    board = Writer()
    text = tracker.report(1.0, 7, writer=board)
    assert text == (
        " encoder dropped: 0.5000 | encoder expert load max/mean: 1.00 |"
        " decoder dropped: 0.0000 | decoder expert load max/mean: 1.00 |"
        " experts below half: 0 | dead experts: 0 |"
    )
    assert board.scalars["dropped", 7] == 0.25
    assert board.scalars["encoder_dropped", 7] == 0.5
    assert board.scalars["moe/load_balancing_loss_encoder_layer_1", 7] == 1.0
    assert board.scalars["moe/load_balancing_loss_decoder_layer_1", 7] == 3.0
