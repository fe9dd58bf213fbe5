"""Samples that say which of their positions are padding.

Megatron's data set pads a sample that is too short and replaces the padding token by token 0. Only
the loss mask shows it, off by one and mixed with other causes. A router must know, because padding
takes no expert's slot and counts in no loss. So samples have one more key, ``padding_mask``: bool,
one entry a position, **True for padding**, as everywhere in this package.

Padding is what the data set appends to the last sequence, every ``pad`` token of the tokenizer that
is stored in the documents, and a whole sample that only fills up a batch (:class:`EvenDataset`).

The loss mask is Megatron's, with one repair: its data set lets the padding of whichever sample a
rank reads first take tokens out of the loss of all later ones.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from torch.utils.data import Dataset

PADDING_MASK = "padding_mask"
"""Key of the mask in samples and batches."""


class _Masked:
    """Adds the padding mask to the samples of Megatron's GPT data sets."""

    _pad_token_id: int
    cached_loss_mask: torch.Tensor | None
    _is_padding: "np.ndarray[Any, np.dtype[np.bool_]]"

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return Megatron's sample with its mask; ``None`` asks for one that is all padding."""
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)  # type: ignore[misc]
        if sample["loss_mask"] is self.cached_loss_mask:
            # Megatron keeps the mask of the first sample as that of all, after it has cleared the
            # positions that are padding in the first.
            self.cached_loss_mask = torch.ones_like(sample["loss_mask"])
        padding_S = torch.from_numpy(self._is_padding[: len(sample["tokens"])])
        sample[PADDING_MASK] = torch.ones_like(padding_S) if idx is None else padding_S
        return sample

    def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
        # The only place that sees the tokens before padding is replaced.
        found = super()._query_document_sample_shuffle_indices(idx)  # type: ignore[misc]
        self._is_padding = found[0] == self._pad_token_id
        return found


class MaskedGPTDataset(_Masked, GPTDataset):  # type: ignore[misc]
    """Megatron's GPT data set, with a padding mask in each sample."""


class MaskedMockGPTDataset(_Masked, MockGPTDataset):  # type: ignore[misc]
    """Megatron's random numbers, with a padding mask in each sample."""


class EvenDataset(Dataset[dict[str, torch.Tensor]]):
    """A data set that all ranks can read equally often: padded with empty samples.

    A pass over a whole validation set gives each rank every n-th sample. Where their number is no
    multiple of n, some ranks would have one step less to do, or none at all, and the others would
    wait for them.

    Args:
        dataset: What to fill up; at least one sample.
        multiple_of: Number of ranks that share the samples.
    """

    def __init__(self, dataset: Any, multiple_of: int) -> None:
        self._dataset = dataset
        self._length = -(-len(dataset) // multiple_of) * multiple_of
        self.split = dataset.split if hasattr(dataset, "split") else dataset.index_split

    def __len__(self) -> int:
        """Return the number of samples, empty ones included."""
        return self._length

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return a sample, or one without a token that counts."""
        if idx < len(self._dataset):
            sample: dict[str, torch.Tensor] = self._dataset[idx]
            return sample
        return without_tokens(self._dataset[0])


def without_tokens(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of a sample, or of several, in which every position is padding."""
    return {
        **sample,
        "loss_mask": torch.zeros_like(sample["loss_mask"]),
        PADDING_MASK: torch.ones_like(sample[PADDING_MASK]),
    }


def filled_up(batch: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Return a batch of ``size`` samples: those given, and empty ones.

    A last batch may be short, and pipeline stages and tensor ranks wait for tensors of the size
    that was agreed on.

    Args:
        batch: Samples stacked along the first dim of each tensor, at least one.
        size: Samples wanted, at least as many as there are.
    """
    missing = size - len(batch["tokens"])
    if missing == 0:
        return batch
    first = {key: values[:1].expand(missing, *values.shape[1:]) for key, values in batch.items()}
    nothing = without_tokens(first)
    return {key: torch.cat([values, nothing[key]]) for key, values in batch.items()}
