"""Stock Megatron layers, trained in one go and in two: the harness of the resume tests.

Model, data and loop are those of the emulation's own harness. Added here are the repairs
under test, and the mark that this package's experts carry from construction in every
layout, without which no layout with experts can resume in another.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from emulation import stock_pretrain

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.emulation.launch import import_megatron
from megatron_switch.patching import Patch, applied
from megatron_switch.repairs import repaired_megatron


def train(num_ranks: int, flags: str) -> None:
    """Train on forked ranks, and fail when one of them does."""
    import_megatron()
    gc.freeze()  # Megatron collects garbage often; what the ranks inherit is none of it
    code = launch(num_ranks, lambda: _train_rank(flags))
    assert code == 0, f"training with {flags} ended with exit code {code}"


def _train_rank(flags: str) -> None:
    with cuda_on_cpu(), repaired_megatron(), applied([_MARKED_EXPERTS]):
        stock_pretrain.pretrain(f"{stock_pretrain.MOE_FLAGS} {flags}", stock_pretrain.Record())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _mark(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.allreduce = False

    return __init__


_MARKED_EXPERTS = Patch(
    "megatron.core.transformer.moe.experts:SequentialMLP.__init__",
    "the optimizer of experts must be the same one in every layout",
    wrapper=_mark,
    sha256=("f9520768aecf779fd2851e5d4a7f7f8b71cd1c10b0bcc78cd01505c254c11acc",),
)
