"""The script for a GPU runs through on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.sh"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_step_works_without_a_gpu(tmp_path):
    environ = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", SCRIPT, tmp_path / "out"], env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.rstrip().endswith("all of it worked on cpu")
    assert (tmp_path / "out" / "run" / "resume.sh").exists()


STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$CALLS"
"""


def test_on_gpus_each_command_is_started_as_it_asks_for(tmp_path):
    for name in ("python", "nvidia-smi"):
        stub = tmp_path / name
        stub.write_text(STUB)
        stub.chmod(0o755)
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "metrics.jsonl").write_text("{}\n")
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "DEVICE": "cuda",
        "PYTHON": str(tmp_path / "python"),
    }
    run = subprocess.run(
        ["bash", SCRIPT, tmp_path / "out"], env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    (check,) = [call for call in calls if "check-layouts" in call]
    # Without a launcher it refuses: it runs on the ranks of torchrun.
    assert check == (
        "-m torch.distributed.run --standalone --nproc-per-node 1 -m megatron_switch check-layouts "
        "--max-ranks 1 --device cuda"
    )
    assert sum("-m megatron_switch train" in call for call in calls) == 2
    assert "-m megatron_switch generate" in calls[-1]


def test_a_flag_is_not_taken_for_a_folder():
    run = subprocess.run(["bash", SCRIPT, "--what"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "--what is no folder; --help says what there is" in run.stderr
