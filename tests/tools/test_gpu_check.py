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
