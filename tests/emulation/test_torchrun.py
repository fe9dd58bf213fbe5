"""Forked ranks and torchrun's compute the same, bit for bit, and end with equal random states.

A fork inherits modules that copied names of torch before the emulation replaced them; with one
such name left, every fork of a random state was a no-op, and nothing but the numbers told.
"""

import os
import subprocess
import sys

import pytest
from support import stock_pretrain

FLAGS = f"""
    {stock_pretrain.MOE_FLAGS} --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
    --hidden-dropout 0.1 --attention-dropout 0.1
"""


@pytest.mark.torchrun
@pytest.mark.timeout(300)
def test_forked_ranks_equal_those_of_torchrun(tmp_path):
    forked, alone = tmp_path / "forked", tmp_path / "torchrun"
    forked.mkdir()
    alone.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", stock_pretrain.__file__, FLAGS, str(alone)]
    ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    # Megatron's warning when a fork of the CUDA stream moves the host's on: once per dropout here.
    assert "CPU RNG state changed" not in ended.stdout + ended.stderr

    records = stock_pretrain.train(2, FLAGS, forked)
    assert records == stock_pretrain.read_records(2, alone)

    first, second = (record.random_states for record in records)
    assert {"python", "numpy", "host", "cuda", "expert-parallel-rng"} <= first.keys()
    # The ranks of a tensor group share the default CUDA stream; only one of them loads data.
    assert first["cuda"] == second["cuda"]
    assert first["host"] != second["host"]
    assert first["model-parallel-rng"] != second["model-parallel-rng"]


def _environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"OMP_NUM_THREADS": "1"}
