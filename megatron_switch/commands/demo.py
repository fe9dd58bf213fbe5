"""``megatron-switch demo``: prepare real text, train a small Switch GPT on CPU ranks, look inside.

Nothing here is special to the demo except the sizes: it does what the commands of a user would do,
trains in a process of its own, and then shows what the output holds. The corpus is the running
Python's standard library, so nothing is downloaded. Where no terminal shows a bar, a line now and
then says how far it is. Training that was stopped before its end is not looked at: what was saved
can be continued, and the exit code is 1, or 130 after Ctrl-C.

Megatron is imported only to look inside: it sets up logging, which would print messages during the
preparation, and a help text need not wait for it.
"""

import json
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from megatron_switch.commands import table
from megatron_switch.errors import ConfigError, SwitchError
from megatron_switch.utils.progress import steps_bar
from megatron_switch.utils.units import size_text

NUM_RANKS = 4
_POLL_S = 0.5
_ITERATIONS_A_LINE = 20  # where there is no terminal for a bar
_S_PER_ITERATION, _S_AROUND = 1.3, 60.0  # measured on two cores, with the vocabulary's default size
_MODEL_FLAGS = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm
    --disable-bias-linear --num-experts 8 --moe-z-loss-coeff 1e-3
"""
_LAYOUT_FLAGS = """
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --use-distributed-optimizer --switch-device cpu
"""
_TRAINING_FLAGS = """
    --micro-batch-size 8 --global-batch-size 16 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.1 --clip-grad 1.0 --weight-decay 0.01 --hidden-dropout 0
    --attention-dropout 0 --eval-interval 1000 --eval-iters 4 --split 98,1,1 --log-interval 10
"""
_FAIR_MARKS, _MOST_MARKS = 14, 48  # of a bar: for a fair share, and at most, on 80 columns
_STOPPED = 1  # exit code


def add_arguments(parser: ArgumentParser) -> None:
    """Add the demo's few flags."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="folder for data and run"
    )
    parser.add_argument("--iterations", type=int, default=200, help="training iterations")
    parser.add_argument("--vocab-size", type=int, default=2048, help="SentencePiece vocabulary")
    parser.add_argument("--prompt", default="def read(self, ", help="prompt of the sample")


def run(args: Namespace) -> int:
    """Prepare, train, report; returns the exit code.

    Raises:
        ConfigError: A flag that would only fail after the preparation.
    """
    if args.iterations < 1:
        raise ConfigError(f"--iterations must be at least 1, got {args.iterations}.")
    screen = Console()
    data, folder = args.output / "data", args.output / "run"
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output {args.output} cannot be made: {error}. Give a folder that can be written."
        ) from error
    screen.rule("1. Text: the Python standard library")
    table.run("prepare", ["--stdlib", "--vocab-size", str(args.vocab_size), "--output", str(data)])
    flags = [
        *shlex.split(_MODEL_FLAGS),
        *shlex.split(_LAYOUT_FLAGS),
        *shlex.split(_TRAINING_FLAGS),
        *_data_flags(data),
        *("--train-iters", str(args.iterations), "--switch-run-dir", str(folder)),
    ]
    screen.rule(f"2. Training: {NUM_RANKS} ranks, TP 2 with sequence parallel, EP 2, DP 2")
    seconds, peak_bytes = _train(flags, folder, args.iterations, screen)
    records = read_metrics(folder / "metrics.jsonl")
    if stop := stopped_early(records, args.iterations, folder):
        print(f"\n{stop}", file=sys.stderr)
        return _STOPPED
    screen.rule("3. What happened")
    text = summary(records, seconds=seconds, peak_bytes=peak_bytes)
    screen.print(f"{text}\n{health_bars(records)}", highlight=False, soft_wrap=True)
    _look_inside(folder, args.prompt, screen)
    screen.rule("Where everything is")
    screen.print(_places(data, folder), highlight=False, soft_wrap=True)
    return 0


