"""Launches that are watched: rehearsed on fake tensors, and run for real over gloo.

Each in a forked process of its own, which inherits what the test process has imported.
"""

import multiprocessing
import pickle
import shlex
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from megatron_switch.emulation.launch import import_megatron, launch
from megatron_switch.rehearsal.dry_run import ObservedRun
from megatron_switch.rehearsal.ranks import Launch, rehearse_ranks
from megatron_switch.rehearsal.report import rank_report
from megatron_switch.training.loop.session import rehearse

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 16 --train-iters 4 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --clip-grad 1e-4"
)
"""A small model whose every step is clipped, as a rehearsed one is."""

SPARSE = f"{TINY} --num-experts 4"


def rehearsed(flags, *, world_size=1, ranks=(0,)):
    """Return the reports of rehearsed ranks."""
    import_megatron()
    return list(rehearse_ranks(Launch(world_size, 8, tuple(shlex.split(flags))), ranks))


def observed(flags, *, world_size=1):
    """Return the reports of all ranks of a real run."""
    import_megatron()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(_observe, shlex.split(flags), world_size).result()


def _observe(flags, world_size):
    with tempfile.TemporaryDirectory(prefix="switch-observed-") as folder:

        def keep(observation, notes, args):
            report = rank_report(observation, ranks_per_node=8, num_experts=args.num_experts)
            (Path(folder) / f"{report.rank}").write_bytes(pickle.dumps(report))

        assert launch(world_size, lambda: rehearse(flags, ObservedRun(keep))) == 0
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(world_size)]
