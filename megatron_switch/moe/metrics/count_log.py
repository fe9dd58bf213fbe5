"""Tokens per expert for ``--save-tokens-per-expert-interval``.

Megatron's logger hooks Transformer Engine's grouped linear layers and records how many rows each
was given. Our own experts have none, and with padded dispatch rows are slots, filled or not. The
function here replaces the logger's registration
(``megatron.training.activation_logging:ActivationLogger.register_tpe_hooks``): files, names and
format stay Megatron's, the numbers are tokens that the experts of this rank kept, one list for each
micro-batch. A micro-batch counts once, also where the layer is recomputed or its exchange is split.

Shape letters:

    R  rows given to this rank's experts    e  local experts
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_switch.moe.switch_mlp import SwitchMLP


def register_count_hooks(self: Any, model: Iterable[nn.Module]) -> None:
    """Make every Switch layer record its tokens per expert in Megatron's logger.

    Args:
        self: Megatron's ``ActivationLogger``, whose method this becomes; it removes the hooks and
            writes what they recorded.
        model: The model chunks of this rank.
    """
    for chunk in model:
        for module in unwrap_model(chunk).modules():
            if isinstance(module, SwitchMLP):
                assert module.layer_number is not None, "a layer of a model has a number"
                counts = _Counts(self._decoder_tpe_records[module.layer_number - 1])
                self._tpe_hooks.append(module.router.register_forward_hook(counts.begin))
                self._tpe_hooks.append(module.experts.register_forward_hook(counts.add))


class _Counts:
    """Adds up one layer's tokens per local expert, micro-batch by micro-batch."""

    def __init__(self, micro_batches: list[list[int]]) -> None:
        self._micro_batches = micro_batches

    def begin(self, router: nn.Module, inputs: object, output: object) -> None:
        """Start the next micro-batch: its tokens have been routed."""
        if torch.is_grad_enabled():  # false in the first of two passes through a recomputed layer
            self._micro_batches.append([])

    def add(self, experts: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        """Count the rows that hold a token: only those have a gate."""
        if not torch.is_grad_enabled():
            return
        _, rows_per_expert_e, gate_R = inputs
        parts = torch.split(gate_R > 0, rows_per_expert_e.tolist())
        counts = torch.stack([part.sum() for part in parts]).tolist()
        before = self._micro_batches[-1] or [0] * len(counts)
        self._micro_batches[-1] = [sum(pair) for pair in zip(before, counts, strict=True)]
