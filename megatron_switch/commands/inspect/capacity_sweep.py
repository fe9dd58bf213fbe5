"""Evaluation of a trained model at several capacity factors.

Capacity is no part of the weights, so one checkpoint can be evaluated at any of them: the same
validation text goes through the model once for each factor, and the table says what is dropped and
what that costs. Nothing is trained and nothing written.

A row is what an evaluation in training shows for that ``--switch-eval-capacity-factor``: the same
micro-batch size (capacity is counted over a micro-batch), full sequences, the same rounding, least
capacity, group and drop order, and the loss over the whole padded vocabulary.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from rich.console import Console as Screen
from rich.table import Table
from torch import Tensor

from megatron_switch.architecture.model import Architecture
from megatron_switch.commands.inspect.evaluation import Evaluation, evaluated
from megatron_switch.commands.inspect.evaluation_data import (
    EvaluationBatches,
    evaluation_batches,
    fewer_text,
)
from megatron_switch.errors import ConfigError
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model
from megatron_switch.training.logs.console import Console
from megatron_switch.utils.progress import steps_progress

SCHEMA = "megatron-switch/capacity-sweep/1"


@dataclass(frozen=True)
class SweepRow:
    """An evaluation at one capacity factor."""

    factor: float
    """Capacity factor; negative: no token was dropped."""
    slots: int
    """Slots per expert and capacity group."""
    loss: float
    """Mean cross-entropy of the next token, nats."""
    dropped: float
    """Fraction of tokens that found their expert full, mean over layers."""
    dropped_by_layer: tuple[float, ...]
    """The same for each layer with experts."""


def sweep_capacity(own: Namespace) -> None:
    """Print loss and drops at each factor.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    factors = _factors(own.factors)
    rank = int(os.environ.get("RANK", "0"))
    screen = sys.stdout
    # Any factor fits packed dispatch; another one that is asked for comes later and wins.
    flags = ["--switch-dispatch", "packed", *own.train_flags]
    with (
        redirect_stdout(sys.stderr),
        Console(None, rank=rank) as console,
        open_trained_model(own.load, flags, drop=True) as model,
    ):
        for note in model.notes:
            console.say(note)
        batches = evaluation_batches(model, own)
        if batches.sequences < own.samples:
            console.say(fewer_text(batches, own.samples))
        rows = sweep(model, factors, batches)
    if rank == 0:
        facts = {"checkpoint": str(model.checkpoint.folder), "sequences": batches.sequences}
        _print(rows, facts, model, Screen(file=screen), as_json=own.json)


def sweep(
    model: TrainedModel, factors: Sequence[float], batches: EvaluationBatches
) -> list[SweepRow]:
    """Evaluate a model at several capacity factors.

    Args:
        model: A model with experts, opened with ``drop=True``. Its capacity is changed.
        factors: Capacity factors.
        batches: Micro-batches of this data-parallel rank; as many on every one.

    Raises:
        ConfigError: The model has no experts, or a factor cannot be used.
    """
    routers = [module for module in model.module.modules() if isinstance(module, SwitchRouter)]
    if not routers:
        raise ConfigError("The model has no experts, so it has no capacity to look at.")
    rows = []
    steps = len(factors) * len(batches)
    with steps_progress("evaluating", steps, shown=dist.get_rank() == 0) as advance:
        for factor in factors:
            for router in routers:
                router.switch = replace(router.switch, capacity=None, eval_capacity_factor=factor)
            found = evaluated(model, batches, advance)
            slots = routers[0].capacity_of(*_shape_on_this_rank(model, next(iter(batches))))
            rows.append(_row(factor, slots, found))
    return rows


def _shape_on_this_rank(model: TrainedModel, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return sequences of a micro-batch, and the positions of one that this rank routes."""
    num_sequences, length = batch["tokens"].shape
    return num_sequences, length // model.width_multiple


def _row(factor: float, slots: int, found: Evaluation) -> SweepRow:
    assert found.routing is not None, "a model with routers has layers with experts"
    return SweepRow(
        factor=factor,
        slots=slots,
        loss=found.loss,
        dropped=found.routing.dropped,
        dropped_by_layer=tuple(found.routing.dropped_L.tolist()),
    )


def _factors(text: str) -> list[float]:
    """Return the factors of a comma-separated list.

    Raises:
        ConfigError: One is no number, or one that means nothing.
    """
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--factors takes numbers with commas between them, got {text!r}. For example: "
            "--factors 1,1.25,2"
        ) from error
    for factor in factors:
        expert_capacity(1, 1, factor)  # refuses what is no factor
    return factors


def _print(
    rows: list[SweepRow],
    facts: dict[str, Any],
    model: TrainedModel,
    screen: Screen,
    *,
    as_json: bool,
) -> None:
    if as_json:
        record = {
            "schema": SCHEMA,
            **facts,
            "capacity_group": model.switch.capacity_group,
            "layers": list(Architecture.from_args(model.args).sparse_layer_numbers),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(record, allow_nan=False), file=screen.file)
        return
    table = Table("factor", "slots", "dropped", "worst layer", "loss")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            "no limit" if row.factor < 0 else f"{row.factor:g}",
            str(row.slots),
            f"{row.dropped:.2%}",
            f"{max(row.dropped_by_layer):.2%}",
            f"{row.loss:.4f}",
        )
    screen.print(table)
    screen.print(
        f"{facts['sequences']} validation sequences; slots are per expert and capacity group "
        f"({model.switch.capacity_group}).",
        soft_wrap=True,
    )
