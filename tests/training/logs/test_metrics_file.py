"""Records of iterations and evaluations: what they hold, when they come, what resuming drops."""

import json
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from support.event_files import scalar_steps
from torch.utils.tensorboard import SummaryWriter

from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, RoutingReport
from megatron_switch.training.logs.evaluation_names import AFTER_TRAINING, TEST, VALIDATION
from megatron_switch.training.logs.metrics_file import SCHEMA, MetricsFile, StepWriter

NUM_EXPERTS = 4
BATCH_SIZE, LENGTH = 8, 16
SECONDS = 2.0
ROUTING = {
    "load_balancing_loss": 1.5,
    "z_loss": 3.0,
    "dropped_fraction": 0.25,
    "expert_load_max_over_mean": 2.0,
    "experts_below_half": 2.0,
    "dead_experts": 1.0,
}
"""What the report below amounts to: means over layers of losses and drops, the worst load."""


@pytest.fixture
def report():
    return RoutingReport(
        layer_numbers=(2, 4),
        balance_loss_L=torch.tensor([1.0, 2.0]),
        z_loss_L=torch.tensor([2.0, 4.0]),
        tokens_L=torch.tensor([32.0, 32.0]),
        dropped_L=torch.tensor([0.0, 0.5]),
        sweep_dropped_LF=torch.zeros(2, len(CAPACITY_FACTOR_SWEEP)),
        load_LE=torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.4, 0.1, 0.0]]),
    )


class Scalars(SimpleNamespace):
    """A TensorBoard writer that remembers."""

    def __init__(self):
        super().__init__(seen={}, flushed=False)

    def add_scalar(self, tag, value, step, *_, **__):
        self.seen[tag, step] = value

    def flush(self):
        self.flushed = True


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "metrics.jsonl"


def new_writer(path, tensorboard=None, array_interval=10, **options):
    ticks = iter(range(1, 100))
    return StepWriter(
        tensorboard,
        None if path is None else MetricsFile(path),
        sequence_length=LENGTH,
        array_interval=array_interval,
        clock=lambda: next(ticks) * SECONDS,
        **options,
    )


def log(writer, step, loss=5.0, norm=1.0):
    """Write what Megatron writes in one iteration, in its order."""
    writer.add_scalar("learning-rate", 1e-3, step)
    writer.add_scalar("learning-rate vs samples", 1e-3, step * BATCH_SIZE)
    writer.add_scalar("batch-size", BATCH_SIZE, step)
    writer.add_scalar("lm loss", torch.tensor(loss), step)
    writer.add_scalar("lm loss vs samples", loss, step * BATCH_SIZE)
    if norm is not None:
        writer.add_scalar("grad-norm", norm, step)


def read_all(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path):
    """Return all records but those of starts."""
    return [record for record in read_all(path) if record["kind"] != "start"]


def test_one_record_an_iteration_with_every_value(path, report):
    writer = new_writer(path)
    for step in (1, 2):
        log(writer, step, loss=6.0 - step)
        writer.add_routing(report, step)
    expected = {
        "schema": SCHEMA,
        "iteration": 2,
        "kind": "train",
        "lm_loss": 4.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "step_seconds": SECONDS,
        "tokens_per_second": BATCH_SIZE * LENGTH / SECONDS,
        "consumed_tokens": 2 * BATCH_SIZE * LENGTH,
        **ROUTING,
    }
    records = read(path)
    times = [datetime.fromisoformat(record.pop("time")) for record in records]
    assert times == sorted(times)
    assert times[0].tzinfo is not None
    assert records[1] == expected
    assert [record["iteration"] for record in records] == [1, 2]
    assert list(records[0])[:3] == ["schema", "iteration", "kind"]


def test_arrays_come_at_the_interval(path, report):
    writer = new_writer(path, array_interval=2)
    for step in (1, 2, 3, 4):
        log(writer, step)
        writer.add_routing(report, step)
    records = read(path)
    assert [r["iteration"] for r in records if "expert_load" in r] == [2, 4]
    arrays = records[1]
    assert arrays["layers"] == [2, 4]
    assert arrays["dropped_by_layer"] == [0.0, 0.5]
    assert arrays["load_balancing_loss_by_layer"] == [1.0, 2.0]
    assert arrays["expert_load_max_over_mean_by_layer"] == pytest.approx([1.0, 2.0])
    assert torch.tensor(arrays["expert_load"]).shape == (2, NUM_EXPERTS)


