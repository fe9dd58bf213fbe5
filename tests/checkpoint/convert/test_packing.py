"""Packing moves elements and loses none."""

import pytest
import torch

from megatron_switch.checkpoint.convert.packing import Interleaved, PaddedRows


@pytest.mark.parametrize("rest", [(), (5,)])
@pytest.mark.parametrize(
    ("groups", "rows"), [(3, (6, 6, 6)), (2, (8, 4, 4)), (1, (7, 7)), (4, (8, 8)), (1, (3,))]
)
def test_parts_come_back(groups, rows, rest):
    parts = [torch.randn(count, *rest) for count in rows]
    packing = Interleaved(groups, rows)
    packed = packing.pack(parts)
    assert packed.shape == (sum(rows), *rest)
    assert all(torch.equal(a, b) for a, b in zip(packing.unpack(packed), parts, strict=True))


def test_heads_stand_together():
    """Two key-value heads of one channel, each with two queries: q q k v, q q k v."""
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    packed = Interleaved(2, (4, 2, 2)).pack([q, k, v])
    assert packed.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_padding_is_zeros_behind_the_part():
    part = torch.randn(5, 2)
    packed = PaddedRows(5, 8).pack([part])
    assert packed.shape == (8, 2)
    assert packed[5:].count_nonzero() == 0
    packed[5:] = 1.0  # what training made of them
    assert torch.equal(PaddedRows(5, 8).unpack(packed)[0], part)
    assert PaddedRows(5, 5).pack([part]) is part
