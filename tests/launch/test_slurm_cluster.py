"""Rendered sbatch files on a real SLURM: two nodes of two ranks on this host's CPUs.

A run that meets its time limit saves, goes back into the queue, continues and ends with the losses
of a run that was never interrupted.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.slurm_cluster import running_cluster

ROOT = Path(__file__).parents[2]
ITERATIONS = 700  # more than the 90 s until the signal, on a fast machine too
FLAGS = [
    *["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"],
    *["--seq-length", "64", "--max-position-embeddings", "64", "--num-experts", "4"],
    *["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    *["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"],
    *["--micro-batch-size", "4", "--global-batch-size", "16", "--lr", "1e-3"],
    *["--hidden-dropout", "0", "--attention-dropout", "0", "--mock-data", "--vocab-size", "256"],
    *["--tokenizer-type", "NullTokenizer", "--split", "98,1,1", "--eval-iters", "0"],
    *["--train-iters", str(ITERATIONS), "--save-interval", "1000"],
]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster():
    # Not in tmp_path: the name of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # for munge, which runs as another user
    try:
        with running_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


def render(folder: Path, *words: str, flags: list[str] | None = None) -> Path:
    command = [sys.executable, "-m", "megatron_switch", "render-launch", "--nodes", "2"]
    command += ["--gpus-per-node", "2", "--run-dir", str(folder / "run"), "--output", str(folder)]
    subprocess.run([*command, *words, "--", *(flags or FLAGS)], check=True)
    return folder / "switch.sbatch"


def gpus_for_show(folder: Path, *, on_second: int = 2) -> str:
    """Return a PATH whose nvidia-smi lists two GPUs on n1."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "nvidia-smi"
    program.write_text(
        "#!/usr/bin/env bash\n"
        f"[[ $SLURMD_NODENAME == n2 ]] && count={on_second} || count=2\n"
        'seq "$count"\n'
    )
    program.chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


def losses(metrics: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run by the forking launcher, without SLURM."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [sys.executable, "-m", "megatron_switch", "launch-local", "-n", "4", *FLAGS]
    subprocess.run([*command, "--switch-run-dir", str(folder / "run")], check=True)
    return losses(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("shape", ["srun", "torchrun"])
def test_a_time_limit_saves_and_requeues_the_run(cluster, uninterrupted, tmp_path, shape):
    # SLURM looks every 30 s, so the signal comes 60 to 90 s after the start.
    words = ["--shape", shape, "--time", "2", "--save-seconds", "30"]
    # One torchrun looks for the GPUs that it binds to.
    words += ["--no-numa-binding"] if shape == "torchrun" else []
    script = render(tmp_path, *words)
    job = cluster.submit(
        str(script),
        "--switch-device",
        "cpu",
        PREFLIGHT="gpus port rehearsal" if shape == "srun" else "",
        PATH=gpus_for_show(tmp_path),
        PYTHON=sys.executable,
        MASTER_ADDR="127.0.0.1",
    )
    cluster.wait_for_restart(job, seconds=150)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    state = cluster.wait(job, seconds=600)
    said = (cluster.folder / f"switch-{job}.out").read_text()
    assert state == "COMPLETED", said
    assert "signalling all ranks to save" in said
    assert "requeueing" in said
    assert "training has ended" in said
    logs = (tmp_path / "run" / "launch").glob("*.log")
    assert any("successfully loaded checkpoint" in log.read_text() for log in logs)
    found = losses(tmp_path / "run" / "metrics.jsonl")
    assert [iteration for iteration, _ in found] == list(range(1, ITERATIONS + 1))
    assert found == uninterrupted


def test_a_run_that_fails_goes_on_only_where_it_has_saved(cluster, tmp_path):
    script = render(tmp_path)
    witness = tmp_path / "python"  # instead of a training: saves in its first run, fails in both
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    witness.write_text(
        "#!/usr/bin/env bash\n"
        f"mkdir -p {tracker.parent} && echo 7 >{tracker}\n"
        "[[ $SLURM_PROCID != 1 ]] || exit 3\n"
    )
    witness.chmod(0o755)
    job = cluster.submit(str(script), PREFLIGHT="", PYTHON=str(witness))
    assert cluster.wait(job, seconds=150) == "FAILED"
    said = (cluster.folder / f"switch-{job}.out").read_text()
    assert "; saved: iteration 7, at the start of this run: nothing" in said
    assert said.count("requeueing") == 1
    assert "this run saved no checkpoint, so it is not requeued" in said


def test_nodes_with_different_gpu_counts_are_named(cluster, tmp_path):
    script = render(tmp_path)
    path = gpus_for_show(tmp_path, on_second=1)
    job = cluster.submit(str(script), PREFLIGHT="gpus", PATH=path, PYTHON=sys.executable)
    assert cluster.wait(job, seconds=60) == "FAILED"
    said = (cluster.folder / f"switch-{job}.out").read_text()
    assert "every node must have 2 GPUs, but these differ (node: GPUs): n2: 1." in said
    assert "sbatch --exclude" in said


def test_a_port_in_use_is_named(cluster, tmp_path):
    script = render(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        job = cluster.submit(
            str(script), PREFLIGHT="port", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        assert cluster.wait(job, seconds=60) == "FAILED"
    said = (cluster.folder / f"switch-{job}.out").read_text()
    assert f"port {port} of 127.0.0.1, for the rendezvous of ranks, is in use" in said
    assert "MASTER_PORT=" in said


def test_what_the_launch_would_refuse_fails_in_the_rehearsal(cluster, tmp_path):
    script = render(tmp_path, flags=[*FLAGS, "--mtp-num-layers", "1"])
    job = cluster.submit(str(script), PREFLIGHT="rehearsal", PYTHON=sys.executable)
    assert cluster.wait(job, seconds=120) == "FAILED"
    said = (cluster.folder / f"switch-{job}.out").read_text()
    assert "the rehearsal failed" in said
    assert "--mtp-num-layers" in said


@pytest.mark.parametrize("shape", ["srun", "torchrun"])
def test_ranks_fill_nodes_in_the_order_of_a_host_file(cluster, tmp_path, shape):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("n2\nn2\nn1\nn1\n")
    script = render(tmp_path, "--hostfile", str(hosts), "--shape", shape)
    witness = tmp_path / "python"  # instead of a training: says who was started where
    witness.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$SLURM_PROCID $SLURMD_NODENAME $MASTER_ADDR" >>{tmp_path}/places.txt\n'
    )
    witness.chmod(0o755)
    job = cluster.submit(str(script), PREFLIGHT="", PYTHON=str(witness))
    state = cluster.wait(job, seconds=60)
    assert state == "COMPLETED", (cluster.folder / f"switch-{job}.out").read_text()
    places = sorted((tmp_path / "places.txt").read_text().splitlines())
    if shape == "srun":
        assert places == ["0 n2 n2", "1 n2 n2", "2 n1 n2", "3 n1 n2"]
    else:
        assert places == ["0 n2 n2", "1 n1 n2"]
