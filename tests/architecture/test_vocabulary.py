"""The number of embedding rows depends on the tokenizer, never on the layout."""

import pytest

from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.errors import CheckpointError, LayoutError


@pytest.mark.parametrize(
    ("vocab_size", "divisor", "rows"),
    [(1, 128, 1024), (1024, 128, 1024), (1025, 128, 2048), (50257, 128, 51200), (100, 1, 104)],
)
def test_rows_are_the_next_multiple(vocab_size, divisor, rows):
    assert padded_vocab_size(vocab_size, make_divisible_by=divisor) == rows


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 8, 16, 64])
def test_rows_do_not_depend_on_the_layout(tensor_parallel_size):
    assert padded_vocab_size(50257, tensor_parallel_size=tensor_parallel_size) == 51200


def test_a_size_that_does_not_divide_the_rows_is_refused():
    message = r"1024 vocabulary rows .* by 6 .* one of \[1, 2, 4\].* to a multiple of 6"
    with pytest.raises(LayoutError, match=message):
        padded_vocab_size(1000, tensor_parallel_size=6)


def test_the_divisor_makes_other_sizes_possible():
    rows = padded_vocab_size(1000, make_divisible_by=6, tensor_parallel_size=6)
    assert rows == 1008


def test_rows_of_a_checkpoint_win():
    assert padded_vocab_size(127, stored=128, tensor_parallel_size=4) == 128


def test_rows_of_a_checkpoint_that_cannot_be_shared():
    with pytest.raises(LayoutError, match=r"128 .* one of \[1, 2, 4\]; .* fixed by the checkpoint"):
        padded_vocab_size(127, stored=128, tensor_parallel_size=6)


def test_a_larger_tokenizer_than_the_checkpoint_was_trained_with():
    with pytest.raises(CheckpointError, match=r"has 200 tokens.* only 128 rows.*--tokenizer-model"):
        padded_vocab_size(200, stored=128)
