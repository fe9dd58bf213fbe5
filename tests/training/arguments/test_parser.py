"""The command line: Switch's defaults, recipes, model files, and what is refused by name."""

import json
import sys

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.training.arguments.parser import (
    SWITCH_DEFAULTS,
    parse_command_line,
)


@pytest.fixture
def model_file(tmp_path):
    """Write a model file and return its flag."""

    def write(content):
        path = tmp_path / "model.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--switch-model", str(path)]

    return write


def test_defaults_are_switchs():
    args = parse_command_line([]).args
    for name, value in {**SWITCH_DEFAULTS, **RECIPES["switch"]}.items():
        assert getattr(args, name) == value, name
    assert SwitchConfig.from_args(args) == SwitchConfig()
    assert (args.moe_router_topk, args.moe_router_pre_softmax) == (1, True)
    assert (args.moe_router_dtype, args.exit_signal_handler) == ("fp32", True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_its_values_and_an_explicit_flag_wins(name):
    words = ["--moe-z-loss-coeff", "0.5", "--switch-recipe", name, "--switch-min-capacity=9"]
    line = parse_command_line(words)
    expected = {**RECIPES[name], "moe_z_loss_coeff": 0.5, "switch_min_capacity": 9}
    assert {key: getattr(line.args, key) for key in expected} == expected
    assert line.explicit == {"moe_z_loss_coeff", "switch_recipe", "switch_min_capacity"}


def test_explicit_are_attributes_not_flags():
    line = parse_command_line(["--no-rope-fusion", "--disable-bias-linear", "--lr=1"])
    assert line.explicit == {"apply_rope_fusion", "add_bias_linear", "lr"}


def test_the_programs_own_words_stay():
    before = list(sys.argv)
    parse_command_line(["--num-layers", "2"])
    with pytest.raises(ConfigError):
        parse_command_line(["--no-such-flag"])
    assert sys.argv == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--switch-capacty", "8"], r"no flag --switch-capacty\. Did you mean --switch-capacity"),
        (["--switch-dispach=padded"], r"no flag --switch-dispach\. Did you mean --switch-dispatch"),
        (["--num-expert", "8"], r"no flag --num-expert\. Did you mean --num-experts"),
        (["--zzz"], r"no flag --zzz\. See docs/flags\.md"),
        (["--switch-dispatch", "fast"], r"cannot be used: .*--switch-dispatch: invalid choice"),
        (["--exit-signal", "10"], r"--exit-signal: '10' is none of SIGHUP, SIGINT"),
        (["--switch-recipe", "hg"], r"--switch-recipe: invalid choice: 'hg'.*'hf'"),
        (["--switch-recipe"], r"--switch-recipe: expected one argument"),
        (["--num-layers", "many"], r"--num-layers: invalid int value: 'many'"),
        (["stray"], r"unrecognized arguments: stray"),
        (["--yaml-cfg", "a.yaml"], r"--yaml-cfg replaces .*JSON file to --switch-model"),
    ],
)
def test_a_wrong_word_is_refused_with_a_way_out(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_command_line(words)


def test_a_model_file_holds_flags_and_the_command_line_wins(model_file):
    words = model_file(
        {
            "num-layers": 6,
            "hidden_size": 64,
            "--swiglu": True,
            "disable-bias-linear": True,
            "untie-embeddings-and-output-weights": False,
            "moe-layer-freq": [0, 1, 0, 0, 0, 1],
            "moe-z-loss-coeff": None,
            "rotary-percent": "0.5",
            "data-path": ["0.5", "a", "0.5", "b"],
            "switch-recipe": "hf",
        }
    )
    line = parse_command_line([*words, "--hidden-size", "128"])
    args = line.args
    assert (args.num_layers, args.hidden_size, args.rotary_percent) == (6, 128, 0.5)
    assert (args.swiglu, args.add_bias_linear) == (True, False)
    assert args.untie_embeddings_and_output_weights is False
    assert args.moe_layer_freq == [0, 1, 0, 0, 0, 1]
    assert args.data_path == ["0.5", "a", "0.5", "b"]
    # The recipe of the file gives defaults; null leaves a flag at them.
    assert (args.switch_capacity, args.moe_z_loss_coeff) == (64, RECIPES["hf"]["moe_z_loss_coeff"])
    assert {"num_layers", "hidden_size", "moe_layer_freq", "swiglu"} <= line.explicit
    assert "moe_z_loss_coeff" not in line.explicit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"model file .*model\.json is not JSON: line 1"),
        ([1], r"model file .*model\.json must hold an object"),
        ({"num-layer": 4}, r"no flag --num-layer\. Did you mean --num-layers"),
        ({"num-layers": 2.5}, r"--num-layers: invalid int value: '2\.5'"),
        ({"num-layers": True}, r"--num-layers takes a value, got true"),
        ({"swiglu": "yes"}, r"--swiglu is on or off, so true or false, got \"yes\""),
        ({"normalization": "BatchNorm"}, r"--normalization: invalid choice: 'BatchNorm'"),
    ],
)
def test_a_bad_model_file_is_refused_by_the_flags_name(model_file, content, message):
    with pytest.raises(ConfigError, match=message):
        parse_command_line(model_file(content))


def test_a_missing_model_file_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--switch-model .*none\.json is neither\. .*switch-base-128"
    ):
        parse_command_line(["--switch-model", str(tmp_path / "none.json")])
