"""What a launcher says of this rank: checked once, so that everyone may read it as it stands.

torchrun, SLURM (:mod:`megatron_switch.training.slurm`) and the forking launcher set the same
variables. Half of them, or something that is no number, would otherwise end in a rendezvous that
nobody attends or in an exception far from its cause.
"""

from collections.abc import Mapping

from megatron_switch.errors import ConfigError

_NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Variables, with their least value."""
_ALL = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


def check_rank_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the variables of a launcher contradict one another.

    Args:
        environ: The process environment.
    """
    for name, least in _NUMBERS.items():
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


_WAY_OUT = (
    "Start with torchrun or megatron-switch launch-local, which set them all, or unset "
    f"{', '.join(_ALL)} to train on one rank."
)
