"""``megatron-switch check-binding``: GPU, network card and memory domain of each rank.

Alone it shows all local ranks of a host. Started once a rank (``srun megatron-switch
check-binding``, or under ``torchrun``), each rank shows its own, and whether its processors are
those of its GPU's memory domain.
"""

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_switch.errors import ConfigError
from megatron_switch.launch.binding import Binding, affinity_warning, read_bindings

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID")
_RANK = ("RANK", "SLURM_PROCID")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flag."""
    parser.description = "Show the GPU, network card and memory domain of each rank of this host."
    parser.add_argument(
        "--all", action="store_true", help="all local ranks, also where started once a rank"
    )


def run(args: Namespace) -> int:
    """Print the bindings of this host, or of this rank; 1 where a rank is bound badly.

    Raises:
        ConfigError: If the host has no GPU, or fewer than ranks.
    """
    bindings = read_bindings()
    local = _first(_LOCAL_RANK)
    if local is None or args.all:
        _print_all(bindings)
        return 0
    return _print_one(bindings, int(local))


def _print_all(bindings: Sequence[Binding]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("local rank", "GPU", "network card", "NUMA node", "card's", "processors"):
        table.add_column(column)
    for binding in bindings:
        card = binding.card
        table.add_row(
            str(binding.local_rank),
            binding.gpu.address,
            "none" if card is None else card.name,
            _domain(binding.gpu.numa_node),
            "" if card is None else _domain(card.numa_node),
            binding.processors,
        )
    console = Console(soft_wrap=True)
    console.print(socket.gethostname(), highlight=False)
    console.print(table)


def _print_one(bindings: Sequence[Binding], local_rank: int) -> int:
    # A launcher that shows each task its own GPU alone leaves one to see.
    if local_rank >= len(bindings) and len(bindings) != 1:
        raise ConfigError(
            f"Local rank {local_rank} has no GPU: {socket.gethostname()} shows {len(bindings)}. "
            "Start as many ranks on a node as it has GPUs."
        )
    binding = bindings[local_rank if len(bindings) > 1 else 0]
    card = "no network card" if binding.card is None else f"card {binding.card.name}"
    problem = affinity_warning(binding, os.sched_getaffinity(0))
    print(
        f"rank {_first(_RANK) or local_rank} on {socket.gethostname()}: GPU {binding.gpu.address}, "
        f"{card}, NUMA node {_domain(binding.gpu.numa_node)}: {problem or 'bound to its GPU'}"
    )
    return 1 if problem else 0


def _domain(numa_node: int) -> str:
    return "unknown" if numa_node < 0 else str(numa_node)


def _first(names: Sequence[str]) -> str | None:
    return next((os.environ[name] for name in names if name in os.environ), None)
