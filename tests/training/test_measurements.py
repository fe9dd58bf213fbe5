"""What is logged of a step is the same whatever goes on around it."""

import pytest
from support.tiny_run import EXACT, read_records, trained

pytestmark = pytest.mark.slow

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
AROUND = {
    "no evaluation": "--eval-iters 0",
    "lines of several steps": "--log-interval 3",
    "recomputed": RECOMPUTE,
    "only experts recomputed": "--recompute-granularity selective --recompute-modules moe",
}
OF_THE_CLOCK = {"tokens_per_second"}


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
