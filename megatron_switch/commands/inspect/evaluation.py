"""One evaluation of a trained model: loss, perplexity, and what its experts dropped.

It is what an evaluation in training shows: the capacity of evaluation, counted over its
micro-batches, and the mean loss over the tokens that count. Nothing is trained and nothing written.

Shape letters: B sequences, S positions, V rows of the vocabulary.
"""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from rich.console import Console as Screen
from rich.table import Table
from torch import Tensor

from megatron_switch.architecture.model import Architecture
from megatron_switch.commands.inspect.evaluation_data import (
    EvaluationBatches,
    Split,
    evaluation_batches,
    fewer_text,
)
from megatron_switch.data.padding import PADDING_MASK
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model
from megatron_switch.training.logs.console import Console
from megatron_switch.utils.progress import steps_progress

SCHEMA = "megatron-switch/evaluate/1"


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    loss: float
    """Mean cross-entropy of the next token, nats."""
    tokens: int
    """Tokens in the loss."""
    routing: RoutingReport | None
    """None of a model without experts."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite where that is no number of float64."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_checkpoint(own: Namespace) -> None:
    """Print loss, perplexity and drops on validation or test data.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    rank = int(os.environ.get("RANK", "0"))
    screen = sys.stdout
    split: Split = "test" if own.test else "validation"
    with (
        redirect_stdout(sys.stderr),
        Console(None, rank=rank) as console,
        open_trained_model(own.load, own.train_flags, drop=True) as model,
    ):
        for note in model.notes:
            console.say(note)
        batches = evaluation_batches(model, own, split)
        if batches.sequences < own.samples:
            console.say(fewer_text(batches, own.samples))
        with steps_progress("evaluating", len(batches), shown=dist.get_rank() == 0) as advance:
            found = evaluated(model, batches, advance)
    if rank == 0:
        record = evaluation_record(model, found, split=split, sequences=batches.sequences)
        if own.json:
            print(json.dumps(record, allow_nan=False), file=screen)
        else:
            _print(record, Screen(file=screen))


def evaluated(
    model: TrainedModel, batches: EvaluationBatches, advance: Callable[[], None]
) -> Evaluation:
    """Return the mean loss over the real tokens of all data-parallel ranks, and their routing.

    Args:
        model: A decoder-only model, opened with ``drop=True``.
        batches: Micro-batches of this data-parallel rank; as many on every one.
        advance: Called after each.
    """
    layer_numbers = Architecture.from_args(model.args).sparse_layer_numbers
    tracker = SwitchMetricsTracker(layer_numbers, model.args.num_experts or 1)
    set_moe_metrics_tracker(tracker)
    sums = torch.zeros(2, dtype=torch.float64, device="cuda")
    for given in batches:
        batch = {key: values.cuda() for key, values in given.items()}
        with torch.no_grad():
            logits_BSV: Tensor = model.module(
                batch["tokens"],
                batch["position_ids"],
                batch.get("attention_mask"),
                padding_mask=batch[PADDING_MASK],
            )
        loss_T = F.cross_entropy(
            logits_BSV.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none"
        )
        mask_T = batch["loss_mask"].flatten()
        sums += torch.stack([(loss_T * mask_T).sum(), mask_T.sum()])
        advance()
    dist.all_reduce(sums, group=mpu.get_data_parallel_group())
    total, tokens = sums.tolist()
    return Evaluation(total / max(tokens, 1.0), int(tokens), tracker.report_evaluation())


def evaluation_record(
    model: TrainedModel, found: Evaluation, *, split: Split, sequences: int
) -> dict[str, Any]:
    """Return an evaluation as JSON's values; what is not finite is null.

    Args:
        model: The model.
        found: What was found.
        split: The data that were read.
        sequences: How many of them.
    """
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "checkpoint": str(model.checkpoint.folder),
        "split": split,
        "sequences": sequences,
        "tokens": found.tokens,
        "loss": _finite(found.loss),
        "perplexity": _finite(found.perplexity),
    }
    report = found.routing
    if report is None:
        return record
    layers = zip(
        report.layer_numbers,
        report.dropped_L.tolist(),
        report.load_ratio_L.tolist(),
        (report.load_LE == 0).sum(dim=1).tolist(),
        strict=True,
    )
    return record | {
        "dropped": report.dropped,
        "layers": [
            {
                "layer": number,
                "dropped": dropped,
                "expert_load_max_over_mean": ratio,
                "dead_experts": dead,
            }
            for number, dropped, ratio, dead in layers
        ],
    }


def _print(record: dict[str, Any], screen: Screen) -> None:
    lines = {
        "checkpoint": record["checkpoint"],
        "data": f"{record['sequences']:,} {record['split']} sequences, {record['tokens']:,} tokens",
        "loss": _number(record["loss"], ".4f"),
        "perplexity": _number(record["perplexity"], ",.4g"),
    }
    if "dropped" in record:
        lines["dropped"] = f"{record['dropped']:.2%}"
    for name, value in lines.items():
        screen.print(f"{name:<11} {value}", soft_wrap=True, highlight=False, markup=False)
    if "layers" not in record:
        return
    table = Table("layer", "dropped", "load max/mean", "dead experts")
    for column in table.columns:
        column.justify = "right"
    for row in record["layers"]:
        ratio = f"{row['expert_load_max_over_mean']:.2f}"
        table.add_row(str(row["layer"]), f"{row['dropped']:.2%}", ratio, str(row["dead_experts"]))
    screen.print(table)


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
