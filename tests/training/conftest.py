"""Command lines of the smallest model that has everything, and Megatron's arguments from them."""

from collections.abc import Callable

import pytest

from megatron_switch.training.arguments import CommandLine, parse_command_line

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --switch-device cpu"
)
SPARSE = f"{TINY} --num-experts 4"


def parsed(flags: str) -> CommandLine:
    return parse_command_line(flags.split())


@pytest.fixture
def sparse_line() -> Callable[[str], CommandLine]:
    """Parse the sparse model's flags and some more."""
    return lambda more="": parsed(f"{SPARSE} {more}")


@pytest.fixture
def dense_line() -> Callable[[str], CommandLine]:
    """Parse the dense model's flags and some more."""
    return lambda more="": parsed(f"{TINY} {more}")
