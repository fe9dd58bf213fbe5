"""What each system that calls itself Switch does, as defaults of flags.

A recipe is a row of values, not code: it changes defaults, and an explicit flag wins. ``switch`` is
the paper with the capacity of its own implementation; the others are for comparing with, or loading
weights of, the system they are named after. What flags cannot express is no part of a row: Mesh's
groups of at most 1024 tokens, and its losses times the share of real tokens; Flaxformer's router of
deviation 0.02 and experts whose normal is not truncated; Hugging Face's router of deviation 1,
second matrices of experts by the model's width, and balancing loss over the concatenated layers of
a stack. Which layers are sparse is --moe-layer-freq's, in every recipe.

Sources: Mesh-TensorFlow ``moe.py``, Flaxformer's Switch gin files, Hugging Face
``SwitchTransformersConfig``, ST-MoE (arXiv:2202.08906), Megatron-Core 0.19 ``TransformerConfig``.
"""

from collections.abc import Mapping
from types import MappingProxyType

_SWITCH: dict[str, object] = {
    "moe_expert_capacity_factor": 1.25,
    "switch_eval_capacity_factor": 2.0,
    "switch_capacity": None,
    "switch_min_capacity": 4,
    "switch_capacity_rounding": "floor",
    "switch_capacity_group": "microbatch",
    "switch_drop_order": "first_come",
    "switch_init_scale": "0.1",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 0.0,
    "moe_input_jitter_eps": None,
}


def _differs(**changes: object) -> Mapping[str, object]:
    return MappingProxyType(_SWITCH | changes)


RECIPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "switch": _differs(),
        "mesh": _differs(moe_input_jitter_eps=1e-2, switch_init_scale="1.0"),
        "flaxformer": _differs(switch_capacity_rounding="round"),
        "hf": _differs(
            switch_capacity=64,
            switch_capacity_group="sequence",
            switch_init_scale="1.0",
            moe_aux_loss_coeff=1e-3,
            moe_z_loss_coeff=1e-3,
            moe_input_jitter_eps=1e-2,
        ),
        "st-moe": _differs(moe_z_loss_coeff=1e-3),
        "megatron": _differs(
            moe_expert_capacity_factor=-1.0,
            switch_eval_capacity_factor=-1.0,
            switch_min_capacity=0,
            switch_capacity_rounding="ceil",
            switch_drop_order="probability",
            switch_init_scale="megatron",
            moe_aux_loss_coeff=0.0,
        ),
    }
)
"""Defaults by recipe name; keys are attributes of Megatron's argument namespace."""
