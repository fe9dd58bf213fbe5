"""One description of a model, whichever way it was read, and the flags that say it again."""

from dataclasses import replace

import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.model_flags import model_from_flags, read_model
from megatron_switch.architecture.parameters import active_parameters, total_parameters
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flags_of_argv
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line

BASE = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "max-position-embeddings": 32,
    "vocab-size": 1000,
    "num-experts": 8,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("switch-base-128", 7.415),
        ("switch-large-128", 26.309),
        ("switch-xxl-128", 394.675),
        ("switch-c-2048", 1571.4),
        ("gpt-1.6t-128", 1675.5),
    ],
)
def test_named_models_have_the_published_sizes(name, billions):
    shape = model_from_flags(read_model(name), padded=False)
    assert total_parameters(shape).total / 1e9 == pytest.approx(billions, rel=1e-4)
    assert active_parameters(shape) < total_parameters(shape).total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "config"),
    [
        ("switch-base-128", {}, {}),
        ("switch-base-128", {"num-experts": 8}, {"num_experts": 8}),
        # The proportions of the largest, with few experts: untied head, sparse everywhere.
        (
            "switch-c-2048",
            {"num-experts": 4},
            {
                "d_model": 2080,
                "d_ff": 6144,
                "num_heads": 32,
                "num_layers": 15,
                "num_decoder_layers": 15,
                "num_sparse_encoder_layers": 15,
                "num_sparse_decoder_layers": 15,
                "num_experts": 4,
                "tie_word_embeddings": False,
            },
        ),
    ],
)
def test_parameters_equal_those_of_hugging_faces_model(name, changes, config):
    defaults = {
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_heads": 12,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_sparse_encoder_layers": 6,
        "num_sparse_decoder_layers": 6,
        "num_experts": 128,
        "tie_word_embeddings": True,
    }
    with torch.device("meta"):
        model = SwitchTransformersForConditionalGeneration(
            SwitchTransformersConfig(**(defaults | config))
        )
    expected = sum({id(p): p.numel() for p in model.parameters()}.values())
    if not model.config.tie_word_embeddings:  # from 5.0 on it then has three embeddings alike
        expected -= 2 * model.config.vocab_size * model.config.d_model
    shape = model_from_flags({**read_model(name), **changes}, padded=False)
    assert total_parameters(shape).total == expected


SIZES = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --num-experts 8 --seq-length 32 "
    "--max-position-embeddings 32 --no-bias-gelu-fusion --tokenizer-type NullTokenizer "
    "--vocab-size 1023"
)


def test_the_vocabulary_is_padded_as_in_training():
    assert model_from_flags(BASE).padded_vocab_size == 1024
    assert model_from_flags({**BASE, "vocab-size": 1025}).padded_vocab_size == 2048
    changed = {**BASE, "vocab-size": 1025, "make-vocab-size-divisible-by": 8}
    assert model_from_flags(changed).padded_vocab_size == 1088
    assert model_from_flags(BASE, padded=False).padded_vocab_size == 1000


def test_sparse_layers_are_every_second_one_unless_a_pattern_says_otherwise():
    assert model_from_flags(BASE).decoder == Stack(4, (1, 3))
    changed = model_from_flags({**BASE, "moe-layer-freq": "[1,0]*2"})
    assert changed.decoder == Stack(4, (0, 2))
    dense = model_from_flags({**BASE, "num-experts": None, "moe-layer-freq": 1})
    assert dense.decoder == Stack(4)


def test_sizes_that_no_flag_gives_are_megatrons():
    plain = model_from_flags(BASE)
    assert (plain.num_query_groups, plain.kv_channels) == (4, 16)
    assert (plain.ffn_hidden_size, plain.moe_ffn_hidden_size) == (256, 256)
    assert (plain.add_bias_linear, plain.normalization) == (True, "LayerNorm")
    assert (plain.learned_positions, plain.activation_func) == (32, "gelu_pytorch_tanh")
    gated = model_from_flags({**BASE, "hidden-size": 96, "swiglu": True})
    assert (gated.ffn_hidden_size, gated.gated_linear_unit) == (256, True)
    rotary = {**BASE, "use-rotary-position-embeddings": True, "max-position-embeddings": None}
    assert model_from_flags(rotary).learned_positions == 0


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-6",
        "--squared-relu --position-embedding-type rope --rotary-percent 0.5 --rotary-base 50000",
        "--group-query-attention --num-query-groups 2 --qk-layernorm --kv-channels 10",
        "--add-qkv-bias --quick-geglu --untie-embeddings-and-output-weights",
        "--moe-layer-freq [1,0,0,1] --moe-ffn-hidden-size 24",
        "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4.0",
        "--switch-arch t5 --decoder-num-layers 2 --switch-activation gated-gelu",
        "--switch-arch t5 --relative-attention-num-buckets 8 --hidden-dropout 0",
    ],
)
def test_training_and_a_planner_that_reads_flags_see_the_same_model(flags):
    argv = f"{SIZES} {flags}".split()
    line = parse_command_line(argv)
    fill_defaults(line, "cpu")
    line.args.padded_vocab_size = 1024
    trained = Architecture.from_args(line.args)
    losses = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps")
    described = replace(trained, routing={}, **dict.fromkeys(losses))
    assert model_from_flags(flags_of_argv(argv)) == described
    assert model_from_flags({**described.to_flags(), "vocab-size": 1023}) == described


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe-layer-freq": "[0,1]"}, r"has 2 entries for 4 layers"),
        ({"hidden-size": "wide"}, r"--hidden-size takes a whole number, 1 or more, got wide"),
        ({"hidden-size": None}, r"model's size needs --hidden-size"),
        ({"vocab-size": None}, r"model's size needs --vocab-size"),
    ],
)
def test_what_cannot_be_a_model(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_from_flags({**BASE, **changes})


def test_a_t5_has_both_stacks():
    t5 = {**BASE, "switch-arch": "t5", "decoder-num-layers": 2}
    model = model_from_flags(t5)
    assert model.stacks == {"encoder": Stack(4, (1, 3)), "decoder": Stack(2, (1,))}
    assert model.sparse_layer_numbers == (2, 4, 6)
    assert (model.normalization, model.add_bias_linear) == ("RMSNorm", False)
    own = model_from_flags({**t5, "switch-decoder-layer-freq": "[1,0]"})
    assert own.decoder.sparse_layers == (0,)
