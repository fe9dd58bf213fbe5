"""Whether a rank's weights can be in its memory at all.

A size with three zeros too many otherwise ends in an allocator's traceback, or keeps a computer
busy until somebody wonders. Gradients, optimizer and activations are the planner's to reckon
(``megatron-switch plan``): what is refused here has no chance on any count.
"""

from argparse import Namespace
from typing import Literal

import psutil
import torch

from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.training.logs.banner import gpt_shape, has_uneven_stages
from megatron_switch.utils.units import count_text, size_text


def check_model_memory(
    args: Namespace,
    layout: Layout,
    *,
    sparse_layers: tuple[int, ...],
    device: Literal["cuda", "cpu"],
    ranks_here: int,
) -> None:
    """Raise ConfigError if weights alone are larger than the memory of the device.

    Args:
        args: Validated arguments.
        layout: The rank grid.
        sparse_layers: 1-based numbers of the layers with experts.
        device: Where the weights go; on CPUs all ranks of the host share its memory.
        ranks_here: Ranks on this host.
    """
    if has_uneven_stages(args) or args.use_megatron_fsdp or args.use_torch_fsdp2:
        return  # a rank's share is not known from here
    shape = gpt_shape(args, sparse_layers)
    count = max(stage_parameters(shape, layout, stage).total for stage in range(layout.pp))
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
