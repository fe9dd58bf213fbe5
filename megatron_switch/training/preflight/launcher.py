"""What started this process: torchrun, SLURM's ``srun`` or the forking launcher.

All three set the same variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ...), which are checked
once, so that the rest of the program may rely on them. An incomplete set, or a value that is no
number, would otherwise end in a rendezvous without end or in an exception far from its cause.

``srun`` sets variables of its own. Megatron takes a process without ``RANK`` for the only one, and
a step of eight tasks would be eight trainings that write into one folder, so :func:`slurm_ranks`
translates them first.
"""

import errno
import re
import socket
from collections.abc import Mapping

from megatron_switch.errors import ConfigError

_SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_LOCALID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
)
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below the ports that Linux hands out by itself
_NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Variables, with their least value."""
_HOSTS = {"SLURM_JOB_NUM_NODES": 1}
_ALL = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


def slurm_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this rank; none where there is a launcher, or one task only.

    Args:
        environ: The process environment.

    Raises:
        ConfigError: The step has several nodes and nothing says where rank 0 is, its nodes have
            different numbers of tasks, or SLURM's variables are incomplete.
    """
    world_size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environ or world_size == "1":
        return {}
    missing = [name for name in _SLURM_VARIABLES if name not in environ]
    if missing:
        raise ConfigError(
            f"The environment has SLURM_STEP_NUM_TASKS={world_size}, but not what else srun sets: "
            f"{', '.join(missing)}. Start with srun or torchrun, or unset SLURM_STEP_NUM_TASKS."
        )
    address = environ.get("MASTER_ADDR")
    if address is None and environ["SLURM_STEP_NUM_NODES"] != "1":
        raise ConfigError(
            f"srun started {world_size} ranks on {environ['SLURM_STEP_NUM_NODES']} nodes, and "
            "nothing says where they meet. Before srun: export MASTER_ADDR=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    tasks = environ["SLURM_STEP_TASKS_PER_NODE"]
    local_size = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)
    if local_size is None:
        raise ConfigError(
            f"Every node needs the same number of ranks, but srun placed {tasks}. Use "
            "--ntasks-per-node."
        )
    port = _FIRST_PORT + int(environ["SLURM_JOB_ID"]) % _NUM_PORTS
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_size[1],
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def check_rank_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the variables of a launcher contradict one another.

    Args:
        environ: The process environment.
    """
    for name, least in (_NUMBERS | _HOSTS).items():
        value = environ.get(name, str(least))
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(
                f"A launcher sets {name} to a whole number of at least {least}, but the "
                f"environment has {name}={value}. {_WAY_OUT}"
            )
    ranks, rank = int(environ.get("WORLD_SIZE", "1")), int(environ.get("RANK", "0"))
    if rank >= ranks:
        raise ConfigError(
            f"Ranks count from 0 to WORLD_SIZE - 1, but the environment has RANK={rank} and "
            f"WORLD_SIZE={environ.get('WORLD_SIZE', '(not set, so 1)')}. {_WAY_OUT}"
        )
    missing = [name for name in _ALL if name not in environ and name != "LOCAL_WORLD_SIZE"]
    if ranks > 1 and missing:
        raise ConfigError(
            f"The environment has WORLD_SIZE={ranks}, but not what else a launcher sets: "
            f"{', '.join(missing)}. {_WAY_OUT}"
        )
    _check_nodes(environ, rank, ranks)


def check_meeting_port(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this rank is to open the port where ranks meet, and cannot.

    Args:
        environ: The process environment, checked.
    """
    # torchrun opens the port itself, and its ranks only connect.
    under_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ.get("RANK") != "0" or environ.get("WORLD_SIZE", "1") == "1" or under_torchrun:
        return
    port = environ["MASTER_PORT"]
    try:
        with socket.create_server(("", int(port))):
            pass
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"The ranks meet at {environ['MASTER_ADDR']}:{port}, and another program of this host "
            "uses that port: a second job, or what is left of an earlier one. Give MASTER_PORT "
            "another value, the same on all nodes."
        ) from error


def _check_nodes(environ: Mapping[str, str], rank: int, ranks: int) -> None:
    """Raise ConfigError unless nodes have the same number of ranks, one node after another."""
    here = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if "LOCAL_WORLD_SIZE" not in environ or "LOCAL_RANK" not in environ:
        return
    if ranks % here:
        raise ConfigError(
            f"Every node needs the same number of ranks, but this one has {here} of {ranks}. Start "
            "as many on each node (torchrun's --nproc-per-node, SLURM's --ntasks-per-node)."
        )
    if rank % here != int(environ["LOCAL_RANK"]):
        raise ConfigError(
            f"Ranks fill nodes one after another, but rank {rank} is number "
            f"{environ['LOCAL_RANK']} of the {here} on its node. Start with SLURM's "
            "--distribution=block and as many ranks on each node."
        )


_WAY_OUT = (
    "Start with torchrun or megatron-switch launch-local, which set them all, or unset "
    f"{', '.join(_ALL)} to train on one rank."
)
