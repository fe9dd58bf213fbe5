"""Numbers stand in the unit that suits them."""

import pytest

from megatron_switch.utils.units import count_text, decimal_size_text, gigabytes, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (1_000, "1.0 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 10**9, "2.79 GiB"),
        (2**41 + 2**39, "2.50 TiB"),
        (2**52, "4,096.00 TiB"),
    ],
)
def test_sizes_of_files_are_binary(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(999, "1.0 kB"), (10**6, "1.00 MB"), (80e9, "80.00 GB"), (3.84e12, "3.84 TB")],
)
def test_sizes_of_gpu_memory_are_decimal(num_bytes, text):
    assert decimal_size_text(num_bytes) == text


def test_gigabytes_for_a_column_have_no_unit():
    assert gigabytes(1_234_560_000_000) == "1,234.6"
    assert gigabytes(1_234_000, 3) == "0.001"


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1K"), (83296, "83.3K"), (7_000_000, "7M"), (1.571e12, "1.57T")],
)
def test_counts_have_three_digits(count, text):
    assert count_text(count) == text
