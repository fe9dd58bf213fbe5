"""Evaluations report their own drops and loads, under the name of what they read."""

from types import SimpleNamespace

import pytest
import torch
from support.tiny_run import EXACT, SPARSE, read_records, trained

from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, RoutingReport
from megatron_switch.training.loop import monitors
from megatron_switch.training.loop.monitors import EvaluationProgress, EvaluationReporter


def report():
    return RoutingReport(
        layer_numbers=(2,),
        balance_loss_L=torch.ones(1),
        z_loss_L=torch.ones(1),
        tokens_L=torch.tensor([32.0]),
        dropped_L=torch.tensor([0.25]),
        sweep_dropped_LF=torch.zeros(1, len(CAPACITY_FACTOR_SWEEP)),
        load_LE=torch.tensor([[0.75, 0.25]]),
    )


class Log(SimpleNamespace):
    """Takes the place of whatever is written to."""

    def __init__(self):
        super().__init__(calls=[])

    def begin_evaluation(self, name):
        self.calls.append(name)

    def add_evaluation(self, *call):
        self.calls.append(call)
        return {"dropped_fraction validation": 0.25} if call[0] else {}

    def log(self, *call):
        self.calls.append(call)


@pytest.fixture
def ranks(monkeypatch):
    """Let the other ranks answer with a split."""
    answers = {"others": 0}

    def all_reduce(index, op):
        assert op == torch.distributed.ReduceOp.MAX
        index.clamp_(min=answers["others"])

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    make = torch.tensor
    monkeypatch.setattr(monitors.torch, "tensor", lambda values, device=None: make(values))
    monkeypatch.setattr(monitors, "replace_wandb_writer", lambda writer: answers.get("wandb"))
    return answers


ARGS = SimpleNamespace(
    skip_train=False,
    curr_iteration=6,
    train_iters=7,
    eval_interval=7,
    eval_iters=1,
    start_eval_at_iter=None,
)
"""A run that has taken its last step, number 7."""


def reporter(split, result, log):
    tracker = SimpleNamespace(report_evaluation=lambda: result)
    step = SimpleNamespace(evaluated_split=lambda: split)
    return EvaluationReporter(ARGS, tracker, step, log, SimpleNamespace(end=lambda: None))


@pytest.mark.parametrize(
    ("here", "others", "name"), [(0, 0, "validation"), (1, 0, "test"), (0, 1, "test")]
)
def test_the_split_is_that_of_the_ranks_that_read_data(capsys, ranks, here, others, name):
    log, result = Log(), report()
    ranks["others"] = others
    evaluated = reporter(here, result, log)
    assert evaluated.collect(model=None) is result
    evaluated.write(result, 7, writer=None)
    assert log.calls == [name, (result, 7)]
    assert capsys.readouterr().out == (
        f" {name} routing at iteration 7 | dropped: 0.2500 | expert load max/mean: 1.50 |"
        " experts below half: 0 | dead experts: 0 |\n"
    )


def test_a_dense_model_has_a_loss_only(capsys, ranks):
    log = Log()
    evaluated = reporter(0, None, log)
    assert evaluated.collect(model=None) is None
    evaluated.write(None, 7, writer=None)
    assert log.calls == ["validation", (None, 7)]
    assert capsys.readouterr().out == ""


def test_weights_and_biases_gets_what_tensorboard_gets(ranks):
    runs = Log()
    ranks["wandb"] = runs
    reporter(0, None, Log()).write(report(), 7, writer=None)
    reporter(0, None, Log()).write(None, 8, writer=None)
    assert runs.calls == [({"dropped_fraction validation": 0.25}, 7)]


def test_the_validation_after_training_is_named(capsys, ranks):
    log = Log()
    evaluated = reporter(0, report(), log)
    for _ in range(2):  # in the loop, and after it
        evaluated.collect(model=None)
        evaluated.write(report(), 7, writer=None)
    assert log.calls[::2] == ["validation", "validation after training"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" |")[0] for line in lines] == [
        " validation routing at iteration 7",
        " validation routing at iteration 7 after training",
    ]


def counted(monkeypatch, **changes):
    """Count a whole evaluation of 3 iterations x 2 micro-batches, twice; return what is said."""
    monkeypatch.setattr(monitors, "_INTERVAL_S", 0.0)
    values = {
        "eval_iters": 3,
        "eval_global_batch_size": 16,
        "eval_micro_batch_size": 2,
        "data_parallel_size": 4,
        "full_validation": False,
        "multiple_validation_sets": False,
    }
    lines: list[str] = []
    progress = EvaluationProgress(SimpleNamespace(**{**values, **changes}), lines.append)
    for _ in range(2):
        for _ in range(6):
            progress.begin_micro_batch()
        progress.end()
    return [line.split(" in ")[0].split(" ended ")[0] for line in lines]


def test_iterations_are_counted_from_micro_batches(monkeypatch):
    once = [f" evaluation: {done} of 3 steps" for done in (1, 1, 2, 2)]
    assert counted(monkeypatch) == once * 2


@pytest.mark.parametrize("flag", ["full_validation", "multiple_validation_sets"])
def test_a_length_that_is_not_known_is_not_told(monkeypatch, flag):
    once = [f" evaluation: step {done}" for done in (1, 1, 2, 2)]
    assert counted(monkeypatch, eval_iters=[3, 3], **{flag: True}) == once * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"])
def test_a_long_evaluation_is_followed_on_the_screen(data, layout):
    ranks = 2 if layout else 1

    def prepare():
        monitors._INTERVAL_S = 0.0

    flags = f"{EXACT} {data} {layout} --eval-iters 3 --eval-interval 4".replace(
        "--save-interval 1", ""
    )
    screen = trained(flags, ranks=ranks, prepare=prepare).screen
    followed = [line for line in screen.splitlines() if line.startswith(" evaluation: ")]
    said = [line.split(" in ")[0] for line in followed]
    steps = [f" evaluation: {done} of 3 steps" for done in (1, 2)]
    once = [line for line in steps for _ in range(4)]  # micro-batches of 2 in batches of 8
    assert said == once * (said.count(steps[0]) // 4)
    assert said


@pytest.mark.slow
def test_a_quick_evaluation_passes_in_silence(data):
    flags = f"{EXACT} {data} --eval-iters 2".replace("--save-interval 1", "")
    assert " evaluation: " not in trained(flags).screen


@pytest.mark.slow
def test_losses_and_the_warning_about_them_are_in_one_log_and_one_file(data, tmp_path):
    flags = f"{SPARSE} {data} --train-iters 10 --lr 0.1 --moe-aux-loss-coeff 0"
    outcome = trained(f"{flags} --switch-run-dir {tmp_path / 'run'}", ranks=2)
    start = "Warning: at iteration 10 most tokens go to a few experts"
    assert outcome.screen.count(start) == 1
    first, last = ((tmp_path / "run" / "log" / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert start not in first
    assert start in last
    assert "| lm loss: " in last
    (warning,) = read_records(tmp_path / "run" / "metrics.jsonl", "warning")
    assert warning["text"].startswith(start)
