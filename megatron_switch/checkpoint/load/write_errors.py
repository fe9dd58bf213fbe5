"""The error of a checkpoint that could not be written, most often because the disk is full.

Megatron writes in worker threads and keeps only the class of their errors, so the reason is found
by comparing the bytes that were to be written with the room on the disk. Nothing is deleted, as
other ranks may still be writing; the message names the last complete checkpoint instead.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.units import size_text

_FULL = 2**20
"""Bytes that a full disk may have free: less than the smallest write that did not fit."""


def bytes_to_write(state: Mapping[str, Any]) -> int:
    """Return the bytes of tensors that all ranks together write of a sharded state.

    Args:
        state: Megatron's sharded state of this rank, as the strategy that saves it gets it.
    """
    local = sum(
        leaf.data.nbytes
        for leaf in nested_values(state)
        if isinstance(leaf, ShardedTensor)
        and leaf.data is not None
        and is_main_replica(leaf.replica_id)
    )
    total = torch.tensor([local], dtype=torch.int64, device="cuda")
    dist.all_reduce(total)
    return int(total)


def unwritten(folder: Path, num_bytes: int, reason: object) -> CheckpointError:
    """Return the error that explains why a checkpoint is not there.

    Args:
        folder: Folder of the iteration, as far as it was written.
        num_bytes: Bytes that were to be written into it.
        reason: Error of the writer.
    """
    files = [path for path in folder.glob("*") if path.is_file()]
    free = shutil.disk_usage(folder).free
    room = free + sum(_bytes_on_disk(path) for path in files)
    needed = f"it needs over {size_text(num_bytes)}, and"
    why = f"{needed} there was room for {size_text(room)}."
    if free > _FULL and room > num_bytes:
        why = (
            f"{needed} the disk had room for {size_text(room)}; a quota, a limit on the size of "
            f"files (ulimit -f) or the disk itself stands in the way: {reason}."
        )
    return CheckpointError(
        f"The checkpoint {folder} could not be written: {why} Delete it and others that are not "
        f"needed, or save elsewhere with --save, and start again. {_last_complete(folder)}"
    )


def _bytes_on_disk(path: Path) -> int:
    return os.stat(path).st_blocks * 512  # POSIX counts blocks so, whatever their size


def _last_complete(folder: Path) -> str:
    try:
        found = find_checkpoint(folder.parent)
    except CheckpointError:
        return "There is no earlier checkpoint."
    return f"{found.folder.name} is complete: the run continues from it."
