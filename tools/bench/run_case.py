"""One case from start to end: start ranks, build candidates, check them, measure them.

Ranks are forked over gloo and NCCL alike: nothing here asks for a GPU before the fork.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from bench.accumulate import GradientBuffers
from bench.candidate import Candidate
from bench.check import Agreement, check
from bench.floors import (
    build_dense_floor,
    build_padded_floor,
    build_plain,
    build_router_floor,
    plain_routing,
)
from bench.layers import BUILDERS, ONE_RANK, cpu_answers, missing_package
from bench.measure import Times, phases_ms, time_all
from bench.memory import Memory, memory_of
from bench.problem import BenchError, Problem, Sizes
from bench.report import CaseResult, Row

NAMES = (*BUILDERS, "plain torch")
_TIMEOUT = timedelta(minutes=10)
_PHASE_ROUNDS = 3


@dataclass(frozen=True)
class Passes:
    """How often a layer runs, and which clock is read."""

    rounds: int = 10
    """Passes that are timed."""
    warmup: int = 2
    """Passes before them."""
    clock: str = "wall"
    """A name of :data:`bench.measure.CLOCKS`."""

    def __post_init__(self) -> None:
        """Refuse what measures nothing.

        Raises:
            BenchError: No pass is timed.
        """
        if self.rounds < 1:
            raise BenchError(f"Timing takes at least 1 pass, got --rounds {self.rounds}.")


def run_case(
    sizes: Sizes,
    how: Passes,
    *,
    only: Sequence[str] = NAMES,
) -> CaseResult:
    """Measure one set of sizes on ranks of this host.

    Args:
        sizes: What to measure.
        how: How often.
        only: Layers that take part; floors always do.

    Returns:
        What rank 0 measured.

    Raises:
        BenchError: The sizes do not fit memory, or a layer computes something else.
        torch.multiprocessing.ProcessRaisedException: A rank raised.
    """
    if sizes.device == "cpu":  # another device is asked by its ranks, after the fork
        sizes.check_memory()
    with tempfile.TemporaryDirectory(prefix="switch-bench-") as folder:
        result = Path(folder) / "result.json"
        start_processes(
            _rank,
            (sizes, how, tuple(only), Path(folder) / "store", result),
            nprocs=sizes.world,
            start_method="fork",
        )
        return CaseResult.read(result)


def _rank(
    rank: int, sizes: Sizes, how: Passes, only: tuple[str, ...], store: Path, result: Path
) -> None:
    torch.set_num_threads(sizes.threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(sizes.world))
    on_gpu = sizes.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
        sizes.check_memory()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=sizes.world,
        timeout=_TIMEOUT,
    )
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        if not on_gpu:
            stack.enter_context(cpu_answers())
        measured = measure(Problem(sizes, rank), how=how, only=only)
        if rank == 0:
            measured.write(result)


def measure(problem: Problem, *, how: Passes, only: Sequence[str]) -> CaseResult:
    """Check and measure on this rank; all ranks must call.

    Args:
        problem: This rank's problem.
        how: How often.
        only: Layers that take part.
    """
    sizes = problem.sizes
    reasons = {name: reason for name in only if (reason := _reason_to_leave_out(name, sizes))}
    layers = [_build(name, problem) for name in only if name not in reasons]
    agreements = {layer.name: check(layer, problem) for layer in layers}
    x_TD = problem.tokens_of(problem.rank)
    kept = int(plain_routing(x_TD, problem.router_ED, sizes.capacity).kept_T.sum())
    candidates = [*layers, *_floors(problem, kept)]
    if sizes.accumulate:
        buffers = GradientBuffers(problem)
        for candidate in candidates:
            buffers.attach(candidate)
    times = time_all(candidates, problem, **asdict(how))
    rows = [
        _row(
            candidate,
            times[candidate.name],
            memory_of(candidate, problem),
            phases_ms(candidate, problem, rounds=_PHASE_ROUNDS, clock=how.clock),
            agreements.get(candidate.name),
        )
        for candidate in candidates
    ]
    left_out = [Row(name, reason) for name, reason in reasons.items()]
    return CaseResult(sizes.title, asdict(sizes), sizes.tokens, kept, [*rows, *left_out])


def _reason_to_leave_out(name: str, sizes: Sizes) -> str | None:
    if sizes.world > 1 and name in ONE_RANK:
        return "has no expert parallelism"
    return missing_package(name)


def _build(name: str, problem: Problem) -> Candidate:
    return build_plain(problem) if name == "plain torch" else BUILDERS[name](problem)


def _floors(problem: Problem, kept_rows: int) -> list[Candidate]:
    if problem.sizes.without_experts:
        return [build_router_floor(problem)]
    return [build_dense_floor(problem, kept_rows), build_padded_floor(problem)]


def _row(
    candidate: Candidate,
    times: Times,
    memory: Memory,
    phases: dict[str, float],
    agreement: Agreement | None,
) -> Row:
    return Row(
        name=candidate.name,
        differs=candidate.differs,
        median_ms=times.median_ms,
        minimum_ms=times.minimum_ms,
        kept_outside_bytes=memory.kept_outside,
        kept_bytes=memory.kept,
        peak_bytes=memory.peak,
        error=None if agreement is None else agreement.error,
        phases_ms=phases,
    )
