"""Models as flags: the named ones have the published sizes, and patterns are Megatron's."""

import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from megatron_switch.architecture.model_flags import (
    capacity_of,
    model_names,
    read_model,
    shape_of,
)
from megatron_switch.architecture.parameters import T5Shape, active_parameters, total_parameters
from megatron_switch.errors import ConfigError
from megatron_switch.models.gpt import switch_layer_pattern

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
    shape = shape_of(read_model(name), padded=False)
    assert total_parameters(shape).total / 1e9 == pytest.approx(billions, rel=1e-4)
    assert active_parameters(shape) < total_parameters(shape).total


def test_every_named_model_is_listed():
    assert {"switch-base-128", "switch-large-128", "switch-xxl-128", "switch-c-2048"} < set(
        model_names()
    )


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
    shape = shape_of({**read_model(name), **changes}, padded=False)
    assert total_parameters(shape).total == expected


def test_the_vocabulary_is_padded_as_in_training():
    assert shape_of(BASE).padded_vocab_size == 1024
    assert shape_of({**BASE, "vocab-size": 1025}).padded_vocab_size == 2048
    assert shape_of({**BASE, "make-vocab-size-divisible-by": 8}).padded_vocab_size == 1024
    assert shape_of(BASE, padded=False).padded_vocab_size == 1000


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_the_default_pattern_is_that_of_training(layers):
    expected = tuple(n for n, on in enumerate(switch_layer_pattern(layers), 1) if on)
    assert shape_of({**BASE, "num-layers": layers}).sparse_layers == expected


@pytest.mark.parametrize(
    ("pattern", "sparse"),
    [
        ("[0,1]*2", (2, 4)),
        ("([0]*1+[1])*2", (2, 4)),
        ([1, 0, 0, 1], (1, 4)),
        ("2", (1, 3)),  # a number N means layers 0, N, 2N to Megatron
        (1, (1, 2, 3, 4)),
    ],
)
def test_patterns_are_megatrons(pattern, sparse):
    assert shape_of({**BASE, "moe-layer-freq": pattern}).sparse_layers == sparse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe-layer-freq": "__import__('os')"}, r"--moe-layer-freq takes a whole number or a pat"),
        ({"moe-layer-freq": "[0,1]"}, r"has 2 entries for 4 layers"),
        ({"moe-layer-freq": 0}, r"--moe-layer-freq is a number N of at least 1.* got 0"),
        ({"moe-layer-freq": "[0,2]*2"}, r"with 1 or 0 whether it has experts"),
        ({"hidden-size": "wide"}, r"--hidden-size takes a whole number, 1 or more, got wide"),
        ({"hidden-size": None}, r"model's size needs --hidden-size"),
        ({"vocab-size": None}, r"model's size needs --vocab-size"),
    ],
)
def test_what_cannot_be_a_model(changes, message):
    with pytest.raises(ConfigError, match=message):
        shape_of({**BASE, **changes})


def test_a_t5_has_both_stacks():
    shape = shape_of({**BASE, "switch-arch": "t5", "decoder-num-layers": 2})
    assert isinstance(shape, T5Shape)
    assert (shape.encoder_layers, shape.encoder_sparse_layers) == (4, (2, 4))
    assert (shape.num_layers, shape.sparse_layers) == (2, (2,))
    shape = shape_of({**BASE, "switch-arch": "t5", "switch-decoder-layer-freq": "[1,0,0,0]"})
    assert shape.sparse_layers == (1,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"switch-capacity-group": "rank"}, r"--switch-capacity-group is .* got rank"),
        ({"switch-capacity-rounding": "up"}, r"--switch-capacity-rounding is .* got up"),
        (
            {"moe-expert-capacity-factor": "x"},
            r"--moe-expert-capacity-factor takes a finite number",
        ),
    ],
)
def test_what_cannot_be_a_capacity(flags, message):
    with pytest.raises(ConfigError, match=message):
        capacity_of(flags)


def test_an_unknown_model_lists_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"--model .* gpt-9 is neither\. Models are gpt-1\.6t"):
        read_model("gpt-9")
    path = tmp_path / "model.json"
    path.write_text('{\n  "num-layers": \n}')
    with pytest.raises(ConfigError, match=r"model file .* is not JSON: line 3"):
        read_model(str(path))
