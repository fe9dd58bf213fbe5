"""The text on which a trained model is evaluated: by default that of its training.

The checkpoint names data, split and micro-batch size, over which capacity is counted. Full
sequences are read in Megatron's order, each data-parallel rank a part of every step.

Shape letters: B sequences, S positions.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.utils.data import default_collate

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.data.padding import PADDING_MASK, filled_up
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.training.inference.trained_model import TrainedModel
from megatron_switch.training.loop.datasets import build_datasets
from megatron_switch.training.preflight.data import check_token_files

Split = Literal["validation", "test"]
_SPLITS = ("train", "validation", "test")


def evaluation_batches(
    model: TrainedModel, own: Namespace, split: Split = "validation"
) -> list[dict[str, Tensor]]:
    """Return this data-parallel rank's micro-batches of a split.

    Args:
        model: The model; its checkpoint names the data.
        own: The command's flags.
        split: Which part of the data to read.

    Raises:
        ConfigError: Too few samples are asked for, or the model is an encoder-decoder.
        DataError: No data are named, or none are for the split.
    """
    if own.samples < 1:
        raise ConfigError(f"At least one sequence must be read, got --samples {own.samples}.")
    if own.micro_batch_size is not None and own.micro_batch_size < 1:
        raise ConfigError(f"--micro-batch-size must be at least 1, got {own.micro_batch_size}.")
    args = _data_arguments(model, own)
    size = own.micro_batch_size or getattr(args, "eval_micro_batch_size", None)
    size = size or args.micro_batch_size
    if not args.mock_data:
        check_token_files(args, vocab_size=model.tokenizer.vocab_size, read=[split])
    place, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    datasets = build_datasets(
        args,
        model.tokenizer.built,
        [own.samples if name == split else 0 for name in _SPLITS],
        lambda: True,
        sequence_length=model.context_length,
        extra_token=True,
    )
    dataset = datasets[_SPLITS.index(split)]
    if dataset is None:
        weights = ",".join("100" if name == split else "0" for name in _SPLITS)
        raise DataError(
            f"There is no {split} data: --split is {args.split}. Give a split with some "
            f"(--split {weights} takes all), or other data with --data-path."
        )
    if isinstance(dataset, list):
        dataset = dataset[0]
    samples = range(own.samples)
    return list(_cut(dataset, samples, size=size, place=place, replicas=replicas))


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


def _data_arguments(model: TrainedModel, own: Namespace) -> Namespace:
    """Return the arguments of the training run, with the data that are asked for here."""
    stored = read_common_state(model.checkpoint.folder).get("args")
    args = Namespace(**vars(model.args if stored is None else stored))
    if getattr(args, "switch_arch", "gpt") != "gpt":
        raise ConfigError(
            f"This command evaluates decoder-only models, and the checkpoint is of --switch-arch "
            f"{args.switch_arch}. Evaluate it with 'megatron-switch train --skip-train' and the "
            "flags of its training, --switch-eval-capacity-factor among them."
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
