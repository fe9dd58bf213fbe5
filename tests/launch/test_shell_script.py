"""The rendered shell script: trains on this node's CPUs, and says what it will not start with."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_switch.commands import table

FLAGS = [
    *["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"],
    *["--seq-length", "32", "--max-position-embeddings", "32", "--num-experts", "4"],
    *["--expert-model-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "4"],
    *["--mock-data", "--vocab-size", "256", "--tokenizer-type", "NullTokenizer"],
    *["--train-iters", "2", "--eval-iters", "0", "--lr", "1e-3", "--save-interval", "100"],
]


@pytest.fixture
def script(tmp_path, capsys):
    words = ["--gpus-per-node", "2", "--run-dir", str(tmp_path / "run"), "--no-numa-binding"]
    assert table.run("render-launch", [*words, "--output", str(tmp_path), "--", *FLAGS]) == 0
    capsys.readouterr()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0'\necho 'GPU 1'\n")
    program.chmod(0o755)
    return tmp_path / "switch.sh"


def start(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{script.parent}:{os.environ['PATH']}"
    values = {**os.environ, "PYTHON": sys.executable, "PATH": path, **environment}
    return subprocess.run(
        [str(script), *words], env=values, check=False, capture_output=True, text=True
    )


@pytest.mark.torchrun
@pytest.mark.timeout(300)
def test_it_trains_with_a_preflight(script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free in a moment
    done = start(script, "--switch-device", "cpu", MASTER_PORT=str(port))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsing rank 0 of 2" in done.stdout
    run_dir = script.parent / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2]
    assert list((run_dir / "launch" / "node-0").rglob("stdout.log"))


def test_another_number_of_gpus_is_named(script):
    (script.parent / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0'\n")
    done = start(script, PREFLIGHT="gpus")
    assert done.returncode == 1
    assert "this node has 1 GPUs, but the job needs 2. Render again" in done.stderr


def test_a_program_that_fails_is_named(script):
    (script.parent / "nvidia-smi").write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    done = start(script, PREFLIGHT="gpus")
    assert done.returncode == 1
    assert "nvidia-smi --list-gpus failed: no driver" in done.stderr


def test_a_port_in_use_is_named(script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = start(script, PREFLIGHT="port", MASTER_PORT=str(server.getsockname()[1]))
    assert done.returncode == 1
    assert "for the rendezvous of ranks, is in use" in done.stderr


def test_an_unknown_check_is_named(script):
    done = start(script, PREFLIGHT="gpus everything")
    assert done.returncode == 1
    assert "PREFLIGHT accepts gpus, port and rehearsal, got everything" in done.stderr
