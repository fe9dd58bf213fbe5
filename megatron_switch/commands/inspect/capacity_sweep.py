"""Evaluation of a trained model at several capacity factors.

Capacity is no part of the weights, so one checkpoint can be evaluated at any of them: the same
validation text goes through the model once for each factor, and the table says what is dropped and
what that costs. Nothing is trained and nothing written.

A row is what an evaluation in training shows for that ``--switch-eval-capacity-factor``: the same
micro-batch size (capacity is counted over a micro-batch), full sequences, the same rounding, least
capacity, group and drop order, and the loss over the whole padded vocabulary.

Shape letters: B sequences, S positions, V rows of the vocabulary.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from rich.console import Console as Screen
from rich.table import Table
from torch import Tensor
from torch.utils.data import default_collate

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.data.padding import PADDING_MASK, filled_up
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model
from megatron_switch.training.logs.console import Console
from megatron_switch.training.loop.datasets import build_datasets
from megatron_switch.training.preflight.data import check_token_files
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
        batches = validation_batches(model, own)
        rows = sweep(model, factors, batches)
    if rank == 0:
        facts = {"checkpoint": str(model.checkpoint.folder), "sequences": own.samples}
        _print(rows, facts, model, Screen(file=screen), as_json=own.json)


def sweep(
    model: TrainedModel, factors: Sequence[float], batches: Sequence[dict[str, Tensor]]
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
    layer_numbers = Architecture.from_args(model.args).sparse_layer_numbers
    tracker = SwitchMetricsTracker(layer_numbers, model.args.num_experts)
    set_moe_metrics_tracker(tracker)
    rows = []
    steps = len(factors) * len(batches)
    with steps_progress("evaluating", steps, shown=dist.get_rank() == 0) as advance:
        for factor in factors:
            for router in routers:
                router.switch = replace(router.switch, capacity=None, eval_capacity_factor=factor)
            loss = _mean_loss(model, batches, advance)
            report = tracker.report_evaluation()
            assert report is not None, "a model with routers has layers with experts"
            slots = routers[0].capacity_of(*_shape_on_this_rank(model, batches[0]))
            rows.append(_row(factor, slots, loss, report))
    return rows


def validation_batches(model: TrainedModel, own: Namespace) -> list[dict[str, Tensor]]:
    """Return this data-parallel rank's micro-batches of the validation data.

    Args:
        model: The model; its checkpoint names the data.
        own: This command's flags.

    Raises:
        ConfigError: Too few samples are asked for.
        DataError: No data are named, or none are for validation.
    """
    if own.samples < 1:
        raise ConfigError(f"At least one sequence must be read, got --samples {own.samples}.")
    if own.micro_batch_size is not None and own.micro_batch_size < 1:
        raise ConfigError(f"--micro-batch-size must be at least 1, got {own.micro_batch_size}.")
    args = _data_arguments(model, own)
    size = own.micro_batch_size or getattr(args, "eval_micro_batch_size", None)
    size = size or args.micro_batch_size
    if not args.mock_data:
        check_token_files(args, vocab_size=model.tokenizer.vocab_size, read=["validation"])
    place, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    _, validation, _ = build_datasets(
        args,
        model.tokenizer.built,
        [0, own.samples, 0],
        lambda: True,
        sequence_length=model.context_length,
        extra_token=True,
    )
    if validation is None:
        raise DataError(
            f"There is no validation data: --split is {args.split}. Give a split with some "
            "(--split 0,100,0 takes all), or other data with --data-path."
        )
    if isinstance(validation, list):
        validation = validation[0]
    samples = range(own.samples)
    return list(_cut(validation, samples, size=size, place=place, replicas=replicas))


def _cut(
    dataset: Any, samples: range, *, size: int, place: int, replicas: int
) -> Iterator[dict[str, Tensor]]:
    """Yield every ``replicas``-th micro-batch; where samples run out, one of nothing."""
    step = size * replicas
    for start in range(0, len(samples), step):
        mine = samples[start + place * size : start + (place + 1) * size]
        batch = default_collate([dataset[index] for index in mine or samples[:1]])
        if not mine:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
            batch[PADDING_MASK] = torch.ones_like(batch[PADDING_MASK])
        yield filled_up(batch, size)


def _mean_loss(
    model: TrainedModel, batches: Sequence[dict[str, Tensor]], advance: Callable[[], None]
) -> float:
    """Return the mean loss over the real tokens of all data-parallel ranks."""
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
    mean: float = total / max(tokens, 1.0)
    return mean


def _shape_on_this_rank(model: TrainedModel, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return sequences of a micro-batch, and the positions of one that this rank routes."""
    num_sequences, length = batch["tokens"].shape
    return num_sequences, length // model.width_multiple


def _row(factor: float, slots: int, loss: float, report: RoutingReport) -> SweepRow:
    return SweepRow(
        factor=factor,
        slots=slots,
        loss=loss,
        dropped=report.dropped,
        dropped_by_layer=tuple(report.dropped_L.tolist()),
    )


def _data_arguments(model: TrainedModel, own: Namespace) -> Namespace:
    """Return the arguments of the training run, with the data that are asked for here."""
    stored = read_common_state(model.checkpoint.folder).get("args")
    args = Namespace(**vars(model.args if stored is None else stored))
    if getattr(args, "switch_arch", "gpt") != "gpt":
        raise ConfigError(
            "capacity-sweep evaluates decoder-only models, and the checkpoint is of --switch-arch "
            f"{args.switch_arch}. Evaluate it with 'megatron-switch train --skip-train' and "
            "--switch-eval-capacity-factor."
        )
    if own.data_path is not None:
        names = [name for name in vars(args) if name.endswith(("data_path", "data_args_path"))]
        for name in names:
            setattr(args, name, None)
        args.data_path, args.mock_data = own.data_path, False
    if own.split is not None:
        args.split = own.split
    args.full_validation = False  # as many samples as are asked for, of one set
    args.multiple_validation_sets = False
    if not args.mock_data and all(
        getattr(args, name) is None
        for name in ("data_path", "data_args_path", "valid_data_path", "per_split_data_args_path")
    ):
        raise DataError(
            "There is no text to evaluate on: the checkpoint names no data. Give prepared data "
            "with --data-path."
        )
    return args


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
