"""Infinite router logits end a run by name, or cost one step and change nothing."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from support.tiny_run import SPARSE, TINY, read_records, train, trained
from torch import nn

from megatron_switch.errors import NumericError
from megatron_switch.moe.metrics.routing_counts import row_width
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.moe.metrics.tracker import step_is_skipped as active_step_is_skipped
from megatron_switch.testing.checkpoints import compare_checkpoints
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.loop import nonfinite
from megatron_switch.training.loop.nonfinite import NonFiniteGuard

LAYERS = (2, 4, 6, 8, 10)
NAN, INF = float("nan"), float("inf")


def note(tracker, layer, z_loss):
    row = torch.zeros(row_width(4), dtype=torch.float64)
    row[1] = z_loss
    tracker.record_row(layer, row, training=True)


class Step:
    """One rank's guard at the end of a step, with Megatron's part left out."""

    def __init__(self, action="raise", watch_gradients=True, gradient=1.0):
        nonfinite.get_args = lambda: SimpleNamespace(curr_iteration=6)
        self.finalized = []
        nonfinite.finalize_model_grads = lambda *given, **_: self.finalized.append(given)
        self.tracker = SwitchMetricsTracker(LAYERS, 4)
        set_moe_metrics_tracker(self.tracker)
        self.lines = []
        self.guard = NonFiniteGuard(
            self.tracker, action=action, watch_gradients=watch_gradients, say=self.lines.append
        )
        self.chunk = nn.Linear(2, 2)
        self.chunk.weight.main_grad = torch.full((2, 2), gradient)

    def end(self):
        self.guard([self.chunk], None)
        return self.tracker.step_is_skipped


def test_layers_and_ranks_are_named_on_every_rank():
    run_ranks(_check_verdicts, 2)


def _check_verdicts(rank):
    step = Step()
    note(step.tracker, 2, 3.0)
    assert not step.end()
    assert step.finalized == [([step.chunk], None)]
    note(step.tracker, 2, 1.0)  # a second micro-batch of the same step
    if rank == 1:
        note(step.tracker, 4, NAN)
        note(step.tracker, 4, 1.0)
    with pytest.raises(NumericError, match=r"Iteration 7: .* in layer 4 \(rank 1\)\. What a layer"):
        step.end()
    assert len(step.finalized) == 1  # before Megatron looks for NaN
    for layer in LAYERS:
        note(step.tracker, layer, INF)
    several = r"in layer 2 \(rank 0\), 4 \(rank 0\), 6 \(rank 0\) and 2 more\..*--switch-nonfinite"
    with pytest.raises(NumericError, match=several):
        step.end()
    with pytest.raises(NumericError, match="not finite") as caught:
        step.guard.explain(RuntimeError("found NaN in local grad norm"))
    assert "local grad norm" in str(caught.value.__cause__)


def test_an_error_of_another_kind_is_left_as_it_is():
    run_ranks(_check_other_errors, 1)


def _check_other_errors(rank):
    assert Step().guard.explain(RuntimeError("the disk is full")) is None


def test_a_step_is_skipped_until_it_is_reported():
    run_ranks(_check_skip, 2)


def _check_skip(rank):
    step = Step("skip")
    assert not step.end()
    if rank == 0:
        note(step.tracker, 8, NAN)
    assert step.end()
    assert active_step_is_skipped()
    assert step.lines == [
        "Iteration 7: the router's logits are not finite in layer 8 (rank 0). The step is skipped."
    ]
    assert len(step.finalized) == 2  # the ranks stay in step
    step.tracker.report(1.0, 7)
    assert not active_step_is_skipped()
    assert not step.end()


def test_gradients_count_where_no_loss_scaler_watches_them():
    run_ranks(_check_gradients, 2)


def _check_gradients(rank):
    gradient = INF if rank == 1 else 1.0
    step = Step("skip", gradient=gradient)
    assert step.end()
    assert step.lines == [
        "Iteration 7: gradients are not finite, from rank 1 on; router logits are. The step is "
        "skipped."
    ]
    assert not Step("skip", watch_gradients=False, gradient=gradient).end()
    assert not Step("raise", gradient=gradient).end()  # Megatron's own check is on


def test_another_tracker_skips_no_step():
    set_moe_metrics_tracker(None)
    assert not active_step_is_skipped()


def break_logits(layer, on_rank):
    """Return what makes one layer's logits NaN in iteration 2 on one rank."""

    def prepare():
        from megatron.training import get_args

        from megatron_switch.moe.router import SwitchRouter

        gating = SwitchRouter.gating

        def broken(self, x):
            logits_TE = gating(self, x)
            here = self.layer_number == layer and dist.get_rank() == on_rank
            return logits_TE * NAN if here and get_args().curr_iteration == 1 else logits_TE

        SwitchRouter.gating = broken

    return prepare


