"""One flag, one reading: patterns are Megatron's, and all that reads the flag agrees with it."""

from argparse import Namespace

import pytest
from megatron.training.arguments import moe_freq_type

from megatron_switch.architecture.layer_pattern import Stack, sparse_layers, stacks_of
from megatron_switch.errors import ConfigError


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(1, (0,)), (2, (1,)), (5, (1, 3)), (6, (1, 3, 5))]
)
def test_switch_makes_the_second_of_each_pair_sparse(num_layers, layers):
    assert Stack.switch(num_layers) == Stack(num_layers, layers)


@pytest.mark.parametrize(
    ("layer_freq", "layers"),
    [
        ("[0,1]*2", (1, 3)),
        ("([0]*1+[1])*2", (1, 3)),
        ("[0,0,0,0]", ()),
        ("2", (0, 2)),  # a number N means layers 0, N, 2N to Megatron
        ("1", (0, 1, 2, 3)),
        ("3", (0, 3)),
        ("9", (0,)),
        ("2*[1]+[0]*2", (0, 1)),
    ],
)
def test_a_text_means_what_megatrons_parser_makes_of_it(layer_freq, layers):
    assert sparse_layers(layer_freq, 4) == layers
    assert sparse_layers(moe_freq_type(layer_freq), 4) == layers


@pytest.mark.parametrize("layers", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_layers_become_the_flag_and_the_flag_the_same_layers(layers):
    stack = Stack(4, layers)
    assert sparse_layers(stack.layer_freq, 4) == layers
    assert sparse_layers(str(stack.layer_freq), 4) == layers
    assert stack.num_dense == 4 - len(layers)


@pytest.mark.parametrize(
    "layer_freq",
    [
        *(0, -1, 1.5, None, True, [0, 2, 0, 1], [0, [1], 0, 1]),
        *("many", "[0,1", "[0,2]*2", "[0]*[1]", "__import__('os')", "-1", ""),
        *(
            "[1]*1000000000",
            "1000000000*([0]+[1])",
            "[0]*-1",
            "[0]*2+3",
            "(" * 3000 + "1" + ")" * 3000,
        ),
    ],
)
def test_what_says_nothing_of_the_layers_is_refused(layer_freq):
    message = r"--freq is a number N of at least 1, .* as in \[0,1,0,1\]; got "
    with pytest.raises(ConfigError, match=message):
        sparse_layers(layer_freq, 4, flag="--freq")


def test_a_pattern_for_another_depth_is_refused():
    message = r"--freq says of each .* has 2 entries for 4 layers\. Give as many as --depth\."
    with pytest.raises(ConfigError, match=message):
        sparse_layers([0, 1], 4, flag="--freq", depth="--depth")


@pytest.mark.parametrize(
    ("changes", "encoder", "decoder"),
    [
        ({}, (1, 3), (1,)),  # of another depth: Switch's own placement
        ({"decoder_num_layers": 4}, (1, 3), (1, 3)),
        ({"moe_layer_freq": 1}, (0, 1, 2, 3), (0, 1)),
        ({"switch_decoder_layer_freq": "[1,0]"}, (1, 3), (0,)),
        ({"num_experts": None}, (), ()),
    ],
)
def test_the_encoders_pattern_is_the_decoders_where_it_fits(changes, encoder, decoder):
    args = {
        "switch_arch": "t5",
        "num_layers": 4,
        "decoder_num_layers": 2,
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 0, 1],
        "switch_decoder_layer_freq": None,
    }
    stacks = stacks_of(Namespace(**{**args, **changes}))
    assert stacks["encoder"].sparse_layers == encoder
    assert stacks["decoder"].sparse_layers == decoder


def test_a_gpt_is_a_decoder():
    args = Namespace(num_layers=4, num_experts=8, moe_layer_freq=2)
    assert stacks_of(args) == {"decoder": Stack(4, (0, 2))}
