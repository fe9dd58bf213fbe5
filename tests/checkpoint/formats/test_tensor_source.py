"""What every reader and writer of tensors shares."""

import pytest

from megatron_switch.checkpoint.formats.tensor_source import size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 KiB"),
        (1_000, "1.0 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 10**9, "2.79 GiB"),
        (2**41 + 2**39, "2.50 TiB"),
    ],
)
def test_a_size_stands_in_the_unit_that_suits_it(nbytes, text):
    assert size_text(nbytes) == text