def break_loss():
    from megatron.training import get_args

    from megatron_switch.training.loop import forward_step

    masked_loss = forward_step.masked_loss

    def broken(*given):
        total, *rest = masked_loss(*given)
        return total * (NAN if get_args().curr_iteration == 1 else 1.0), *rest

    forward_step.masked_loss = broken


EP2 = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", OVERLAP, "--use-distributed-optimizer --bf16"])
def test_a_run_ends_with_layer_and_rank(data, more):
    outcome = train(f"{SPARSE} {data} {EP2} {more}", ranks=2, prepare=break_logits(2, on_rank=1))
    assert outcome.code == 2, outcome.screen + outcome.errors
    assert re.search(r"Iteration 2: .* not finite in layer 2 \(rank 1\)", outcome.errors)
    assert "Traceback" not in outcome.errors


@pytest.mark.slow
def test_where_megatron_stops_first_the_rank_still_says_why(data):
    """Without its second look Megatron raises in the backward pass, on whichever rank it may be."""
    flags = f"{SPARSE} {data} {EP2} {OVERLAP} --rerun-mode disabled"
    outcome = train(flags, ranks=2, prepare=break_logits(2, on_rank=1))
    assert outcome.code != 0
    assert re.search(r"Iteration 2: .* not finite in layer 2 \(rank 1\)", outcome.errors)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--num-experts 4 --switch-nonfinite ignore"])
def test_without_a_place_to_save_a_loss_that_is_no_number_is_said_at_once(data, more):
    outcome = train(f"{TINY} {more} {data}", prepare=break_loss)
    assert outcome.code != 0
    assert "--rerun-mode disabled (no --save)" in outcome.screen
    assert "found NaN in local" in outcome.errors
    assert "TypeError" not in outcome.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "prepare", "says"),
    [
        ("--bf16 --use-distributed-optimizer", break_logits(4, on_rank=1), r"layer 4 \(rank 1\)"),
        (
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
            break_logits(2, on_rank=0),
            r"layer 2 \(rank 0\)",
        ),
        ("", break_loss, "gradients are not finite"),
    ],
    ids=["bf16", "pipeline", "gradients"],
)
def test_a_skipped_step_leaves_everything_as_it_was(data, tmp_path, more, prepare, says):
    flags = f"{SPARSE} {data} {EP2} {more} --switch-nonfinite skip --save-interval 1"
    ranks = 4 if "pipeline" in more else 2
    run = tmp_path / "run"
    outcome = trained(f"{flags} --switch-run-dir {run}", ranks=ranks, prepare=prepare)
    assert re.search(rf"Iteration 2: .*{says}.* The step is skipped\.", outcome.screen)
    assert "--no-check-for-nan-in-loss-and-grad" in outcome.screen
    first, second, third = (run / "checkpoints" / f"iter_{n:07d}" for n in (1, 2, 3))
    assert compare_checkpoints(first, second) == []
    assert compare_checkpoints(second, third) != []
    records = read_records(run / "metrics.jsonl")
    assert [record["grad_norm"] is None for record in records] == [False, True, False, False]
    assert records[1]["learning_rate"] == records[0]["learning_rate"]  # the schedule waited too
    assert all(record["load_balancing_loss"] < 2.0 for record in records[2:])
