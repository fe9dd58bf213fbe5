"""Measure one Switch layer, forward and backward, beside other implementations and floors.

Every layer gets the same weights and tokens, and is checked against a plain one before it is timed.
``make bench`` prints the tables of docs/performance.md. Where it helps to look at single numbers:

    python tools/bench_layer.py --experts 64 --only "ours, packed" "Megatron-Core, padded"

The extra ``bench`` installs the other implementations.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from bench.measure import CLOCKS
from bench.problem import DTYPES, BenchError, Sizes
from bench.report import NOTE, CaseResult
from bench.run_case import NAMES, Passes, run_case
from rich.console import Console

_CPU = Sizes(experts=8)
_GPU = Sizes(experts=8, total_tokens=16384, width=2048, ffn=8192, device="cuda", dtype="bfloat16")
SUITES: dict[str, tuple[Sizes, ...]] = {
    "cpu": (
        *(replace(_CPU, experts=experts) for experts in (8, 64, 128)),
        *(replace(_CPU, experts=experts, accumulate=True) for experts in (8, 64, 128)),
        *(replace(_CPU, experts=experts, without_experts=True) for experts in (8, 128, 2048)),
        replace(_CPU, world=2, threads=1),
        replace(_CPU, world=4, threads=1),
    ),
    "gpu": (
        *(replace(_GPU, experts=experts) for experts in (8, 64, 128)),
        *(replace(_GPU, experts=experts, accumulate=True) for experts in (8, 64, 128)),
        *(replace(_GPU, experts=experts, without_experts=True) for experts in (8, 128, 2048)),
    ),
}
"""The published tables. A GPU's ranks are one a GPU: give --world where there are several."""
_WIDTH = 160  # of a row: a Markdown table cannot be broken
_VERSIONS = ("torch", "megatron-core", "transformers", "deepspeed", "transformer-engine")


def parser() -> argparse.ArgumentParser:
    """Return the parser of this program's command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, help="the published tables; of the sizes only --threads counts")
    add("--experts", type=int, nargs="+", default=[8], help="experts of the layer, a case for each")
    add("--tokens", type=int, default=_CPU.total_tokens, help="tokens of all ranks together")
    add("--width", type=int, default=_CPU.width, help="model width")
    add("--ffn", type=int, default=_CPU.ffn, help="hidden width of an expert")
    add("--capacity-factor", type=float, default=_CPU.capacity_factor)
    add("--world", type=int, default=1, help="expert-parallel ranks, on this host")
    add("--threads", type=int, help="of a rank; default: what the suite says, else 2")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL between ranks")
    add("--dtype", choices=DTYPES, default=_CPU.dtype)
    add("--without-experts", action="store_true", help="only multiply each row by its gate")
    add("--accumulate", action="store_true", help="add gradients to buffers, as Megatron does")
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="LAYER", help=", ".join(NAMES))
    add("--rounds", type=int, default=10, help="passes that are timed")
    add("--warmup", type=int, default=2, help="passes before them")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads; on a busy machine")
    add("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser


def cases_of(args: argparse.Namespace) -> tuple[Sizes, ...]:
    """Return the sizes that the command line asks for.

    Raises:
        BenchError: They have no meaning.
    """
    threads = {} if args.threads is None else {"threads": args.threads}
    if args.suite:
        return tuple(replace(sizes, **threads) for sizes in SUITES[args.suite])
    return tuple(
        Sizes(
            experts=experts,
            total_tokens=args.tokens,
            width=args.width,
            ffn=args.ffn,
            capacity_factor=args.capacity_factor,
            world=args.world,
            device=args.device,
            dtype=args.dtype,
            without_experts=args.without_experts,
            accumulate=args.accumulate,
            **threads,
        )
        for experts in args.experts
    )


def as_json(results: list[CaseResult]) -> dict[str, Any]:
    """Return all numbers, and what they were measured with."""
    return {
        "versions": {name: _version(name) for name in _VERSIONS},
        "threads_of_host": torch.get_num_threads(),
        "cases": [result.as_json() for result in results],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return 2 where the user has to change something."""
    args = parser().parse_args(argv)
    console = Console(width=_WIDTH, highlight=False)
    results = []
    try:
        how = Passes(args.rounds, args.warmup, args.clock)
        for sizes in cases_of(args):
            print(f"Measuring {sizes.title} ...", file=sys.stderr, flush=True)
            results.append(run_case(sizes, how, only=args.only))
            results[-1].print(console)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(NOTE)
    if args.json:
        args.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
