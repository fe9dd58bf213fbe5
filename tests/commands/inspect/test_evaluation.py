"""``evaluate`` says of a checkpoint what an evaluation in training says of it."""

import json
import math
import re

import pytest
import torch
from support.tiny_run import EXACT, TINY, read_records, run_command, trained

from megatron_switch.commands.inspect.evaluation import SCHEMA, Evaluation

ON_CPU = ("--switch-device", "cpu")
LAST, SAMPLES = 4, 8  # iterations, and samples of one evaluation in training


def test_perplexity_is_the_exponential_of_the_loss():
    assert Evaluation(math.log(50), 8, None).perplexity == pytest.approx(50)
    assert Evaluation(1e4, 8, None).perplexity == math.inf


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    more = "--switch-eval-capacity-factor 0.5 --switch-min-capacity 0 --eval-interval 3"
    trained(f"{EXACT} {data} {more} --switch-run-dir {folder}")
    return folder


def evaluated(folder, *flags):
    outcome = run_command("evaluate", str(folder), *ON_CPU, *flags)
    assert outcome.code == 0, outcome.screen + outcome.errors
    return outcome


@pytest.mark.slow
def test_numbers_are_training_s_own(run):
    logged = read_records(run / "metrics.jsonl", "validation")[0]
    place = ("--ckpt-step", str(logged["iteration"]), "--samples", str(SAMPLES))
    record = json.loads(evaluated(run, "--json", *place).screen)
    assert (record["schema"], record["split"]) == (SCHEMA, "validation")
    assert (record["sequences"], record["tokens"]) == (SAMPLES, SAMPLES * 16)
    assert record["loss"] == pytest.approx(logged["lm_loss"], rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert record["dropped"] == pytest.approx(logged["dropped_fraction"], abs=1e-12)
    assert record["dropped"] > 0
    layers = record["layers"]
    assert [layer["layer"] for layer in layers] == [2, 4]
    mean = torch.tensor([layer["dropped"] for layer in layers]).mean().item()
    assert mean == pytest.approx(record["dropped"])
    worst = max(layer["expert_load_max_over_mean"] for layer in layers)
    assert worst == pytest.approx(logged["expert_load_max_over_mean"])


@pytest.mark.slow
def test_the_test_data_are_read_where_they_are_asked_for(run):
    (logged,) = read_records(run / "metrics.jsonl", "test")
    screen = evaluated(run, "--test", "--samples", str(SAMPLES)).screen
    assert f"data        {SAMPLES} test sequences, {SAMPLES * 16} tokens" in screen
    assert f"loss        {logged['lm_loss']:.4f}" in screen
    assert f"dropped     {logged['dropped_fraction']:.2%}" in screen
    assert re.search(r"│ +4 │ +\d+\.\d\d% │ +\d\.\d\d │ +\d │", screen)


@pytest.mark.slow
def test_no_sequence_is_read_twice(run):
    outcome = evaluated(run, "--json", "--samples", "1000")
    record = json.loads(outcome.screen)
    assert record["sequences"] == (40 * 20 - 1) // 16  # 40 documents of 20 tokens
    assert "The data have 49 sequences, and each is read once (--samples 1000" in outcome.errors
    again = json.loads(evaluated(run, "--json", "--samples", "49").screen)
    assert again == record


@pytest.mark.slow
def test_a_dense_model_has_a_loss_only(data, tmp_path):
    trained(f"{TINY} {data} --switch-run-dir {tmp_path / 'dense'}")
    outcome = evaluated(tmp_path / "dense", "--json", "--samples", "2")
    record = json.loads(outcome.screen)
    assert record["loss"] > 0
    assert record.keys().isdisjoint({"dropped", "layers"})
    assert "has no effect" not in outcome.errors
    refused = run_command(
        "evaluate", str(tmp_path / "dense"), *ON_CPU, "--test", "--split", "90,10,0"
    )
    assert refused.code == 2
    assert re.search(
        r"no test data: --split is 90,10,0.*--split 0,0,100", refused.errors, re.DOTALL
    )


@pytest.mark.slow
def test_training_evaluates_without_a_number_of_iterations(data, run):
    flags = "--use-checkpoint-args --micro-batch-size 2 --eval-iters 1 --switch-device cpu"
    outcome = run_command(
        "train", "--skip-train", "--load", str(run), *flags.split(), *data.split()
    )
    assert outcome.code == 0, outcome.screen + outcome.errors
    assert f"validation loss at iteration {LAST} | lm loss" in outcome.screen
