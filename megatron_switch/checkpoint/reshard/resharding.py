"""Rewrite a checkpoint for another layout: one process, no model, weights and moments together.

A checkpoint in ``torch_dist`` format loads in any layout as it is; what another layout costs is
that each rank reads pieces of many files. Here every rank's regions of the new layout lie in files
of that rank, the stored arguments name the new layout, and what only the old one could use (random
states, the fault log) is left out, as Megatron itself ignores it after such a change. Every region
is read back and compared with the source before the checkpoint gets its name.

Refused: optimizer state in the order of one layout's gradient buckets. It cannot be split into
tensors without building that layout's model.
"""

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_switch.checkpoint.formats.atomic_folder import folder_put_in_place
from megatron_switch.checkpoint.formats.dist_metadata import COMMON_STATE_KEY, read_common_state
from megatron_switch.checkpoint.formats.dist_reader import DistSource
from megatron_switch.checkpoint.formats.dist_writer import TensorChunk, write_dist_checkpoint
from megatron_switch.checkpoint.formats.source_settings import copy_settings
from megatron_switch.checkpoint.formats.tensor_source import differing_bits
from megatron_switch.checkpoint.load.files import RELEASE, TRACKER, FoundCheckpoint
from megatron_switch.checkpoint.reshard.pipeline_placement import Placement
from megatron_switch.checkpoint.reshard.tensor_slices import TensorSlices
from megatron_switch.errors import CheckpointError
from megatron_switch.layout.grid import Layout

_OF_THE_LAYOUT = ("rng_state/", "rerun_state_machine_state/")
_BUCKETS = "dp_reshardable"

EQUAL_SHARES = Placement()
"""Every pipeline stage has as many layers as any other."""


@dataclass(frozen=True)
class Resharding:
    """A checkpoint and the layout it is to be rewritten for."""

    found: FoundCheckpoint
    source: DistSource
    state: dict[str, Any]
    """Common state of the new checkpoint."""
    chunks: tuple[TensorChunk, ...]
    objects: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, written once and read back once."""
        return sum(chunk.nbytes for chunk in self.chunks)


def plan_resharding(
    found: FoundCheckpoint,
    layout: Layout,
    state: dict[str, Any],
    placement: Placement = EQUAL_SHARES,
) -> Resharding:
    """Plan to rewrite a checkpoint.

    Args:
        found: The checkpoint.
        layout: The new layout, which must be legal for the model.
        state: Its common state, from ``read_common_state``.
        placement: Which layers the new pipeline stages have.

    Raises:
        CheckpointError: It is not complete, or its optimizer state cannot be moved.
        LayoutError: The layers do not go onto the stages.
    """
    args = state["args"]
    refuse_buckets(state)
    source = DistSource(found.folder)
    new_args, same = args_for(args, layout, placement)
    gated = bool(getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False))
    gated = gated or getattr(args, "switch_activation", "auto") == "gated-gelu"
    slices = TensorSlices(layout, placement.stages(args.num_layers, layout.pp), gated)
    chunks = tuple(
        TensorChunk(key, info.shape, info.dtype, region, partial(source.read, key, region), rank)
        for key, info in source.tensors.items()
        for rank, region in slices.of(key, info.shape)
    )
    dropped = () if same else _OF_THE_LAYOUT
    objects = tuple(
        key
        for key in sorted(source.objects)
        if key != COMMON_STATE_KEY and not key.startswith(dropped)
    )
    new_state = {**state, "args": new_args}
    notes: tuple[str, ...] = ()
    if not same:
        new_state.pop("rerun_state_machine", None)
        if any(key.startswith("rng_state/") for key in source.objects):
            notes = (
                "Random states belong to the old layout and are left out; dropout draws other "
                "numbers from here on. Jitter and expert dropout do not depend on them.",
            )
    return Resharding(found, source, new_state, chunks, objects, notes)


def refuse_buckets(state: dict[str, Any]) -> None:
    """Raise when the optimizer state lies in the order of gradient buckets.

    Raises:
        CheckpointError: Naming the flag that saves it otherwise.
    """
    form = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if form in (None, "fully_reshardable", "fully_sharded_model_space"):
        return
    raise CheckpointError(
        f"The optimizer state is stored in {form} form, in the order of the gradient buckets of "
        "the run that saved it, and cannot be moved to another layout without its model. Load the "
        "checkpoint in its own layout, save it with --dist-ckpt-optim-fully-reshardable, and "
        "reshard that."
        if form == _BUCKETS
        else f"The optimizer state is stored in {form} form, which cannot be moved to another "
        "layout. Save the checkpoint with --dist-ckpt-optim-fully-reshardable first."
    )


def args_for(
    args: Namespace, layout: Layout, placement: Placement = EQUAL_SHARES
) -> tuple[Namespace, bool]:
    """Return arguments for another layout, and whether it is the stored one.

    Args:
        args: Stored arguments; not changed.
        layout: The new layout.
        placement: Which layers its pipeline stages have.
    """
    new = copy.copy(args)
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "world_size": layout.world_size,
        "data_parallel_size": layout.dp,
    }
    same = all(getattr(args, name, None) == size for name, size in sizes.items())
    same = same and Placement.of(args) == placement
    for name, size in sizes.items():
        setattr(new, name, size)
    if not same:
        new.no_save_rng = True  # what Megatron reads as: there are no random states
        placement.write_to(new)
        new.sequence_parallel = layout.tp > 1
    return new, same


def write_resharding(
    plan: Resharding,
    target: Path,
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a planned checkpoint, read it back, and put it in place.

    Args:
        plan: What :func:`plan_resharding` returned.
        target: Folder to make, with the tracker file in it.
        workers: Threads.
        on_bytes: Called with bytes that were written, and again with those that were compared.

    Raises:
        CheckpointError: The target exists or its disk is full, or a file is damaged.
    """
    name = plan.found.folder.name
    with folder_put_in_place(target, needed_bytes=plan.nbytes, flag="--save") as folder:
        iteration = folder / name
        iteration.mkdir()
        objects = {key: plan.source.read_object(key) for key in plan.objects}
        write_dist_checkpoint(
            iteration, plan.chunks, objects, plan.state, workers=workers, on_bytes=on_bytes
        )
        compare_copies(plan, DistSource(iteration), on_bytes)
        copy_settings(plan.found.folder.parent, folder)
        tracker = RELEASE if plan.found.is_release else str(plan.found.iteration)
        (folder / TRACKER).write_text(tracker, encoding="utf-8")


def compare_copies(plan: Resharding, written: DistSource, on_bytes: Callable[[int], None]) -> None:
    """Raise unless every region reads back as it was in the source.

    Raises:
        CheckpointError: Naming the first key that differs.
    """
    for chunk in plan.chunks:
        key, region = chunk.key, chunk.region
        first, second = plan.source.read(key, region), written.read(key, region)
        if differing_bits(first, second):
            raise CheckpointError(
                f"{written.folder}: {key} at {region.offsets} reads back differently from what "
                "was written. The disk is faulty; write to another one."
            )
        on_bytes(chunk.nbytes)


def read_state(found: FoundCheckpoint) -> dict[str, Any]:
    """Return the common state of a checkpoint that stores arguments.

    Raises:
        CheckpointError: It stores none.
    """
    state = read_common_state(found.folder)
    if not isinstance(state.get("args"), Namespace):
        raise CheckpointError(
            f"{found.folder} stores no arguments, so its model and layout are not known. Load it "
            "in a run with the model's flags, and reshard what that run saves."
        )
    return state
