"""Training in every legal layout, compared with training on one rank.

On the CPU every case has fresh ranks, forked from one process, so that a case that fails takes
nothing with it. Ranks wait for each other, so several *workers*, forked processes too, each train
one case after the other, which keeps every core busy. On GPUs the number of ranks is the launcher's
(``torchrun``), the layouts are those of that number, and the ranks take one case after the other.

A reference, the run on one rank with the same meaning, comes before the first case that needs it.
Ranks compare their parts where they are, and send what they found to rank 0, never the tensors.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_switch.commands.layout_check.cases import (
    QUICK_RANKS,
    WORLD_SIZES,
    Case,
    all_cases,
    quick_cases,
)
from megatron_switch.commands.layout_check.result_table import Result, heading, lines_of, summary
from megatron_switch.commands.layout_check.training_run import Fault, run_case
from megatron_switch.commands.layout_check.values import Verdict, WholeValues, report, verdict_of
from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.emulation.launch import import_megatron
from megatron_switch.errors import ConfigError
from megatron_switch.training.arguments.parser import CommandLine, parse_command_line
from megatron_switch.upstream.private import HashStore
from megatron_switch.upstream.repairs import repaired_megatron

_TIMEOUT = timedelta(minutes=3)
"""How long ranks wait for one another before a case counts as failed."""
_PATIENCE = timedelta(minutes=30)
"""The same on GPUs, where all but one wait for the references first."""

_LEAST_WORKERS = 2
"""Cases that train at a time, at least."""
_CORES_A_WORKER = 4
"""Cores that the ranks of one case keep busy, at most."""

Device = Literal["cuda", "cpu"]
OnResult = Callable[[Result], None]
_SIGNALLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
References = Mapping[str, WholeValues]
"""By the meaning of a case."""


def check_layouts(args: Namespace) -> int:
    """Check layouts, print each result, and return 0 if all are equal, else 1."""
    if args.max_ranks < 1:
        raise ConfigError(f"--max-ranks is at least 1, got {args.max_ranks}.")

    def show(result: Result) -> None:
        lines = [result.as_json()] if args.json else lines_of(result)
        print(*lines, sep="\n", flush=True)

    on_gpus = args.device == "cuda"
    if not on_gpus and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "--device cpu forks its own ranks, and a launcher has started this one (WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}). Start check-layouts without torchrun, or use --device "
            "cuda."
        )
    ranks = _launched_ranks() if on_gpus else args.max_ranks
    if args.quick and not on_gpus:
        ranks = min(ranks, QUICK_RANKS)
    cases = all_cases(max(WORLD_SIZES) if on_gpus else ranks)
    if on_gpus:
        cases = [case for case in cases if case.layout.world_size == ranks]
    if not cases:
        raise ConfigError(
            f"Layouts are checked on {', '.join(map(str, WORLD_SIZES))} ranks, got {ranks}. Change "
            "--nproc-per-node of torchrun."
        )
    if args.quick:
        cases = quick_cases(cases)
    if not (args.json or (on_gpus and os.environ["RANK"] != "0")):
        print(heading(), flush=True)
    check = _check_on_gpus if on_gpus else check_on_cpu
    results = check(cases, show)
    if results and not args.json:
        print(summary(results), flush=True)
    return 0 if all(result.equal for result in results) else 1


def check_on_cpu(
    cases: Sequence[Case], on_result: OnResult, *, fault: Fault = lambda chunks: None
) -> list[Result]:
    """Run cases on forked ranks.

    Args:
        cases: What to run.
        on_result: Called with each result as soon as it is known, in the worker that has it.
        fault: As in :func:`~megatron_switch.commands.layout_check.training_run.run_case`;
            references have none.

    Returns:
        The results, in the order of the cases.

    Raises:
        SystemExit: A signal ended the check, or a reference failed.
    """
    import_megatron()
    num_workers = min(
        len(cases), max(_LEAST_WORKERS, len(os.sched_getaffinity(0)) // _CORES_A_WORKER)
    )
    folders = tempfile.TemporaryDirectory(prefix="switch-layouts-")
    with repaired_megatron(), folders as folder:
        work = partial(_work, _CaseQueue(cases), on_result, fault, Path(folder))
        code = launch(num_workers, work)
        if code != 0:
            raise SystemExit(code)
        return [_loaded(path) for path in sorted(Path(folder).glob("result-*"))]


class _CaseQueue:
    """Cases of which forked processes take the next one each."""

    def __init__(self, cases: Sequence[Case]) -> None:
        forking = multiprocessing.get_context("fork")
        self._cases = cases
        self._taken = forking.Value("i", 0)
        self.printing = forking.Lock()
        """Held by the process that prints, so that lines do not mix."""

    def __iter__(self) -> Iterator[tuple[int, Case]]:
        """Yield cases that no other process has, with their place among all."""
        while True:
            with self._taken.get_lock():
                index = self._taken.value
                self._taken.value += 1
            if index >= len(self._cases):
                return
            yield index, self._cases[index]


def _work(queue: _CaseQueue, on_result: OnResult, fault: Fault, folder: Path) -> None:
    """Run cases of the queue until it is empty."""
    references: dict[str, WholeValues] = {}
    for index, case in queue:
        if case.meaning not in references:
            references[case.meaning] = _shared_reference(case.reference(), folder)
        compared = partial(
            _compared,
            case,
            _parsed(case, "cpu"),  # here, once for all ranks: it takes as long as a step
            "cpu",
            references[case.meaning],
            fault=fault,
        )
        answer = folder / f"verdict-{index}"
        verdict = _on_ranks(compared, case.layout.world_size, answer)
        error = "" if verdict else "a rank failed; its traceback is on the error output"
        result = Result(case, verdict, error)
        (folder / f"result-{index:06d}").write_bytes(pickle.dumps(result))
        with queue.printing:
            on_result(result)


def _shared_reference(plain: Case, folder: Path) -> WholeValues:
    """Return what a reference computed; it trains unless a worker has trained it already."""
    path = folder / f"reference of {plain.meaning}"
    if not path.exists():
        reference = partial(_reference, plain, _parsed(plain, "cpu"), "cpu")
        own = path.with_suffix(f".{os.getpid()}")
        values = _on_ranks(reference, 1, own)
        assert values is not None, "one rank alone failed; its traceback stands above"
        own.replace(path)
    found: WholeValues = _loaded(path)
    return found


def _on_ranks(target: Callable[[], Any], num_ranks: int, answer: Path) -> Any:
    """Call ``target`` on fresh ranks and return what rank 0 returns; None if a rank fails.

    Ranks are new for every case because gloo's threads outlive groups that are destroyed. A signal
    that ends them ends the worker.
    """

    def on_rank() -> None:
        gc.disable()  # it would take a twentieth of the time, and the rank ends in seconds
        with cuda_on_cpu(), _quiet():
            dist.init_process_group("gloo", timeout=_TIMEOUT)
            found = target()
            if dist.get_rank() == 0:
                answer.write_bytes(pickle.dumps(found))
            dist.destroy_process_group()

    code = launch(num_ranks, on_rank)
    if code in _SIGNALLED:
        raise SystemExit(code)
    return None if code else _loaded(answer)


def _loaded(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _check_on_gpus(cases: Sequence[Case], on_result: OnResult) -> list[Result]:
    """Run cases on the ranks of a launcher; only rank 0 has results."""
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # which has ten bits of mantissa
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    references: References = {}
    with repaired_megatron(), _quiet():
        if os.environ["RANK"] == "0":
            references = _references_of_one_gpu(cases)
        dist.init_process_group("nccl", timeout=_PATIENCE)
        box = [references]
        dist.broadcast_object_list(box, src=0)
        results = []
        for case in cases:
            flags = _parsed(case, "cuda")
            verdict = _compared(case, flags, "cuda", box[0][case.meaning])
            if verdict is not None:
                results.append(Result(case, verdict))
                on_result(results[-1])
        dist.destroy_process_group()
    return results


def _references_of_one_gpu(cases: Sequence[Case]) -> References:
    dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
    plain = {case.meaning: case.reference() for case in cases}
    references = {
        meaning: _reference(case, _parsed(case, "cuda"), "cuda") for meaning, case in plain.items()
    }
    dist.destroy_process_group()
    return references


def _reference(case: Case, flags: CommandLine, device: Device) -> WholeValues:
    """Run a case of one rank on this one."""
    return WholeValues.of(run_case(case, flags, device))


def _compared(
    case: Case,
    flags: CommandLine,
    device: Device,
    reference: WholeValues,
    *,
    fault: Fault = lambda chunks: None,
) -> Verdict | None:
    """Run a case on these ranks; return what all of them found, on rank 0, else None."""
    mine = report(run_case(case, flags, device, fault=fault), reference)
    reports: list[Any] | None = None if dist.get_rank() else [None] * dist.get_world_size()
    dist.gather_object(mine, reports)
    if reports is None:
        return None
    return verdict_of(reports, reference if case.evaluates else reference.without("of evaluation"))


def _parsed(case: Case, device: Device) -> CommandLine:
    return parse_command_line(case.flags(device))


def _launched_ranks() -> int:
    """Return the number of ranks that a launcher has started with this one.

    Raises:
        ConfigError: If there was no launcher.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "--device cuda runs on the ranks of a launcher, and WORLD_SIZE is not set. Start it "
            "with torchrun: torchrun --nproc-per-node 8 -m megatron_switch check-layouts --device "
            "cuda."
        )
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Megatron prints and warns about for every model that it builds."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)
