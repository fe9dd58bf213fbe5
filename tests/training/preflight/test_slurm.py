"""A task of ``srun`` finds what torchrun would have told it."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.preflight.slurm import slurm_ranks

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "5",
}
NODES = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


def test_one_node():
    assert slurm_ranks(STEP) == {
        "RANK": "5",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "23456",
    }


def test_several_nodes_meet_where_the_user_says():
    ranks = slurm_ranks({**NODES, "SLURM_LOCALID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"})
    assert (ranks["LOCAL_RANK"], ranks["LOCAL_WORLD_SIZE"]) == ("1", "4")
    assert (ranks["MASTER_ADDR"], ranks["MASTER_PORT"]) == ("n1", "1234")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, "RANK": "0"},  # torchrun inside the step
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script itself
    ],
)
def test_nothing_is_said_where_a_launcher_or_nobody_else_is(environ):
    assert slurm_ranks(environ) == {}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (NODES, r"8 ranks on 2 nodes, .*export MASTER_ADDR=\$\(scontrol show hostnames"),
        (
            {**NODES, "MASTER_ADDR": "n1", "SLURM_STEP_TASKS_PER_NODE": "4,3,1"},
            r"same number of ranks, but srun placed 4,3,1\. Use --ntasks-per-node",
        ),
    ],
)
def test_what_is_missing_is_said(environ, message):
    with pytest.raises(ConfigError, match=message):
        slurm_ranks(environ)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"])
def test_half_of_what_srun_sets_is_refused(name):
    environ = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(ConfigError, match=f"SLURM_STEP_NUM_TASKS=8, but not .*: {name}"):
        slurm_ranks(environ)
