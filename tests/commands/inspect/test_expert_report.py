"""What each expert is for: which text is read, and what cannot be asked."""

import re

import pytest
from support.tiny_run import SPARSE, run_command, trained

from megatron_switch.commands import table
from megatron_switch.errors import ConfigError

ON_CPU = ["--switch-device", "cpu"]


@pytest.mark.parametrize("flag", ["--sequences", "--num-tokens", "--min-count"])
def test_counts_begin_with_one(flag):
    with pytest.raises(ConfigError, match=f"{flag} must be at least 1, got 0"):
        table.run("experts", ["--load", "gone", flag, "0"])


@pytest.mark.slow
def test_text_of_training_or_other_text_is_looked_at(data, tmp_path):
    folder = tmp_path / "run"
    prefix = data.split()[1]
    words = tmp_path / "list.txt"
    words.write_text(prefix)
    flags = f"{SPARSE} --data-args-path {words} --split 80,10,10 --train-iters 1"
    trained(f"{flags} --switch-run-dir {folder}")

    def table(*more):
        return run_command("experts", "--load", str(folder), *ON_CPU, "--min-count", "1", *more)

    outcome = table("--sequences", "30")
    assert outcome.code == 0, outcome.errors
    shares = re.findall(r"│ (\d) +│ +([\d.]+)% │", outcome.screen)
    assert [expert for expert, _ in shares] == ["0", "1", "2", "3"]
    assert sum(float(share) for _, share in shares) == pytest.approx(100.0, abs=0.3)
    assert table("--sequences", "30", "--data-path", prefix).screen == outcome.screen

    refused = table("--data-path", "gone")
    assert refused.code == 2
    assert re.search(r"error: Data path gone needs gone\.idx", refused.errors)
