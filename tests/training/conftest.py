"""Parsed command lines of the smallest model that has everything."""

from collections.abc import Callable

import pytest
from tiny_run import SPARSE, TINY

from megatron_switch.training.arguments import CommandLine, parse_command_line


@pytest.fixture
def sparse_line() -> Callable[[str], CommandLine]:
    """Parse the sparse model's flags and some more."""
    return lambda more="": parse_command_line(f"{SPARSE} {more}".split())


@pytest.fixture
def dense_line() -> Callable[[str], CommandLine]:
    """Parse the dense model's flags and some more."""
    return lambda more="": parse_command_line(f"{TINY} {more}".split())
