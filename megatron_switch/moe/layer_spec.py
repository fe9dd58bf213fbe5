"""The builder of a Switch layer, in the form that Megatron's layer specs want."""

import functools
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoESubmodules

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.experts import build_experts
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.moe.switch_mlp import SwitchMLP


def switch_mlp_spec(
    switch: SwitchConfig, *, seed: int, layers_before: int = 0
) -> functools.partial[Any]:
    """Return a builder for ``submodules.mlp`` of a transformer layer spec.

    Args:
        switch: Switch settings, with dispatch mode resolved.
        seed: Seed of the initial weights.
        layers_before: Layers of the model in front of the stack that the layer belongs to.

    Returns:
        Callable with the keyword arguments of Megatron's ``MlpBuilder`` protocol; it makes a
        :class:`~megatron_switch.moe.switch_mlp.SwitchMLP`.
    """
    submodules = MoESubmodules(
        experts=functools.partial(build_experts, switch=switch),
        router=functools.partial(SwitchRouter, switch=switch),
    )
    return functools.partial(
        SwitchMLP, submodules=submodules, switch=switch, seed=seed, layers_before=layers_before
    )
