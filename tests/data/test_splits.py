"""A split without documents must be refused, because Megatron would count it for ever."""

import pytest

from megatron_switch.data.splits import check_splits, documents_of_splits
from megatron_switch.errors import DataError


def test_counts_are_rounded_bounds():
    assert documents_of_splits(100, "98,1,1") == {"train": 98, "validation": 1, "test": 1}
    assert documents_of_splits(10, "8,1,1") == {"train": 8, "validation": 1, "test": 1}
    assert documents_of_splits(10, "1,0,0") == {"train": 10}


def test_an_empty_split_is_refused_with_the_way_out():
    with pytest.raises(DataError, match=r"corpus has 31 .*98,1,1 leaves none for .*test.*80,10,10"):
        check_splits("corpus", 31, "98,1,1")


def test_a_split_without_weight_may_be_empty():
    check_splits("corpus", 1, "1,0,0")
    check_splits("corpus", 683, "98,1,1")


def test_a_split_that_is_not_read_may_be_empty():
    check_splits("corpus", 31, "98,1,1", read=["train", "validation"])
    with pytest.raises(DataError, match=r"leaves none for test \("):
        check_splits("corpus", 31, "98,1,1", read=["train", "test"])
