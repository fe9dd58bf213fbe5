"""A checkpoint rewritten for another layout, offline, in one process."""

import math
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import fields
from typing import Any

from megatron_switch.checkpoint.convert.megatron_source import check_parts
from megatron_switch.checkpoint.formats.dist_reader import DistSource
from megatron_switch.checkpoint.load.files import LoadContext, checkpoint_folder, find_checkpoint
from megatron_switch.checkpoint.load.stored_values import check_stored
from megatron_switch.checkpoint.reshard.pipeline_placement import Placement
from megatron_switch.checkpoint.reshard.resharding import (
    args_for,
    plan_resharding,
    read_state,
    write_resharding,
)
from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import CheckpointError, LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import FLAGS
from megatron_switch.models.t5_layers import PIPELINE_REFUSAL
from megatron_switch.training.logs.known_warnings import known_warnings_hidden
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.utils.progress import bytes_progress
from megatron_switch.utils.units import size_text


@known_warnings_hidden()
def reshard(own: Namespace, sizes: dict[str, Any]) -> None:
    """Rewrite a checkpoint as the flags of the command say.

    Args:
        own: The flags.
        sizes: Parallel sizes of the new layout, by axis.

    Raises:
        SwitchError: The layout is not legal for the model, or the checkpoint cannot be moved.
    """
    found = find_checkpoint(
        checkpoint_folder(own.load),
        iteration=own.iteration,
        context=LoadContext(iteration_flag="--iteration", can_start_anew=False),
    )
    state = read_state(found)
    check_stored(state["args"], found.folder)
    check_parts(DistSource(found.folder), state["args"])
    placement = Placement.of(own)
    layout = _layout(own.world_size, sizes, state["args"], placement)
    plan = plan_resharding(found, layout, state, placement)
    with bytes_progress("resharding", 2 * plan.nbytes) as on_bytes:
        write_resharding(plan, own.save, workers=own.workers, on_bytes=on_bytes)
    old = state["args"]
    print(
        f"{own.save}: {found.folder.name}, {size_text(plan.nbytes)} in {len(plan.chunks)} "
        f"regions, read back and equal. TP {old.tensor_model_parallel_size} -> {layout.tp}, PP "
        f"{old.pipeline_model_parallel_size} -> {layout.pp}, EP {old.expert_model_parallel_size} "
        f"-> {layout.ep}, ETP {old.expert_tensor_parallel_size} -> {layout.etp}."
    )
    for note in plan.notes:
        print(note)


def _layout(
    world_size: int | None, sizes: dict[str, Any], args: Namespace, placement: Placement
) -> Layout:
    """Return the new layout, checked against the model as at the start of a run."""
    for name in ("ep", "etp"):
        if sizes[name] > 1 and not args.num_experts:
            raise CheckpointError(
                f"The model has no experts, got {FLAGS[name]} {sizes[name]}. Leave the flag out."
            )
    least = sizes["pp"] * math.lcm(sizes["tp"], sizes["ep"] * sizes["etp"])
    layout = Layout(world_size=world_size or least, cp=1, **sizes)
    if getattr(args, "switch_arch", "gpt") == "t5" and layout.pp > 1:
        raise LayoutError(PIPELINE_REFUSAL.format(layout.pp))
    new, _ = args_for(args, layout, placement)
    new.global_batch_size = None  # the next run decides how much a step reads
    new.context_parallel_size = 1
    with redirect_stdout(sys.stderr):
        return check_layout(new, _settings(args))


def _settings(args: Namespace) -> SwitchConfig:
    """Return the stored Switch settings; what stock Megatron or an older release lacks is ours."""
    stored = {
        field.name: getattr(args, FLAG_PREFIX + field.name, None) for field in fields(SwitchConfig)
    }
    return SwitchConfig(**{name: value for name, value in stored.items() if value is not None})
