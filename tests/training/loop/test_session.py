"""Whole training runs: the same numbers in every layout, and every kind of model and precision.

The layouts are compared as users compare them: a run of one rank saves after its first iteration,
and every other layout continues from there. Losses, drops and gradient norms of the iterations that
follow must be those of the one rank, evaluation included.
"""

import json
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.tiny_run import EXACT, SPARSE, TINY, Started, read_records, run_command, train, trained

from megatron_switch.utils.exit_codes import SAVED

pytestmark = pytest.mark.slow

COMPARED = ("lm_loss", "load_balancing_loss", "z_loss", "dropped_fraction", "grad_norm")
TEXTS = ("schema", "kind")
EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("ranks", "layout", "pattern"),
    [
        (4, f"--tensor-model-parallel-size 2 --sequence-parallel {EP2} "
            "--expert-tensor-parallel-size 1", "0101"),
        (4, f"--pipeline-model-parallel-size 2 {EP2}", "0101"),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "0101"),
        (2, f"{EP2} --switch-dispatch padded", "0101"),
        (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "0101"),
        # Neither the first stage nor the last one has a layer with experts.
        (3, "--pipeline-model-parallel-size 3", "010"),
    ],
    ids=["tp2-sp-ep2-dp2", "pp2-ep2", "pp2-vp2", "ep2-padded", "dp2-recompute", "pp3-dense-ends"],
)  # fmt: skip
def test_every_layout_logs_the_numbers_of_one_rank(one_rank, tmp_path, ranks, layout, pattern):
    flags, reference = one_rank(pattern)
    metrics = tmp_path / "metrics.jsonl"
    trained(f"{flags} {layout} --switch-metrics-file {metrics}", ranks=ranks)

    expected = read_records(reference / "metrics.jsonl")[1:]
    actual = read_records(metrics)
    assert [record["iteration"] for record in actual] == [2, 3, 4]
    for one, other in zip(expected, actual, strict=True):
        for name in COMPARED:
            assert other[name] == pytest.approx(one[name], rel=1e-5), (one["iteration"], name)
        assert other.get("expert_load") == one.get("expert_load")
    assert len([record for record in actual if "expert_load" in record]) == 2
    for kind, count in (("validation", 3), ("test", 1)):
        evaluated = read_records(reference / "metrics.jsonl", kind)
        again = read_records(metrics, kind)
        assert len(again) == count
        for one, other in zip(evaluated, again, strict=True):
            numbers = {name: value for name, value in one.items() if name not in TEXTS}
            assert {name: other[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


def test_a_dense_model_trains(data, tmp_path):
    outcome = trained(
        f"{TINY} {data} --switch-run-dir {tmp_path / 'run'} --lr-decay-style constant"
    )
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 4
    assert records[-1]["lm_loss"] < records[0]["lm_loss"]
    assert all(record["tokens_per_second"] > 0 for record in records)
    assert "dropped_fraction" not in records[0]
    assert "4 layers (all 4 dense)" in outcome.screen
    assert "routing" not in outcome.screen
    assert "dropped" not in outcome.screen
    # Megatron's arguments fill the log; the screen has the start-up text and lines of progress.
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert "--- arguments ---" in log
    assert len(log.splitlines()) > 800
    assert "--- arguments ---" not in outcome.screen
    assert len(outcome.screen.splitlines()) < 40
    assert outcome.errors == ""
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "checkpoints", "tensorboard", "log", "metrics.jsonl", "ranks.csv",
                     "run.json", "resume.sh"}  # fmt: skip


def test_bf16_stays_near_fp32_with_the_router_in_fp32(data, one_rank, tmp_path):
    _, reference = one_rank("0101")
    metrics = tmp_path / "metrics.jsonl"
    flags = f"{EXACT} {data} --bf16 {EP2} --switch-metrics-file {metrics}"
    outcome = trained(flags, ranks=2)
    expected = read_records(reference / "metrics.jsonl")[0]
    actual = read_records(metrics)[0]
    assert actual["lm_loss"] == pytest.approx(expected["lm_loss"], rel=2e-2)
    assert "layers bf16, router fp32, gradients summed in fp32" in outcome.screen


def test_tensor_ranks_may_outnumber_key_heads(data, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    flags = f"{SPARSE} {data} --group-query-attention --num-query-groups 1 --disable-bias-linear"
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    trained(f"{flags} {tensor} --switch-metrics-file {metrics}", ranks=2)
    records = read_records(metrics)
    assert len(records) == 4
    assert records[-1]["lm_loss"] < records[0]["lm_loss"]


def test_fp16_steps_that_overflow_are_skipped_and_counted_as_such(data, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    scale = "--fp16 --initial-loss-scale 1e20 --min-loss-scale 1 --hysteresis 1"
    trained(f"{SPARSE} {data} {scale} --loss-scale-window 1 --switch-metrics-file {metrics}")
    records = read_records(metrics)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4]
    skipped = [record for record in records if record["grad_norm"] is None]
    assert skipped
    assert all(record["load_balancing_loss"] < 2.0 for record in records)


def test_a_rank_that_fails_ends_all_and_is_the_first_to_be_read_of(data):
    outcome = train(f"{SPARSE} {data} {EP2}", ranks=2, prepare=_fail_on_rank_1)
    assert outcome.code != 0
    lines = outcome.errors.strip().splitlines()
    assert lines[0].startswith("rank 1 of 2 failed")
    assert "RuntimeError: the memory of rank 1 is broken" in outcome.errors


def _fail_on_rank_1():
    from megatron_switch.training.loop.forward_step import ForwardStep

    step = ForwardStep.__call__

    def broken_step(self, data_iterator, model):
        import torch.distributed as dist
        from megatron.training import get_args

        if dist.get_rank() == 1 and get_args().curr_iteration == 1:
            raise RuntimeError("the memory of rank 1 is broken")
        return step(self, data_iterator, model)

    ForwardStep.__call__ = broken_step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_resume_sh_continues(data, tmp_path, number):
    folder = tmp_path / "run"
    flags = f"{SPARSE} {data} {EP2} --train-iters 100000 --switch-run-dir {folder}"
    run = Started(["launch-local", "-n", "2", *flags.split()])
    while not (folder / "metrics.jsonl").exists() and run.is_running():
        time.sleep(0.05)
    run.signal(number)
    outcome = run.wait()
    assert outcome.code == SAVED, outcome.screen + outcome.errors
    assert outcome.errors == ""
    said = f"{number.name} received: saving a checkpoint, then ending (exit code 75)."
    assert outcome.screen.count("received") == outcome.screen.count(said) == 1
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved_at = int(tracker.read_text())
    assert read_records(folder / "metrics.jsonl")[-1]["iteration"] == saved_at

    words = shlex.split((folder / "resume.sh").read_text().splitlines()[-1])
    assert words[:5] == ["exec", sys.executable, "-m", "megatron_switch", "launch-local"]
    # What resume.sh executes, in a fork instead of a new interpreter.
    again = run_command(*words[4:-1], "--exit-interval", "1")
    assert again.code == 0, again.screen + again.errors
    assert tracker.read_text() == str(saved_at + 1)
    iterations = [record["iteration"] for record in read_records(folder / "metrics.jsonl")]
    assert iterations == list(range(1, saved_at + 2))
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [(each["iteration"], each["exit"]["iteration"]) for each in starts] == [
        (0, saved_at),
        (saved_at, saved_at + 1),
    ]
    assert [each["exit"]["code"] for each in starts] == [SAVED, 0]
    assert starts[0]["exit"]["reason"] == number.name
    assert starts[0]["layout"]["ep"] == 2
    assert starts[0]["hosts"] == [socket.gethostname()]
    marks = read_records(folder / "metrics.jsonl", "start")
    assert [mark["iteration"] for mark in marks] == [0, saved_at]
    assert read_records(folder / "metrics.jsonl")[-1]["consumed_tokens"] == (saved_at + 1) * 8 * 16


@pytest.mark.timeout(240)  # two interpreters start, and import all of Megatron
def test_resume_sh_itself_runs(data, tmp_path):
    folder = tmp_path / "run"
    trained(f"{TINY} {data} --switch-run-dir {folder} --exit-interval 2")
    done = subprocess.run(
        [str(folder / "resume.sh"), "--exit-interval", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    iterations = [record["iteration"] for record in read_records(folder / "metrics.jsonl")]
    assert iterations == [1, 2, 3]
