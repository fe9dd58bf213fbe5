"""The text on which a trained model is evaluated: by default that of its training.

The checkpoint names data, split and micro-batch size, over which capacity is counted. Full
sequences are read in Megatron's order, each data-parallel rank a part of every step.

Shape letters: B sequences, S positions.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Literal

from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from torch import Tensor
from torch.utils.data import default_collate

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.data.padding import filled_up, without_tokens
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.training.inference.trained_model import TrainedModel
from megatron_switch.training.loop.datasets import build_datasets
from megatron_switch.training.preflight.data import check_token_files

Split = Literal["validation", "test"]
_SPLITS = ("train", "validation", "test")


class EvaluationBatches:
    """One data-parallel rank's micro-batches, made when they are asked for, in the same order.

    Args:
        dataset: Samples of one split.
        sequences: How many of them are read, on all ranks together.
        size: Sequences of a micro-batch.
        place: This rank among its replicas.
        replicas: Data-parallel ranks; each has as many micro-batches.
    """

    def __init__(
        self, dataset: Any, sequences: int, *, size: int, place: int, replicas: int
    ) -> None:
        self.sequences = sequences
        self._dataset = dataset
        self._size, self._place, self._replicas = size, place, replicas

    def __len__(self) -> int:
        """Return the number of micro-batches of a rank."""
        return -(-self.sequences // (self._size * self._replicas))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield every ``replicas``-th micro-batch; where samples run out, one of nothing."""
        samples, size = range(self.sequences), self._size
        for start in range(0, self.sequences, size * self._replicas):
            first = start + self._place * size
            mine = samples[first : first + size]
            batch = default_collate([self._dataset[index] for index in mine or samples[:1]])
            yield filled_up(batch if mine else without_tokens(batch), size)


def evaluation_batches(
    model: TrainedModel, own: Namespace, split: Split = "validation"
) -> EvaluationBatches:
    """Return this data-parallel rank's micro-batches of a split; no sequence comes twice.

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
    dataset = _dataset(model, args, split, 1)
    sequences = min(own.samples, _in_one_pass(dataset, model.context_length))
    if sequences > 1:
        dataset = _dataset(model, args, split, sequences)
    return EvaluationBatches(
        dataset,
        sequences,
        size=size,
        place=mpu.get_data_parallel_rank(),
        replicas=mpu.get_data_parallel_world_size(),
    )


def fewer_text(batches: EvaluationBatches, asked: int) -> str:
    """Return a note that the data have fewer sequences than were asked for."""
    return (
        f"The data have {batches.sequences:,} sequences, and each is read once "
        f"(--samples {asked} asks for more)."
    )


def _dataset(model: TrainedModel, args: Namespace, split: Split, samples: int) -> Any:
    """Return the data set of a split, with at least a number of samples.

    Raises:
        DataError: The split is empty.
    """
    datasets = build_datasets(
        args,
        model.tokenizer.built,
        [samples if name == split else 0 for name in _SPLITS],
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
    return dataset[0] if isinstance(dataset, list) else dataset


def _in_one_pass(dataset: Any, length: int) -> float:
    """Return how many sequences one pass over a split holds; no limit where it has no files."""
    if isinstance(dataset, BlendedDataset):
        return sum(_in_one_pass(part, length) for part in dataset.datasets)
    if isinstance(dataset, MockGPTDataset):
        return math.inf
    tokens = int(dataset.dataset.sequence_lengths[dataset.indices].sum())
    return max(1, (tokens - 1) // length)  # the last token is a label only


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
