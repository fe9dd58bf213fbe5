"""Ranks that SLURM's ``srun`` started itself, without torchrun.

Megatron takes a process that has no ``RANK`` for the only one. A step of eight tasks would then be
eight trainings that write into one folder. :func:`slurm_ranks` says what torchrun would have put
into the environment, from what SLURM puts there.
"""

import re
from collections.abc import Mapping

from megatron_switch.errors import ConfigError

_READ = (
    "SLURM_JOB_ID",
    "SLURM_LOCALID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
)
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below the ports that Linux hands out by itself


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
    missing = [name for name in _READ if name not in environ]
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