def stopped_early(records: list[dict[str, Any]], iterations: int, folder: Path) -> str:
    """Return how to resume training that was stopped before its end, "" if it was not.

    Args:
        records: Its metrics.
        iterations: Where it was to end.
        folder: Its run folder.
    """
    done = max((record["iteration"] for record in records if record["kind"] == "train"), default=0)
    if done >= iterations:
        return ""
    return (
        f"Training was stopped at iteration {done} of {iterations}. The same command goes on from "
        f"what it saved and shows the rest; {folder / 'resume.sh'} only trains."
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a metrics file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is under way


def summary(records: list[dict[str, Any]], *, seconds: float, peak_bytes: int) -> str:
    """Return first and last loss, and what the run cost."""
    steps = [record for record in records if record["kind"] == "train"]
    first, last = steps[0], steps[-1]
    return (
        f"loss        {first['lm_loss']:.3f} at iteration {first['iteration']}, "
        f"{last['lm_loss']:.3f} at iteration {last['iteration']} "
        f"({first['lm_loss'] - last['lm_loss']:.2f} nats lower)\n"
        f"dropped     {last['dropped_fraction']:.1%} of tokens found their expert full\n"
        f"balance     loss {last['load_balancing_loss']:.3f} (balanced = 1.0), busiest expert "
        f"{last['expert_load_max_over_mean']:.2f} x the mean\n"
        f"cost        {seconds:.0f} s, {size_text(peak_bytes)} at most, all ranks together\n"
    )


def health_bars(records: list[dict[str, Any]]) -> str:
    """Return one bar an expert for each sparse layer, from the last record that has arrays.

    All bars have one scale, on which the longest fits on a line.
    """
    with_arrays = [record for record in records if "expert_load" in record]
    if not with_arrays:
        return ""
    record = with_arrays[-1]
    most = max(len(loads) * max(loads) for loads in record["expert_load"])  # fair shares
    marks = min(_FAIR_MARKS, _MOST_MARKS / most) if most else _FAIR_MARKS
    lines = [f"Share of tokens for each expert at iteration {record['iteration']}:"]
    for layer, loads in zip(record["layers"], record["expert_load"], strict=True):
        for expert, load in enumerate(loads):
            bar = "█" * round(marks * load * len(loads))
            lines.append(f"  layer {layer} expert {expert:2d} {load:6.1%} {bar}")
    return "\n".join([*lines, f"A fair share is {1 / len(loads):.1%}, {marks:.0f} marks long."])


def _look_inside(folder: Path, prompt: str, screen: Console) -> None:
    """Show what each expert prefers and a sample, as the commands of a user would."""
    import torch

    torch.set_num_threads(1)  # matrices this small gain nothing from waiting for other threads
    screen.rule("4. What each expert learned")
    table.run("experts", ["--load", str(folder)])
    screen.rule("5. A sample")
    table.run("generate", ["--load", str(folder), "--prompt", prompt, "--num-tokens", "80"])


def _train(flags: list[str], folder: Path, iterations: int, screen: Console) -> tuple[float, int]:
    """Train in processes of their own; return seconds and the most memory that they held."""
    log_path = folder.parent / "train.log"
    command = _command("launch-local", "-n", str(NUM_RANKS), *flags)
    minutes = round((iterations * _S_PER_ITERATION + _S_AROUND) / 60)
    duration = f"{minutes} minutes" if minutes > 1 else "1 minute"
    screen.print(
        f"{iterations} iterations take about {duration} on 2 cores; follow with:\n"
        f"  tail -f {shlex.quote(str(log_path))}",
        highlight=False,
        soft_wrap=True,
    )
    started = time.monotonic()
    with (
        log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        steps_bar(screen) as progress,
    ):
        memory = _PeakMemory(process.pid)
        task = progress.add_task("starting", total=iterations)
        next_line = 0
        for record in _follow(process, folder / "metrics.jsonl", memory):
            done, text = record["iteration"], _progress_text(record)
            progress.update(task, completed=done, description=text)
            if not screen.is_terminal and done >= next_line:
                screen.print(f"iteration {done}/{iterations}  {text}", highlight=False)
                next_line = (done // _ITERATIONS_A_LINE + 1) * _ITERATIONS_A_LINE
    if process.returncode != 0:
        print(log_path.read_text(encoding="utf-8"), file=sys.stderr)
        raise SwitchError(
            f"Training ended with exit code {process.returncode}; its output stands above and in "
            f"{log_path}. A run of other settings in the way? Give another --output."
        )
    return time.monotonic() - started, memory.peak_bytes


def _follow(
    process: "subprocess.Popen[bytes]", metrics: Path, memory: "_PeakMemory"
) -> Iterator[dict[str, Any]]:
    """Yield the newest training record while the process runs, and once when it has ended."""
    running = True
    while running:
        running = process.poll() is None
        if running:
            time.sleep(_POLL_S)
            memory.sample()
        steps = [record for record in read_metrics(metrics) if record["kind"] == "train"]
        if steps:
            yield steps[-1]


def _progress_text(record: dict[str, Any]) -> str:
    return (
        f"loss {record['lm_loss']:.3f}  dropped {record['dropped_fraction']:.1%}  "
        f"load {record['expert_load_max_over_mean']:.2f}"
    )


def _data_flags(data: Path) -> list[str]:
    prepared = json.loads((data / "prepared.json").read_text(encoding="utf-8"))
    flags: list[str] = prepared["training_flags"]
    return flags


def _places(data: Path, folder: Path) -> str:
    return (
        f"data         {data}\n"
        f"checkpoint   {folder / 'checkpoints'}\n"
        f"metrics      {folder / 'metrics.jsonl'}\n"
        f"TensorBoard  tensorboard --logdir {folder / 'tensorboard'}\n"
        f"continue     {folder / 'resume.sh'}\n"
        f"sample       megatron-switch generate --load {folder} --prompt 'import '"
    )


def _command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "megatron_switch", *argv]


class _PeakMemory:
    """The most memory that a process tree held at any sample.

    Forked ranks share pages, so resident sizes would count them several times; the proportional
    size (PSS) counts each page once.

    Args:
        pid: Process at the root of the tree.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0

    def sample(self) -> None:
        """Measure now; a process that ends during the measurement counts as gone."""
        total = 0
        try:
            root = psutil.Process(self._pid)
            for process in [root, *root.children(recursive=True)]:
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        self.peak_bytes = max(self.peak_bytes, total)
