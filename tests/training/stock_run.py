"""A checkpoint of stock Megatron: its own layers, its own loop, none of this package's model.

Model, data and loop are those of the emulation's own harness. The repairs stand around
them, because without them the loop does not save on every layout.
"""

import torch
from emulation import stock_pretrain

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.repairs import repaired_megatron


def train_stock(num_ranks: int, flags: str) -> None:
    """Train on forked ranks, and fail when one of them does."""
    code = launch(num_ranks, lambda: _train_rank(flags))
    assert code == 0, f"training with {flags} ended with exit code {code}"


def _train_rank(flags: str) -> None:
    with cuda_on_cpu(), repaired_megatron():
        stock_pretrain._pretrain(f"{stock_pretrain.MOE_FLAGS} {flags}", losses=[])
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
