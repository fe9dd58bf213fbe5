"""What a launcher says of this rank: checked once, so that everyone may read it as it stands.

torchrun, SLURM (:mod:`megatron_switch.training.preflight.slurm`) and the forking launcher set the
same variables. Half of them, or something that is no number, would otherwise end in a rendezvous
that nobody attends or in an exception far from its cause.
"""

import errno
import socket
from collections.abc import Mapping

from megatron_switch.errors import ConfigError

_NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Variables, with their least value."""
_HOSTS = {"SLURM_JOB_NUM_NODES": 1}
_ALL = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


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
