"""Run a function on several gloo ranks inside one test.

Ranks are forked, not spawned: two start in 0.1 s instead of 5 s, and inherit what
the parent imported. That is safe because nothing here touches CUDA and each child
turns off intra-op threads before its first operation. Ranks meet in a file, so no
port is needed, and a rank that raises reaches the test with its own traceback.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

_TIMEOUT = timedelta(seconds=100)
_start_processes: Callable[..., object] = start_processes


def run_ranks(worker: Callable[..., None], world_size: int, *args: object) -> None:
    """Call ``worker(rank, *args)`` on ``world_size`` gloo ranks.

    Each rank has torch's default process group, one intra-op thread, the same seed,
    and ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` in its environment.

    Args:
        worker: Function run on every rank; it may assert and raise freely.
        world_size: Number of ranks, at least 1.
        *args: Values handed to every rank unchanged.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank raised; the message
            holds that rank's traceback.
    """
    with tempfile.TemporaryDirectory(prefix="switch-ranks-") as folder:
        store = Path(folder) / "store"
        _start_processes(
            _enter_rank, (world_size, store, worker, args), nprocs=world_size, start_method="fork"
        )


def _enter_rank(
    rank: int, world_size: int, store: Path, worker: Callable[..., None], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1234)  # Same seed on every rank: ranks differ only where a test says so.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    try:
        worker(rank, *args)
    finally:
        dist.destroy_process_group()
