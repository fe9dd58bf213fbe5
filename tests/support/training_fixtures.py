"""Parsed command lines of the smallest model that has everything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_switch.training.arguments.parser import CommandLine, parse_command_line
from support.tiny_run import EXACT, SPARSE, TINY, trained


@pytest.fixture
def sparse_line() -> Callable[[str], CommandLine]:
    """Parse the sparse model's flags and some more."""
    return lambda more="": parse_command_line(f"{SPARSE} {more}".split())


@pytest.fixture
def dense_line() -> Callable[[str], CommandLine]:
    """Parse the dense model's flags and some more."""
    return lambda more="": parse_command_line(f"{TINY} {more}".split())


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    """Write 400 documents of random tokens; return the flags that name them."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        builder.add_item(torch.randint(127, (20,), generator=generator))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return f"--data-path {prefix} --split 80,10,10"


@pytest.fixture(scope="session")
def one_rank(data, tmp_path_factory) -> Callable[[str], tuple[str, Path]]:
    """Train with one rank; return the flags that go on after iteration 1, and the run folder."""
    made = {}

    def run(pattern: str) -> tuple[str, Path]:
        if pattern not in made:
            folder = tmp_path_factory.mktemp("one_rank") / "run"
            flags = f"{EXACT} {data} --num-layers {len(pattern)}"
            flags += f" --moe-layer-freq [{','.join(pattern)}]"
            trained(f"{flags} --switch-run-dir {folder}")
            made[pattern] = f"{flags} --load {folder / 'checkpoints'} --ckpt-step 1", folder
        return made[pattern]

    return run
