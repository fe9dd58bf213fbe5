"""Whether a model fits the ranks it is to be trained on: their grid, and the memory of each.

A size with three zeros too many otherwise ends in an allocator's traceback, or swaps for hours.
Counted are the weights and one buffer of expert slots; gradients, optimizer and activations are
estimated by the planner (``megatron-switch plan``). What is refused here is too large by any
estimate.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Literal

import psutil
import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import Sizes, rank_order
from megatron_switch.layout.validation import validate_layout, virtual_stages
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.training.logs.banner import has_uneven_stages
from megatron_switch.utils.units import count_text, size_text

_EXCESS = 4  # a buffer this many times larger than the memory is surely a mistake


def check_layout(args: Namespace, switch: SwitchConfig) -> Layout:
    """Return the rank grid, if it fits model and batch.

    Raises:
        LayoutError: With both grids and the nearest legal settings.
    """
    sizes = Sizes(
        world_size=args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        vp=_virtual_stages(args),
        order=rank_order(tp_pp_dp_mapping=args.use_tp_pp_dp_mapping),
    )
    own = Architecture.from_args(args).constraints
    given = replace(
        own,
        num_layers=None if has_uneven_stages(args) else own.num_layers,
        seq_length=args.seq_length,
        sequence_parallel=args.sequence_parallel,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        chunk_group=args.microbatch_group_size_per_vp_stage,
        overlap_p2p=args.overlap_p2p_comm,
        capacity_group=switch.capacity_group,
    )
    return validate_layout(sizes, given)


def check_model_memory(
    args: Namespace, layout: Layout, *, device: Literal["cuda", "cpu"], ranks_here: int
) -> None:
    """Raise ConfigError if weights alone are larger than the memory of the device.

    Args:
        args: Validated arguments.
        layout: The rank grid.
        device: Where the weights go; on CPUs all ranks of the host share its memory.
        ranks_here: Ranks on this host.
    """
    if has_uneven_stages(args) or args.use_megatron_fsdp or args.use_torch_fsdp2:
        return  # a rank's share is not known from here
    model = Architecture.from_args(args)
    count = max(stage_parameters(model, layout, stage).total for stage in range(layout.pp))
    width = 2 if args.bf16 or args.fp16 else 4
    if device == "cuda":
        memory = torch.cuda.get_device_properties(args.local_rank).total_memory
        room = f"its GPU has {size_text(memory)}"
    else:
        memory = psutil.virtual_memory().total // ranks_here
        room = f"this host has {size_text(memory)} for each of its {ranks_here} ranks"
    if count * width > memory:
        raise ConfigError(
            f"A rank's weights alone would be {size_text(count * width)}: {count_text(count)} "
            f"parameters of {width} bytes; {room}. Spread the model over more ranks "
            "(--expert-model-parallel-size, --tensor-model-parallel-size, "
            "--pipeline-model-parallel-size), or make it smaller (--num-experts, --hidden-size, "
            "--num-layers)."
        )


def check_buffer_memory(
    args: Namespace, switch: SwitchConfig, device: Literal["cuda", "cpu"]
) -> None:
    """Raise ConfigError if one padded buffer of expert slots cannot be in any memory.

    Args:
        args: Parsed arguments of a model with experts.
        switch: Switch settings, resolved.
        device: Where the buffer would be.
    """
    if switch.dispatch != "padded":
        return  # packed buffers hold tokens that exist, whatever the capacity
    tokens = args.micro_batch_size * max(args.seq_length, args.decoder_seq_length or 0)
    capacity = switch.capacity or expert_capacity(
        tokens,
        args.num_experts,
        max(args.moe_expert_capacity_factor, switch.eval_capacity_factor),
        min_capacity=switch.min_capacity,
        rounding=switch.capacity_rounding,
    )
    width = 2 if args.bf16 or args.fp16 else 4
    needed = capacity * args.num_experts * args.hidden_size * width
    shards = args.tensor_model_parallel_size * args.context_parallel_size
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if device == "cuda"
        else psutil.virtual_memory().total
    )
    if needed // shards > _EXCESS * memory:
        raise ConfigError(
            f"One padded expert buffer would be {size_text(needed / shards)}: "
            f"{args.num_experts} experts x {capacity} slots x {args.hidden_size} elements of "
            f"{width} bytes over {shards} ranks; this device has {size_text(memory)}. Lower "
            "--moe-expert-capacity-factor, --switch-capacity or --micro-batch-size."
        )


def _virtual_stages(args: Namespace) -> int | None:
    """Return the model chunks of a stage, as Megatron will count them."""
    stages, pp = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        text = args.pipeline_model_parallel_layout
        return int(PipelineParallelLayerLayout.get_num_stages_from_str(text)) // pp or None
    if stages is None and args.num_layers_per_virtual_pipeline_stage and args.num_layers:
        layers = args.num_layers
        layers += args.account_for_embedding_in_pipeline_split
        layers += args.account_for_loss_in_pipeline_split
        return virtual_stages(layers, pp, args.num_layers_per_virtual_pipeline_stage)
    return int(stages) if stages is not None else None
