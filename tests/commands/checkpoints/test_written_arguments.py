"""A namespace that no run wrote is the one that a run would have written."""

import pytest

from megatron_switch.checkpoint.convert.architectures import model_of_checkpoint
from megatron_switch.commands.checkpoints.written_arguments import written_arguments
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.flags.argv import flag_name

FLAGS = {
    "num-layers": 4,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "num-experts": 4,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 127,
}


def test_defaults_are_a_runs_and_nothing_is_printed(capsys):
    args = written_arguments(FLAGS, padded_vocab_size=128)
    assert args.moe_layer_freq == [0, 1, 0, 1]
    assert args.switch_eval_capacity_factor == 2.0
    assert args.ffn_hidden_size == 128
    assert args.padded_vocab_size == 128
    assert args.world_size == 1
    assert capsys.readouterr().out == ""


def test_what_megatron_refuses_is_an_error():
    with pytest.raises(ConfigError, match="Megatron refuses"):
        written_arguments({**FLAGS, "num-attention-heads": 5}, padded_vocab_size=128)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"swiglu": True, "normalization": "RMSNorm", "disable-bias-linear": True},
        {"squared-relu": True, "position-embedding-type": "rope", "rotary-percent": 0.5},
        {"group-query-attention": True, "num-query-groups": 2, "qk-layernorm": True},
        {"add-qkv-bias": True, "disable-bias-linear": True, "openai-gelu": True},
        {"untie-embeddings-and-output-weights": True, "switch-capacity": 7},
        {"hidden-dropout": 0.25, "attention-dropout": 0.5, "switch-expert-dropout": 0.125},
        {"moe-aux-loss-coeff": 0.5, "moe-z-loss-coeff": 0.25, "moe-input-jitter-eps": 0.125},
        {"position-embedding-type": "rope", "use-rope-scaling": True, "rope-scaling-factor": 4.0},
    ],
    ids=lambda more: " ".join(more),
)
def test_a_model_described_by_its_flags_is_the_same_model(more):
    flags = {**FLAGS, **more}
    model = model_of_checkpoint(written_arguments(flags, padded_vocab_size=128))
    again = {**model.to_flags(), "tokenizer-type": "NullTokenizer", "vocab-size": 127}
    assert model_of_checkpoint(written_arguments(again, padded_vocab_size=128)) == model


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_latent_attention", True),
        ("moe_router_topk", 2),
        ("moe_shared_expert_intermediate_size", 64),
        ("rotary_interleaved", True),
        ("position_embedding_type", "yarn"),
    ],
)
def test_a_part_that_no_conversion_knows_is_named(name, value):
    args = written_arguments(FLAGS, padded_vocab_size=128)
    setattr(args, name, value)
    flag = flag_name(name)
    with pytest.raises(CheckpointError, match=rf"no conversion knows: {flag} {value}"):
        model_of_checkpoint(args)


@pytest.mark.parametrize(("stored", "factor"), [(None, -1.0), (2.0, 2.0)])
def test_a_checkpoint_of_stock_megatron_drops_what_megatron_drops(stored, factor):
    args = written_arguments(FLAGS, padded_vocab_size=128)
    for name in [name for name in vars(args) if name.startswith("switch_")]:
        delattr(args, name)
    args.moe_expert_capacity_factor = stored
    args.moe_token_drop_policy = "probs"
    assert model_of_checkpoint(args).routing == {
        "moe_expert_capacity_factor": factor,
        "switch_eval_capacity_factor": factor,
        "switch_capacity": None,
        "switch_min_capacity": 0,
        "switch_capacity_rounding": "ceil",
        "switch_capacity_group": "microbatch",
        "switch_drop_order": "probability",
    }
    args.moe_token_drop_policy = "position"
    assert model_of_checkpoint(args).routing["switch_drop_order"] == "first_come"