def test_a_dense_iteration_is_written_when_the_next_begins_or_the_run_ends(path):
    writer = new_writer(path)
    log(writer, 1)
    assert not path.exists()
    log(writer, 2)
    assert [record["iteration"] for record in read(path)] == [1]
    writer.finish_iteration()
    writer.finish_iteration()
    records = read(path)
    assert [record["iteration"] for record in records] == [1, 2]
    assert [record["tokens_per_second"] for record in records] == [64.0, 64.0]
    assert "dropped_fraction" not in records[0]


def test_what_is_not_finite_or_not_known_is_null(path, report):
    writer = new_writer(path)
    log(writer, 1, loss=float("nan"), norm=float("inf"))
    writer.add_routing(report, 1)
    log(writer, 2, norm=None)
    writer.finish_iteration()
    first, second = read(path)
    assert (first["lm_loss"], first["grad_norm"], second["grad_norm"]) == (None, None, None)
    assert "NaN" not in path.read_text()


def test_iterations_that_tensorboard_does_not_log_have_no_record(path, report):
    writer = new_writer(path)
    for step in range(1, 7):
        if step % 3 == 0:
            log(writer, step)
        writer.add_routing(report, step)
    records = read(path)
    assert [record["iteration"] for record in records] == [3, 6]
    assert records[1]["tokens_per_second"] == 3 * BATCH_SIZE * LENGTH / SECONDS
    assert records[1]["step_seconds"] == SECONDS / 3


def test_a_start_is_marked_before_its_first_record(path):
    for first in (1, 3):  # ended after 4, and resumed from 2
        writer = new_writer(path)
        for step in (first, first + 1):
            log(writer, step)
            writer.finish_iteration()
    places = [(record["kind"], record["iteration"]) for record in read_all(path)]
    steps = [("train", 1), ("train", 2), ("train", 3), ("train", 4)]
    assert places == [("start", 0), *steps[:2], ("start", 2), *steps[2:]]
    assert read_all(path)[0].keys() == {"schema", "iteration", "kind", "time"}


def test_the_mark_of_a_start_whose_steps_are_computed_again_is_dropped(path):
    for first in (1, 4, 2):
        log(writer := new_writer(path), first)
        writer.finish_iteration()
    marks = [record["iteration"] for record in read_all(path) if record["kind"] == "start"]
    assert marks == [0, 1]


def evaluated(writer, evaluation, step, *, report=None, loss=None, validation_set=""):
    """Log an evaluation as Megatron's loop does; return what is logged of its routing."""
    writer.begin_evaluation(evaluation)
    if loss is not None:
        writer.add_scalar(f"lm loss validation{validation_set}", loss, step)
        writer.add_scalar(f"lm loss validation{validation_set} vs samples", loss, 9 * step)
    return writer.add_evaluation(report, step)


def test_evaluations_have_records_of_their_own(path, report):
    writer = new_writer(path, Scalars())
    log(writer, 1)
    logged = evaluated(writer, VALIDATION, 1, report=report, loss=4.0)
    evaluated(writer, AFTER_TRAINING, 1, loss=5.0)
    evaluated(writer, TEST, 1, loss=3.0)
    evaluated(writer, TEST, 1)
    train, validation, after, test, unknown = read(path)
    assert train["kind"] == "train"
    assert validation == {
        "schema": SCHEMA,
        "iteration": 1,
        "kind": "validation",
        "after_training": False,
        "lm_loss": 4.0,
        **ROUTING,
    }
    assert after == {**validation_of(validation), "after_training": True, "lm_loss": 5.0}
    assert test == {"schema": SCHEMA, "iteration": 1, "kind": "test", "lm_loss": 3.0}
    assert unknown["lm_loss"] is None  # a loss is never taken for that of another evaluation
    assert logged == {f"{name} validation": value for name, value in ROUTING.items()}


