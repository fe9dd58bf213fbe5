"""Conversions hold one tensor at a time: they run where the model as a whole finds no room.

The kernel keeps the account. A forked process converts a small model first, so that everything is
imported, and may then claim twice the largest tensor and a constant more than it has. The model is
larger than that, and reading all of it at once fails there.
"""

import ctypes
import multiprocessing
import resource
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import hf_models

from megatron_switch.checkpoint.convert.conversion import (
    plan_export,
    plan_import,
    write_export,
    write_import,
)
from megatron_switch.checkpoint.convert.verification import plan_comparison
from megatron_switch.checkpoint.formats.hf_folder import HuggingFaceSource
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.checkpoint.reshard.resharding import (
    plan_resharding,
    read_state,
    write_resharding,
)
from megatron_switch.commands.checkpoints.written_arguments import written_arguments
from megatron_switch.layout.grid import Layout

pytestmark = pytest.mark.slow

MIB = 2**20
LARGEST_BYTES = 8 * MIB
"""Both halves of a gated unit's first matrix, which are one tensor of Megatron's."""
CONSTANT_BYTES = 48 * MIB
MODEL_BYTES = 128 * MIB
"""Far above what a conversion may claim."""
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9}
TWO_RANKS = Layout(world_size=2, tp=2, cp=1, pp=1, ep=1, etp=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model on both sides, and a small one."""
    made = tmp_path_factory.mktemp("models")
    for name, sizes in (("small", {}), ("large", SIZES)):
        hf_models.save(made / name / "hf", "llama", **sizes)
        plan = plan_import(made / name / "hf")
        write_import(plan, arguments(plan), made / name / "megatron")
    assert plan.nbytes > MODEL_BYTES
    assert max(chunk.nbytes for chunk in plan.chunks) == LARGEST_BYTES
    return {name: made / name for name in ("small", "large")}


def arguments(plan) -> Namespace:
    flags = {**plan.model.flags, "tokenizer-type": "NullTokenizer", "vocab-size": 98}
    return written_arguments(flags, padded_vocab_size=plan.model.padded_vocab_size)


def to_megatron(folder: Path, target: Path) -> None:
    write_import(plan_import(folder / "hf"), Namespace(num_layers=9), target / "megatron")


def to_hf(folder: Path, target: Path) -> None:
    write_export(plan_export(find_checkpoint(folder / "megatron")), target / "hf")


def verify(folder: Path, target: Path) -> None:
    plan_comparison(folder / "hf", find_checkpoint(folder / "megatron")).carry_out()


def reshard(folder: Path, target: Path) -> None:
    found = find_checkpoint(folder / "megatron")
    write_resharding(plan_resharding(found, TWO_RANKS, read_state(found)), target / "resharded")


def read_everything(folder: Path, target: Path) -> None:
    source = HuggingFaceSource(folder / "hf")
    assert len([source.read(key) for key in source.tensors]) == len(source.tensors)


@pytest.mark.parametrize("work", [to_megatron, to_hf, verify, reshard])
def test_twice_the_largest_tensor_is_room_enough(folders, tmp_path, work):
    assert ended(work, folders, tmp_path) == 0


def test_the_whole_model_finds_no_room(folders, tmp_path):
    assert ended(read_everything, folders, tmp_path) == NO_ROOM


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
NO_ROOM = 7
"""Exit code of a process that was refused memory."""


def ended(work: Callable[[Path, Path], None], folders: dict[str, Path], target: Path) -> int:
    """Do work in a process with little memory to spare, and return its exit code."""
    child = multiprocessing.get_context("fork").Process(
        target=_with_little_room, args=(work, folders, target)
    )
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _with_little_room(
    work: Callable[[Path, Path], None], folders: dict[str, Path], target: Path
) -> None:
    torch.set_num_threads(1)
    # Large tensors get pages of their own, not what an earlier test has left free in the heap.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    for name in ("before", "under"):
        (target / name).mkdir()
    work(folders["small"], target / "before")
    limit = _data_bytes() + 2 * LARGEST_BYTES + CONSTANT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        work(folders["large"], target / "under")
    except MemoryError:
        raise SystemExit(NO_ROOM) from None


def _data_bytes() -> int:
    """Return the private writable memory that this process has claimed, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
