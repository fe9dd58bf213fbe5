"""Every field of a decoder-only model that has a key comes back from ``config.json`` as it was."""

from dataclasses import replace

import pytest

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture, described
from megatron_switch.checkpoint.convert.gpt_config import read_gpt_config, write_gpt_config
from megatron_switch.checkpoint.convert.gpt_types import GPT_TYPES, OF_TRAINING, choose_type
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.errors import CheckpointError

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
    moe_aux_loss_coeff=0.25,
    moe_z_loss_coeff=0.125,
    moe_input_jitter_eps=0.0625,
    switch_expert_dropout=0.03125,
    routing={"moe_expert_capacity_factor": 1.5, "switch_drop_order": "probability"},
)
STOCK = dict(
    add_bias_linear=False,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func="silu",
    routing={"moe_expert_capacity_factor": -1.0, "switch_eval_capacity_factor": -1.0},
    hidden_dropout=0.0,
    switch_expert_dropout=0.0,
    moe_z_loss_coeff=None,
    moe_input_jitter_eps=None,
)
NAMES = [each.name for each in described("gpt")]
OTHERS = {
    "activation_func": {"gelu": "relu2", "silu": "quick_gelu"},
    "normalization": {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm"},
    "position_embedding_type": {"rope": "learned_absolute"},
}
"""Another word that a field may have, by the one that it has."""


def read(config):
    return read_gpt_config(config_fields(config, "config.json", "GPT"))


def changed(model, name):
    """Return a model in which one field has another value that it may have."""
    value = getattr(model, name)
    if name == "gated_linear_unit":
        return replace(model, gated_linear_unit=not value, activation_func=GATED[not value])
    if isinstance(value, bool):
        return replace(model, **{name: not value})
    if name in OTHERS:
        return replace(model, **{name: OTHERS[name][value]})
    halved = name in ("num_query_groups", "rotary_percent")
    return replace(
        model,
        **{name: value // 2 if name == "num_query_groups" else value / 2 if halved else value * 2},
    )


GATED = {True: "silu", False: "gelu"}


@pytest.mark.parametrize("name", NAMES)
def test_our_own_model_type_says_every_field(name):
    model = changed(MODEL, name)
    assert model != MODEL
    config = write_gpt_config(model, GPT_TYPES["switch_gpt"], "float32")
    again = read(config)
    expected = replace(model, rotary_base=10000.0) if "rope_theta" not in config else model
    assert again == expected


@pytest.mark.parametrize("name", NAMES)
def test_no_stock_type_is_chosen_that_would_lose_a_field(name):
    stock = replace(MODEL, **STOCK)
    assert choose_type(stock)[0].name == "qwen2_moe"
    if name in OF_TRAINING:  # no reason for a layout that no stock class opens, but said
        chosen, notes = choose_type(replace(stock, **{name: 0.25}))
        assert chosen.name == "qwen2_moe"
        assert f"settings of training, and the export does not keep them: --{name}".replace(
            "_", "-"
        ) in str(notes).replace("_", "-")
        return
    model = changed(stock, name)
    chosen, _ = choose_type(model)
    assert read(write_gpt_config(model, chosen, "float32")) == model


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("partial_rotary_factor", 7, "a finite number, at least 0 and at most 1, found 7"),
        ("partial_rotary_factor", float("nan"), "expected a finite number, above 0, found NaN"),
        ("attention_dropout", 1.0, "a finite number, at least 0 and below 1, found 1"),
        ("hidden_dropout", -0.5, "a finite number, at least 0 and below 1, found -0.5"),
        ("router_jitter_noise", 2, "a finite number, at least 0 and below 1, found 2"),
        ("rms_norm_eps", 0, "above 0, found 0"),
        ("rope_theta", float("inf"), "expected a finite number"),
        ("hidden_size", 10**30, "a finite number, at least 1 and at most 2\\^40"),
        ("head_dim", -1, "1 or more, found -1"),
        ("max_position_embeddings", 10**30, "a finite number, at least 1 and at most 2\\^40"),
        ("vocab_size", 0, "1 or more, found 0"),
    ],
)
def test_a_number_that_its_flag_cannot_have_is_refused(key, value, message):
    config = write_gpt_config(MODEL, GPT_TYPES["switch_gpt"], "float32")
    with pytest.raises(CheckpointError, match=message):
        read({**config, key: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_expert_capacity_factor", float("nan"), "expected a finite number, found NaN"),
        ("switch_eval_capacity_factor", 0, "a finite number, other than 0, found 0"),
        ("switch_capacity", 2.5, "expected a whole number"),
        ("switch_min_capacity", -3, "0 or more, found -3"),
        ("switch_drop_order", "last", "expected one of first_come, probability"),
        ("switch_capacity_grup", "ep", "Did you mean 'switch_capacity_group'"),
    ],
)
def test_routing_has_what_its_flags_can_have(name, value, message):
    config = write_gpt_config(MODEL, GPT_TYPES["switch_gpt"], "float32")
    with pytest.raises(CheckpointError, match=message):
        read({**config, "routing": {name: value}})


def test_a_stock_type_does_not_read_keys_of_ours():
    """transformers ignores them, and so the model is another one."""
    stock = choose_type(replace(MODEL, **STOCK))[0]
    config = write_gpt_config(replace(MODEL, **STOCK), stock, "float32")
    assert read({**config, "gated": False, "normalization": "LayerNorm"}) == read(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}},
        {"rope_theta": 5.0},
    ],
    ids=str,
)
def test_positions_that_are_described_twice_are_described_alike(changes):
    config = write_gpt_config(MODEL, GPT_TYPES["switch_gpt"], "float32")
    same = {"rope_scaling": {"type": "default"}, "rope_theta": MODEL.rotary_base}
    assert read({**config, **same}) == read(config) == MODEL
    with pytest.raises(CheckpointError, match="'rope_parameters': rope_theta, rope_scaling and"):
        read({**config, **changes})
