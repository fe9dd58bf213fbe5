"""Every field of an encoder-decoder that has a key comes back from ``config.json`` as it was."""

from dataclasses import replace

import pytest

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import T5_ARGUMENTS, Architecture, described
from megatron_switch.checkpoint.convert.t5_config import read_t5_config, write_t5_config
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.errors import CheckpointError

MODEL = Architecture(
    encoder=Stack(4, (1, 3)),
    decoder=Stack(2, (1,)),
    hidden_size=16,
    num_attention_heads=4,
    kv_channels=6,
    ffn_hidden_size=24,
    num_experts=6,
    padded_vocab_size=100,
    activation_func="relu",
    position_embedding_type="none",
    moe_aux_loss_coeff=0.25,
    moe_z_loss_coeff=0.125,
    moe_input_jitter_eps=0.0625,
    switch_expert_dropout=0.1,
    routing={"switch_capacity": 3, "switch_capacity_group": "sequence"},
    **T5_ARGUMENTS,
)
NAMES = [each.name for each in described("t5")]


def read(config, *keys):
    return read_t5_config(config_fields(config, "config.json", "T5"), keys, multiple=1)[0]


def changed(name):
    """Return a model in which one field has another value that it may have."""
    value = getattr(MODEL, name)
    changes = {name: not value if isinstance(value, bool) else value * 2}
    # The format has one width for both kinds of layers, and as many key heads as query heads.
    same = {"ffn_hidden_size": "moe_ffn_hidden_size", "num_attention_heads": "num_query_groups"}
    if name == "hidden_dropout":  # one rate for all
        changes |= dict.fromkeys(("attention_dropout", "switch_expert_dropout"), changes[name])
    if name in same:
        changes[same[name]] = changes[name]
    return replace(MODEL, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_says_every_field(name):
    model = changed(name)
    assert model != MODEL
    config = write_t5_config(model, 3, "float32")
    assert read(config, "lm_head.weight") == model


def test_gated_units_are_read_back():
    model = replace(MODEL, gated_linear_unit=True, activation_func="gelu_pytorch_tanh")
    config = write_t5_config(model, 3, "float32")
    assert read(config) == model


def test_experts_of_another_width_than_dense_layers_are_refused():
    model = replace(MODEL, moe_ffn_hidden_size=48)
    message = r"--moe-ffn-hidden-size 48 beside dense layers of --ffn-hidden-size 24 cannot"
    with pytest.raises(CheckpointError, match=message):
        write_t5_config(model, 3, "float32")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("router_bias", True, "needs router_bias False; found router_bias True"),
        ("router_dtype", "bfloat16", "needs router_dtype float32"),
        ("router_type", "top2", "needs router_type tokens_masked"),
        ("dense_act_fn", "silu", "expected one of relu"),
        ("is_gated_act", True, "contradicts the nonlinearity, which is relu"),
        ("feed_forward_proj", "gated-silu", "has relu or gated-gelu"),
        ("dropout_rate", 1, "a finite number, at least 0 and below 1"),
        ("router_z_loss_coef", float("inf"), "expected a finite number"),
        ("router_aux_loss_coef", -1, "a finite number, at least 0, found -1"),
        ("expert_capacity", 0, "1 or more, found 0"),
    ],
)
def test_what_a_switch_t5_does_not_have_is_refused(key, value, message):
    config = write_t5_config(MODEL, 3, "float32")
    with pytest.raises(CheckpointError, match=message):
        read({**config, key: value})
