"""Stock Megatron layers, saved, resumed and left uninterrupted: the harness of these tests.

The model, data and loop are those of the emulation's own harness. Added here: the repairs
under test, and the mark that our experts carry from construction in every layout.
"""

from dataclasses import dataclass

import torch
from emulation import stock_pretrain

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.patching import Patch, applied
from megatron_switch.repairs import repaired_megatron

SAVED, LAST = 3, 5
"""Iterations at which a run is interrupted and at which it ends."""


@dataclass(frozen=True)
class Layout:
    """Ranks and the flags that arrange them."""

    ranks: int
    flags: str


def _mark_experts(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.allreduce = False

    return __init__


_MARKED_EXPERTS = Patch(
    "megatron.core.transformer.moe.experts:SequentialMLP.__init__",
    "the optimizer of experts must not depend on the layout",
    wrapper=_mark_experts,
    sha256=("f9520768aecf779fd2851e5d4a7f7f8b71cd1c10b0bcc78cd01505c254c11acc",),
)


def train(layout: Layout, flags: str) -> None:
    """Train on forked ranks and fail when they do."""
    command = f"{layout.flags} {flags}"
    code = launch(layout.ranks, lambda: _train_rank(command))
    assert code == 0, f"training with {command} ended with exit code {code}"


def _train_rank(flags: str) -> None:
    with cuda_on_cpu(), repaired_megatron(), applied([_MARKED_EXPERTS]):
        stock_pretrain._pretrain(flags, losses=[])
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
