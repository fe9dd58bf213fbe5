"""What is logged of a step is the same whatever goes on around it."""

import pytest
from support.event_files import scalar_steps, scalar_tags
from support.tiny_run import EXACT, OF_THE_CLOCK, read_records, trained

pytestmark = pytest.mark.slow

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
AROUND = {
    "no evaluation": "--eval-iters 0",
    "lines of several steps": "--log-interval 3",
    "recomputed": RECOMPUTE,
    "only experts recomputed": "--recompute-granularity selective --recompute-modules moe",
}


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """Train with an evaluation after every second step; return flags and records of all steps."""
    path = tmp_path_factory.mktemp("plain") / "metrics.jsonl"
    flags = f"{EXACT} {data} --switch-min-capacity 0 --moe-expert-capacity-factor 0.9"
    trained(f"{flags} --switch-metrics-file {path}")
    assert len(read_records(path, "validation")) == 3
    return flags, steps(path)


def steps(path):
    return [
        {name: value for name, value in record.items() if name not in OF_THE_CLOCK}
        for record in read_records(path)
    ]


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_records_of_steps_are_equal(plain, tmp_path, around):
    flags, expected = plain
    assert any(record["dropped_fraction"] > 0 for record in expected)
    assert "expert_load" in expected[1]
    trained(f"{flags} {around} --switch-metrics-file {tmp_path / 'metrics.jsonl'}")
    assert steps(tmp_path / "metrics.jsonl") == expected  # bit by bit
    assert len(expected) == 4


def test_every_evaluation_has_a_name_and_a_step_that_is_computed_again_is_logged_once(
    data, tmp_path
):
    folder = tmp_path / "run"
    flags = f"{EXACT} {data} --switch-run-dir {folder}"
    outcome = trained(flags)
    for name in ("validation loss", "validation routing"):
        assert outcome.screen.count(f" {name} at iteration 4 |") == 1
        assert outcome.screen.count(f" {name} at iteration 4 after training |") == 1
    assert outcome.screen.count(" test loss at iteration 4 |") == 1
    records = read_records(folder / "metrics.jsonl", "validation")
    assert [(one["iteration"], one["after_training"]) for one in records] == [
        (2, False),
        (4, False),
        (4, True),
    ]
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("2")  # as if the run had been killed in iteration 4, before it saved
    trained(flags)
    events = folder / "tensorboard"
    losses = {name for name in scalar_tags(events) if name.startswith("lm loss")}
    named = ("validation", "validation after training", "test")
    sequence = {"lm loss", *(f"lm loss {name}" for name in named)}
    assert losses == sequence | {f"{name} vs samples" for name in sequence}
    assert scalar_steps(events, "lm loss") == [1, 2, 3, 4]
    assert scalar_steps(events, "lm loss vs samples") == [8, 16, 24, 32]
    assert scalar_steps(events, "lm loss validation") == [2, 4]
    assert scalar_steps(events, "dropped_fraction test") == [4]
