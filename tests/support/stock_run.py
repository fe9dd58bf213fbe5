"""A checkpoint of stock Megatron: its own layers, its own loop, none of this package's model.

Model, data and loop are those of the emulation's own harness. The repairs stand around
them, because without them the loop does not save in every layout. The norm before the
experts gets the name that it has with Transformer Engine, unless a test asks for the one
that Megatron's plain torch layers save it under.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.upstream.patching import Patch, applied
from megatron_switch.upstream.repairs import repaired_megatron
from support import stock_pretrain


def train_stock(num_ranks: int, flags: str, *, engine_names: bool = True) -> None:
    """Train on forked ranks, and fail when one of them does."""
    code = launch(num_ranks, lambda: _train_rank(flags, engine_names))
    assert code == 0, f"training with {flags} ended with exit code {code}"


def _train_rank(flags: str, engine_names: bool) -> None:
    patches = [_NAMES_OF_TRANSFORMER_ENGINE] if engine_names else []
    with cuda_on_cpu(), repaired_megatron(), applied(patches):
        command = f"{stock_pretrain.MOE_FLAGS} {flags}"
        stock_pretrain.pretrain(command, stock_pretrain.Record())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _with_own_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_gpt_layer_local_submodules(
        num_experts: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        parts = original(num_experts, *args, **kwargs)
        if num_experts is None:
            return parts
        names = dict(parts.sharded_state_dict_keys_map)
        del names["pre_mlp_layernorm."]
        return replace(parts, sharded_state_dict_keys_map=names)

    return get_gpt_layer_local_submodules


_NAMES_OF_TRANSFORMER_ENGINE = Patch(
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules",
    "stock checkpoints of models with experts come from Transformer Engine",
    wrapper=_with_own_norm,
    sha256=("47324aec28f7bd198366ce138e91525b663978380953ffc98cf84494d8bfacdd",),
)
