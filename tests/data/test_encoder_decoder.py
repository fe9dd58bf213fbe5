"""A sample of an encoder-decoder: what is read, what is to be said, what is padding."""

from types import SimpleNamespace

import pytest
import torch

from megatron_switch.data.encoder_decoder import (
    KEYS,
    SpecialTokens,
    encoder_decoder_sample,
    sentinel_ids,
    without_loss,
)
from megatron_switch.errors import DataError

SPECIAL = SpecialTokens(end=1, padding=0)


def sample(source=(7, 8, 1), target=(9, 5, 1)):
    return encoder_decoder_sample(source, target, source_length=5, target_length=4, special=SPECIAL)


def test_the_decoder_reads_the_target_one_place_behind():
    assert {name: values.tolist() for name, values in sample().items()} == {
        "encoder_tokens": [7, 8, 1, 0, 0],
        "encoder_padding": [0, 0, 0, 1, 1],
        "decoder_tokens": [0, 9, 5, 1],
        "decoder_padding": [0, 0, 0, 1],
        "labels": [9, 5, 1, 0],
        "loss_mask": [1, 1, 1, 0],
    }


def test_a_full_target_loses_no_label_and_hides_its_last_token_from_the_decoder():
    full = sample(target=(9, 5, 6, 1))
    assert full["labels"].tolist() == [9, 5, 6, 1]
    assert full["decoder_tokens"].tolist() == [0, 9, 5, 6]
    assert full["loss_mask"].tolist() == [1, 1, 1, 1]


def test_all_entries_can_travel_in_one_broadcast():
    made = sample()
    assert tuple(made) == KEYS
    assert {values.dtype for values in made.values()} == {torch.int64}


def test_a_sample_that_fills_up_a_batch_has_no_loss_and_is_otherwise_the_same():
    made = sample()
    empty = without_loss(made)
    assert empty["loss_mask"].sum() == 0
    assert made["loss_mask"].sum() == 3
    assert all(torch.equal(made[key], empty[key]) for key in KEYS if key != "loss_mask")


def test_sentinels_are_found_by_name_in_the_order_of_their_numbers():
    pieces = {0: "<pad>", 1: "a", 2: "<extra_id_1>", 3: "x<extra_id_7>", 4: "<extra_id_0>"}
    assert sentinel_ids(SimpleNamespace(inv_vocab=pieces)) == (4, 2)
    assert sentinel_ids(SimpleNamespace(inv_vocab={0: "a"})) == ()
    assert sentinel_ids(SimpleNamespace()) == ()


def test_a_gap_between_sentinels_is_refused():
    pieces = {5: "<extra_id_0>", 6: "<extra_id_2>"}
    with pytest.raises(DataError, match=r"2 sentinels .* not those of N = 1\b.*--sentinels 100"):
        sentinel_ids(SimpleNamespace(inv_vocab=pieces))


@pytest.mark.parametrize(("pad", "padding"), [(0, 0), (3, 3), (-1, 9), (None, 9), (10, 9)])
def test_a_tokenizer_without_padding_gives_its_end_of_document(pad, padding):
    special = SpecialTokens.of(SimpleNamespace(pad=pad, eod=9), vocab_size=10)
    assert special == SpecialTokens(end=9, padding=padding)
