"""Samples say which positions are padding, and padding of one sample is no matter of another."""

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_switch.data.padding import (
    PADDING_MASK,
    EvenDataset,
    MaskedGPTDataset,
    MaskedMockGPTDataset,
    filled_up,
)

LENGTH, PAD = 8, 90
DOCUMENTS = [[1, 2, 3, PAD, PAD], [4, 5, 6, 7, 8, 9], [10, PAD, 11, 12], [13, 14]]
TEXT = [token for document in DOCUMENTS for token in document]


class Tokenizer(NullTokenizer):
    """As Megatron wraps one."""

    pad = PAD


@pytest.fixture
def prefix(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.uint16)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(f"{tmp_path}/corpus.idx")
    return f"{tmp_path}/corpus"


def build(kind, prefix, **changes):
    """Return the validation set of all documents, read once, last and short sample included."""
    blend = None if prefix is None else ([prefix], None)
    settings = {
        "random_seed": 1,
        "sequence_length": LENGTH,
        "blend": blend,
        "split": "0,1,0",
        "tokenizer": Tokenizer(vocab_size=100, pad_id=PAD),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "drop_last_partial_validation_sequence": False,
    }
    config = GPTDatasetConfig(**(settings | changes))
    sizes = [None, None, None] if prefix else [0, 3, 0]
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[1]


def stored_texts(dataset):
    """Return each sample's tokens as they are stored, the short one's padded."""
    for start in dataset.sample_index[:-1][dataset.shuffle_index]:
        before = sum(len(DOCUMENTS[index]) for index in dataset.document_index[: start[0]])
        text = [t for index in dataset.document_index for t in DOCUMENTS[index]][
            before + start[1] :
        ]
        yield torch.tensor((text + [PAD] * (LENGTH + 1))[: LENGTH + 1])


def test_the_mask_is_true_where_a_padding_token_stands(prefix):
    dataset = build(MaskedGPTDataset, prefix)
    assert len(dataset) == 2  # 17 tokens: one whole sample, and one padded at its end
    padded = 0
    for index, text_S in enumerate(stored_texts(dataset)):
        sample = dataset[index]
        assert sample[PADDING_MASK].dtype == torch.bool
        assert sample[PADDING_MASK].tolist() == (text_S[:-1] == PAD).tolist()
        assert not sample["tokens"][sample[PADDING_MASK]].any()
        padded += int(sample[PADDING_MASK].sum())
    assert padded >= TEXT.count(PAD)


def test_padding_of_the_first_sample_takes_nothing_out_of_the_loss_of_others(prefix):
    def losses(kind):
        dataset = build(kind, prefix)
        return [dataset[index]["loss_mask"].clone() for index in range(len(dataset))]

    texts = list(stored_texts(build(MaskedGPTDataset, prefix)))
    right = [(text_S[1:] != PAD).float() for text_S in texts]
    assert all(map(torch.equal, losses(MaskedGPTDataset), right))
    assert not all(map(torch.equal, losses(GPTDataset), right))  # what is repaired
    assert all(map(torch.equal, [d["loss_mask"] for d in _twice(prefix)], right + right))


def _twice(prefix):
    dataset = build(MaskedGPTDataset, prefix)
    return [dataset[index] for index in (0, 1, 0, 1)]


def test_a_sample_that_fills_up_a_batch_is_all_padding(prefix):
    sample = build(MaskedGPTDataset, prefix)[None]
    assert sample[PADDING_MASK].all()
    assert not sample["loss_mask"].any()


@pytest.mark.slow
def test_random_numbers_have_a_mask_too():
    dataset = build(MaskedMockGPTDataset, None, blend=None)
    sample = dataset[0]
    stored = dataset._query_document_sample_shuffle_indices(0)[0][:-1]
    assert isinstance(dataset.dataset, MockGPTLowLevelDataset)
    assert sample[PADDING_MASK].tolist() == (stored == PAD).tolist()


def plain_sample(token):
    return {
        "tokens": torch.full((4,), token),
        "loss_mask": torch.ones(4),
        PADDING_MASK: torch.zeros(4, dtype=torch.bool),
    }


@pytest.mark.parametrize(("samples", "ranks", "length"), [(3, 4, 4), (5, 2, 6), (4, 2, 4)])
def test_every_rank_gets_as_many_samples(samples, ranks, length):
    class Samples(list):
        index_split = Split.valid

    even = EvenDataset(Samples(plain_sample(token) for token in range(samples)), ranks)
    assert len(even) == length
    assert even.split == Split.valid
    for index in range(length):
        real = index < samples
        assert even[index]["tokens"][0] == (index if real else 0)
        assert bool(even[index]["loss_mask"].any()) == real
        assert bool(even[index][PADDING_MASK].all()) == (not real)


def test_the_split_of_a_blend_is_kept():
    blend = type("Blend", (), {"split": Split.test, "__len__": lambda self: 1})()
    assert EvenDataset(blend, 2).split == Split.test


def test_a_short_batch_is_filled_up_with_samples_of_nothing():
    batch = {key: torch.stack([values, values]) for key, values in plain_sample(3).items()}
    assert filled_up(batch, 2) is batch
    whole = filled_up(batch, 5)
    assert {len(values) for values in whole.values()} == {5}
    assert whole["tokens"].unique().tolist() == [3]  # whatever; an embedding can look it up
    assert whole["loss_mask"].sum(dim=1).tolist() == [4, 4, 0, 0, 0]
    assert whole[PADDING_MASK].sum(dim=1).tolist() == [0, 0, 4, 4, 4]