def test_a_warning_stands_behind_the_iteration_that_it_is_about(path):
    writer = new_writer(path)
    log(writer, 10)
    writer.add_warning("Warning: a few experts", 10)
    log(writer, 11)
    writer.finish_iteration()
    first, warning, _ = read(path)
    assert (first["kind"], first["iteration"]) == ("train", 10)
    assert warning == {
        "schema": SCHEMA,
        "iteration": 10,
        "kind": "warning",
        "text": "Warning: a few experts",
    }


def validation_of(record):
    return {name: value for name, value in record.items() if name not in ROUTING}


def test_several_validation_sets_keep_their_names(path):
    writer = new_writer(path)
    for name in ("-code", "-0"):
        evaluated(writer, VALIDATION, 1, loss=4.0, validation_set=name)
    assert [record["kind"] for record in read(path)] == ["validation-code", "validation-0"]


def test_no_curve_of_tensorboard_mixes_evaluations(report):
    tensorboard = Scalars()
    writer = new_writer(None, tensorboard)
    log(writer, 2)
    evaluated(writer, VALIDATION, 2, loss=4.0)
    evaluated(writer, AFTER_TRAINING, 2, loss=5.0)
    evaluated(writer, TEST, 2, report=report, loss=3.0)
    losses = {key: value for key, value in tensorboard.seen.items() if key[0].startswith("lm loss")}
    assert losses == {
        ("lm loss", 2): 5.0,
        ("lm loss vs samples", 2 * BATCH_SIZE): 5.0,
        ("lm loss validation", 2): 4.0,
        ("lm loss validation vs samples", 18): 4.0,
        ("lm loss validation after training", 2): 5.0,
        ("lm loss validation after training vs samples", 18): 5.0,
        ("lm loss test", 2): 3.0,
        ("lm loss test vs samples", 18): 3.0,
    }
    assert tensorboard.seen["dropped_fraction test", 2] == 0.25


def test_tensorboard_sees_everything_else():
    tensorboard = Scalars()
    writer = new_writer(None, tensorboard)
    log(writer, 1)
    writer.flush()
    assert tensorboard.seen["learning-rate", 1] == 1e-3
    assert tensorboard.flushed


def test_events_that_are_computed_again_are_dropped_at_the_first_value(tmp_path):
    for start in (1, 3):  # killed after iteration 4, resumed at 3
        with SummaryWriter(tmp_path) as tensorboard:
            writer = new_writer(None, tensorboard, tensorboard_folder=tmp_path)
            for step in range(start, 5):
                log(writer, step)
    assert scalar_steps(tmp_path, "lm loss") == [1, 2, 3, 4]


def test_without_tensorboard_its_methods_do_nothing(path):
    writer = new_writer(path)
    writer.flush()
    writer.add_text("name", "text")
    with pytest.raises(AttributeError):
        writer.__deepcopy__  # noqa: B018  # copying must not find a method that does nothing


def resumed(path, step, *, evaluation=False):
    """Write the first record of a run that goes on with an iteration; return all places."""
    writer = new_writer(path)
    if evaluation:
        writer.add_evaluation(None, step)
    else:
        log(writer, step)
        writer.finish_iteration()
    return [(record["iteration"], record["kind"]) for record in read(path)]


@pytest.fixture
def interrupted(path):
    """Leave the file of a run that was killed while it wrote."""
    writer = new_writer(path)
    for step in (1, 2, 3):
        log(writer, step)
        writer.add_evaluation(None, step)
    with path.open("a") as file:
        file.write('{"schema": "megatron')
    return path


def test_resuming_drops_what_is_computed_again(interrupted):
    assert resumed(interrupted, 3) == [
        (1, "train"),
        (1, "validation"),
        (2, "train"),
        (2, "validation"),
        (3, "train"),
    ]


def test_resuming_at_the_end_drops_a_torn_line_only(interrupted):
    assert resumed(interrupted, 4)[-2:] == [(3, "validation"), (4, "train")]


def test_evaluating_a_finished_run_again_keeps_its_last_iteration(interrupted):
    assert resumed(interrupted, 3, evaluation=True)[-2:] == [(3, "train"), (3, "validation")]
