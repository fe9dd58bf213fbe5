"""A comparison that misses a difference would make every test that uses it worthless."""

import pytest
import torch

from megatron_switch.checkpoint.formats.dist_metadata import find_defect, read_common_state
from megatron_switch.testing.checkpoints import (
    Difference,
    compare_checkpoints,
    compare_tensors,
    load_tensors,
    save_checkpoint,
)

FIRST = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2, dtype=torch.bfloat16)}


def test_what_was_saved_is_loaded(tmp_path):
    folder = save_checkpoint(tmp_path, 7, FIRST, {"iteration": 7})
    assert find_defect(folder) is None
    assert read_common_state(folder) == {"iteration": 7}
    assert not compare_tensors(load_tensors(folder), FIRST)


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        ({"a": FIRST["a"]}, Difference("b", "only in first")),
        ({**FIRST, "c": FIRST["a"]}, Difference("c", "only in second")),
        ({**FIRST, "a": torch.ones(3)}, Difference("a", "shape")),
        ({**FIRST, "a": FIRST["a"].double()}, Difference("a", "dtype")),
        ({**FIRST, "a": torch.tensor([3.0, 5.0])}, Difference("a", "values", 0.2)),
        ({**FIRST, "b": FIRST["b"] + 1}, Difference("b", "values", float("inf"))),
    ],
)
def test_every_kind_of_difference_is_found(second, difference):
    assert compare_tensors(FIRST, second) == [difference]


def test_the_tolerance_is_a_norm_per_tensor():
    second = {**FIRST, "a": torch.tensor([3.0, 4.5])}
    assert compare_tensors(FIRST, second, tolerance=0.1) == []
    assert compare_tensors(FIRST, second, tolerance=0.099) != []


def test_without_a_tolerance_the_last_bit_counts():
    second = {**FIRST, "a": torch.nextafter(FIRST["a"], torch.tensor(9.0))}
    (difference,) = compare_tensors(FIRST, second)
    assert 0 < difference.relative < 1e-6


def test_not_a_number_is_never_equal():
    second = {**FIRST, "a": torch.tensor([3.0, float("nan")])}
    assert [each.key for each in compare_tensors(FIRST, second, tolerance=1.0)] == ["a"]


def test_two_checkpoints_differ_by_key_and_distance(tmp_path):
    first = save_checkpoint(tmp_path / "first", 1, FIRST, {})
    second = save_checkpoint(tmp_path / "second", 1, {**FIRST, "a": FIRST["a"] * 2}, {})
    assert compare_checkpoints(first, first) == []
    assert compare_checkpoints(first, second) == [Difference("a", "values", 1.0)]
