"""Half of what a launcher sets is an error; a task of srun gets what torchrun would have set."""

import socket

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.preflight.launcher import (
    check_meeting_port,
    check_rank_environment,
    slurm_ranks,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    "environ", [{}, TORCHRUN, {"RANK": "0"}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}]
)
def test_what_launchers_set_is_accepted(environ):
    check_rank_environment(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "abc"}, "RANK to a whole number of at least 0, but .* RANK=abc"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE to a whole number of at least 1"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE=x"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        ({"SLURM_JOB_NUM_NODES": "x"}, "SLURM_JOB_NUM_NODES=x"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({"WORLD_SIZE": None}, r"RANK=3 and WORLD_SIZE=\(not set, so 1\)"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=4, but not .*: MASTER_ADDR. Start with torchrun"),
        ({"RANK": None, "LOCAL_RANK": None}, "but not .*: RANK, LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "3"}, "same number of ranks, but this one has 3 of 4.*nproc-per-nod"),
        ({"LOCAL_RANK": "0"}, "rank 3 is number 0 of the 2 on its node.*--distribution=block"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    environ = {**TORCHRUN, **changes}
    with pytest.raises(ConfigError, match=message):
        check_rank_environment({k: v for k, v in environ.items() if v is not None})


@pytest.fixture
def used_port():
    with socket.create_server(("", 0)) as server:
        yield str(server.getsockname()[1])


def test_a_meeting_port_in_use_is_named(used_port):
    environ = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": used_port}
    with pytest.raises(ConfigError, match=rf"meet at n1:{used_port}, .* Give MASTER_PORT another"):
        check_meeting_port(environ)


@pytest.mark.parametrize(
    "changes",
    [{"RANK": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"WORLD_SIZE": "1"}],
    ids=str,
)
def test_only_who_opens_the_port_looks_at_it(used_port, changes):
    check_meeting_port({**TORCHRUN, "RANK": "0", "MASTER_PORT": used_port, **changes})


STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "5",
}
NODES = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


def test_ranks_of_one_node_meet_on_it():
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
