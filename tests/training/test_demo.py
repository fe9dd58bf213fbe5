"""The demo's texts, from records small enough to read."""

import json

from megatron_switch.training.demo import health_bars, read_metrics, summary

FIRST = {
    "kind": "train",
    "iteration": 1,
    "lm_loss": 7.5,
    "dropped_fraction": 0.1,
    "load_balancing_loss": 1.2,
    "expert_load_max_over_mean": 2.0,
}
LAST = {
    **FIRST,
    "iteration": 200,
    "lm_loss": 4.25,
    "layers": [2, 4],
    "expert_load": [[0.5, 0.5], [0.75, 0.25]],
}


def test_summary_compares_the_first_with_the_last_training_record():
    records = [FIRST, LAST, {"kind": "validation", "iteration": 200, "lm_loss": 1.0}]
    text = summary(records, seconds=140.2, peak_bytes=3 * 2**30)
    assert "7.500 at iteration 1, 4.250 at iteration 200 (3.25 nats lower)" in text
    assert "140 s, 3.0 GiB" in text


def test_a_bar_is_as_long_as_its_load():
    lines = health_bars([FIRST, LAST]).splitlines()
    bars = [line.count("█") for line in lines[1:-1]]
    assert bars == [14, 14, 21, 7]
    assert lines[3].startswith("  layer 4 expert  0  75.0%")
    assert "50.0%, 14 marks" in lines[-1]


def test_a_line_under_way_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(FIRST) + "\n" + json.dumps(LAST)[:20])
    assert read_metrics(path) == [FIRST]
    assert read_metrics(tmp_path / "none") == []
