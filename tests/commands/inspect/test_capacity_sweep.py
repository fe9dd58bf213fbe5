"""A sweep says of each factor what an evaluation in training says of it, in any layout."""

import json
import re

import pytest
from support.tiny_run import EXACT, SPARSE, TINY, read_records, run_command, trained

from megatron_switch.cli import main
from megatron_switch.commands.inspect.capacity_sweep import SCHEMA, sweep_capacity
from megatron_switch.commands.table import parse
from megatron_switch.emulation import launch
from megatron_switch.errors import ConfigError

ON_CPU = ("--switch-device", "cpu")
SAMPLES = 8  # those of one evaluation in training
EVALUATED = 0.5
"""Capacity factor with which the training itself evaluates, at iteration 2."""
MORE = "--switch-min-capacity 0 --disable-bias-linear --switch-capacity-rounding ceil"


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    """Train on one rank; return the flags of the run, and its folder."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    flags = f"{EXACT} {data} {MORE}"
    more = f"--switch-eval-capacity-factor {EVALUATED} --save-interval 2"
    trained(f"{flags} {more} --switch-run-dir {folder}")
    return flags, folder


def sweep(folder, *flags):
    """Return the rows of a sweep on one rank."""
    outcome = run_command("capacity-sweep", str(folder), *ON_CPU, "--json", *flags)
    assert outcome.code == 0, outcome.screen + outcome.errors
    record = json.loads(outcome.screen)
    assert record["schema"] == SCHEMA
    assert record["layers"] == [2, 4]
    return record["rows"]


@pytest.mark.slow
def test_rows_are_training_s_own_evaluations(checkpoint, tmp_path):
    flags, folder = checkpoint
    place = ("--ckpt-step", "2", "--samples", str(SAMPLES))
    rows = sweep(folder, "--factors", "0.5,1.5,-1", *place)
    assert [row["slots"] for row in rows] == [4, 12, 32]  # of 2 x 16 tokens, 4 experts
    assert rows[0]["dropped"] > rows[1]["dropped"] >= rows[2]["dropped"] == 0.0
    for row in rows[:2]:
        run = folder
        if row["factor"] != EVALUATED:  # the same training, which evaluates otherwise
            run = tmp_path / "run"
            more = f"--switch-eval-capacity-factor {row['factor']} --switch-run-dir {run}"
            trained(f"{flags} {more}")
        record = read_records(run / "metrics.jsonl", "validation")[0]
        assert record["iteration"] == 2
        assert row["loss"] == pytest.approx(record["lm_loss"], rel=1e-6)
        assert row["dropped"] == pytest.approx(record["dropped_fraction"], abs=1e-12)
        by_layer = row["dropped_by_layer"]
        assert sum(by_layer) / len(by_layer) == pytest.approx(row["dropped"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--expert-model-parallel-size", "2"),
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ],
    ids=["EP2 DP2", "TP2"],
)
def test_rows_depend_on_no_layout(checkpoint, capfd, layout):
    _, folder = checkpoint
    words = ("--factors", "0.5,-1", "--samples", "5", "--micro-batch-size", "2")
    expected = sweep(folder, *words)  # three micro-batches, the last one short
    capfd.readouterr()
    argv = ["capacity-sweep", str(folder), *ON_CPU, "--json", *words, *layout]
    assert launch(2, lambda: main(argv)) == 0
    actual = json.loads(capfd.readouterr().out)["rows"]
    for row, wanted in zip(actual, expected, strict=True):
        assert row["slots"] == wanted["slots"]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert row["dropped_by_layer"] == pytest.approx(wanted["dropped_by_layer"], abs=1e-12)


@pytest.mark.slow
def test_the_table_and_what_is_refused(checkpoint, data, tmp_path):
    _, folder = checkpoint
    outcome = run_command(
        "capacity-sweep", str(folder), *ON_CPU, "--factors=-1,0.5", "--samples", "2"
    )
    assert outcome.code == 0, outcome.errors
    assert re.search(r"no limit │ +32 │ +0\.00% │ +0\.00% │ +\d\.\d{4}", outcome.screen)
    assert "2 validation sequences; slots are per expert and capacity group (microbatch)." in (
        outcome.screen
    )

    def refused(message, place, *flags):
        outcome = run_command("capacity-sweep", str(place), *ON_CPU, *flags)
        assert outcome.code == 2, outcome.screen
        assert re.search(message, outcome.errors, flags=re.DOTALL), outcome.errors

    refused(
        r"no validation data: --split is 100,0,0.*--split 0,100,0", folder, "--split", "100,0,0"
    )
    refused(r"leaves none for validation", folder, "--split", "99.9,0.1,0")
    refused(r"Data path gone needs gone\.idx and gone\.bin", folder, "--data-path", "gone")
    refused(r"got --samples 0", folder, "--samples", "0")
    refused(r"--micro-batch-size must be at least 1", folder, "--micro-batch-size", "0")
    dense = tmp_path / "dense"
    trained(f"{TINY} {data} --switch-run-dir {dense}")
    refused("no experts, so it has no capacity", dense)
    mock = tmp_path / "mock"
    trained(f"{SPARSE} --mock-data --train-iters 1 --switch-run-dir {mock}")
    assert sweep(mock, "--factors", "1", "--samples", "2")[0]["loss"] > 0.0


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ("1,two", r"--factors takes numbers with commas.*'1,two'.*--factors 1,1\.25"),
        ("1,0", r"a finite number other than 0, which would drop every token"),
        ("nan", r"a finite number other than 0"),
    ],
)
def test_factors_that_mean_nothing(factors, message):
    with pytest.raises(ConfigError, match=message):
        sweep_capacity(parse("capacity-sweep", ["folder", "--factors", factors]))
