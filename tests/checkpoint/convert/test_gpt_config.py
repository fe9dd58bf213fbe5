"""Every field of a decoder-only model that has a key comes back from ``config.json`` as it was."""

from dataclasses import replace

import pytest

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture, described
from megatron_switch.checkpoint.convert.gpt_config import (
    GPT_TYPES,
    choose_type,
    read_gpt_config,
    write_gpt_config,
)

MODEL = Architecture(
    decoder=Stack(4, (1, 2)),
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=24,
    moe_ffn_hidden_size=8,
    num_experts=6,
    padded_vocab_size=100,
    max_position_embeddings=32,
    add_bias_linear=True,
    routing={"moe_expert_capacity_factor": 1.5, "switch_drop_order": "probability"},
)
NAMES = [each.name for each in described("gpt")]
OTHERS = {
    "activation_func": {"gelu": "relu2", "silu": "quick_gelu"},
    "normalization": {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm"},
    "position_embedding_type": {"rope": "learned_absolute"},
}
"""Another word that a field may have, by the one that it has."""


def changed(model, name):
    """Return a model in which one field has another value that it may have."""
    value = getattr(model, name)
    if name == "gated_linear_unit":
        return replace(model, gated_linear_unit=not value, activation_func=GATED[not value])
    if isinstance(value, bool):
        return replace(model, **{name: not value})
    if name in OTHERS:
        return replace(model, **{name: OTHERS[name][value]})
    return replace(model, **{name: value // 2 if name == "num_query_groups" else value * 2})


GATED = {True: "silu", False: "gelu"}


@pytest.mark.parametrize("name", NAMES)
def test_our_own_model_type_says_every_field(name):
    model = changed(MODEL, name)
    assert model != MODEL
    config = write_gpt_config(model, GPT_TYPES["switch_gpt"], "float32")
    again = read_gpt_config(config, "config.json")
    expected = replace(model, rotary_base=10000.0) if "rope_theta" not in config else model
    assert again == expected


@pytest.mark.parametrize("name", NAMES)
def test_no_stock_type_is_chosen_that_would_lose_a_field(name):
    stock = replace(
        MODEL,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func="silu",
        routing={"moe_expert_capacity_factor": -1.0, "switch_eval_capacity_factor": -1.0},
    )
    assert choose_type(stock)[0].name == "qwen2_moe"
    model = changed(stock, name)
    chosen, _ = choose_type(model)
    assert read_gpt_config(write_gpt_config(model, chosen, "float32"), "config.json") == model
