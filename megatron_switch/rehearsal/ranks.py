"""Rehearsals of several ranks, each in a process of its own that is forked from this one.

A process can be one rank only: groups, random states and Megatron's globals are per process. The
parent imports what the ranks need, so that a rank starts at once.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import Sizes
from megatron_switch.rehearsal.dry_run import DryRun
from megatron_switch.rehearsal.observer import Observation
from megatron_switch.rehearsal.report import RankReport, rank_report
from megatron_switch.training.loop.session import rehearse

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Launch:
    """The launch that is rehearsed.

    Attributes:
        world_size: Ranks.
        ranks_per_node: Ranks on each node.
        flags: Flags of ``megatron-switch train``.
    """

    world_size: int
    ranks_per_node: int
    flags: tuple[str, ...]

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a launcher puts into a rank's environment, without any GPU."""
        queues = os.environ.get(_QUEUES, "8")  # CUDA's default
        sharded = {_QUEUES: queues} if "--use-megatron-fsdp" in self.flags else {}
        return sharded | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(min(self.ranks_per_node, self.world_size)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "CUDA_VISIBLE_DEVICES": "",  # on a GPU node, use no GPU
        }


def sample(sizes: Sizes) -> list[int]:
    """Return ranks that represent all: first, last, and the first of each pipeline stage.

    Where the sizes form no layout it is rank 0 alone, whose session then raises the error.
    """
    try:
        layout = Layout.of(sizes)
    except LayoutError:
        return [0]
    firsts = [layout.dense_rank(pp=stage) for stage in range(layout.pp)]
    return sorted({*firsts, layout.world_size - 1})


def rehearse_ranks(launch: Launch, ranks: Sequence[int]) -> Iterator[RankReport]:
    """Yield the report of each rank, in the order of ``ranks``, one after another.

    Args:
        launch: The launch.
        ranks: Ranks to rehearse.

    Raises:
        SwitchError: What the launch would raise, or what cannot be rehearsed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in ranks:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            yield process.submit(_rehearse_one, launch, rank).result()


def _rehearse_one(launch: Launch, rank: int) -> RankReport:
    os.environ.update(launch.environment(rank))
    torch.set_num_threads(1)
    found: list[RankReport] = []

    def keep(observation: Observation, notes: Sequence[str], args: Any) -> None:
        found.append(
            rank_report(
                observation,
                ranks_per_node=launch.ranks_per_node,
                num_experts=args.num_experts,
                notes=notes,
            )
        )

    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        for target in (1, 2):  # what C code prints
            os.dup2(output.fileno(), target)
        try:
            rehearse(launch.flags, DryRun(keep))
        except SystemExit as exit_:
            if not found:
                raise RuntimeError(_ended(rank, exit_, output)) from exit_
        except RuntimeError as error:
            sys.stdout.flush()
            output.seek(0)
            error.add_note(f"Rank {rank} of the rehearsal printed:\n{output.read()[-4000:]}")
            raise
    return found[0]


def _ended(rank: int, exit_: SystemExit, output: Any) -> str:
    sys.stdout.flush()
    output.seek(0)
    return f"Rank {rank} ended with code {exit_.code} before its step:\n{output.read()[-4000:]}"
