"""Where tokens travel packed or padded, which layers are sparse, and what Megatron is told."""

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.loop.global_state import validate
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch


def dispatch(line, device="cuda"):
    return resolve_dispatch(line.args, SwitchConfig.from_args(line.args), device).dispatch


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ("", "cpu", "packed"),
        ("", "cuda", "padded"),
        ("--switch-capacity-group ep", "cuda", "packed"),
        ("--switch-recipe megatron", "cuda", "packed"),
        ("--switch-eval-capacity-factor -1", "cuda", "packed"),
        ("--switch-eval-capacity-factor -1 --switch-capacity 8", "cuda", "padded"),
        ("--moe-pad-expert-input-to-capacity", "cpu", "padded"),
        ("--moe-pad-expert-input-to-capacity --switch-dispatch packed", "cpu", "packed"),
        ("--switch-dispatch padded", "cpu", "padded"),
        ("--switch-dispatch packed", "cuda", "packed"),
    ],
)
def test_dispatch_is_padded_on_gpus_that_have_a_capacity(sparse_line, flags, device, expected):
    assert dispatch(sparse_line(flags), device) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--switch-dispatch padded --moe-expert-capacity-factor -1",
            r"needs a capacity: got --moe-expert-capacity-factor -1\.0 and "
            r"--switch-eval-capacity-factor 2\.0.*--switch-dispatch packed",
        ),
        (
            "--moe-pad-expert-input-to-capacity --switch-recipe megatron",
            r"needs a capacity.*--switch-dispatch packed, or positive factors",
        ),
        (
            "--switch-dispatch padded --switch-capacity-group ep",
            r"--switch-capacity-group ep counts .* Use --switch-dispatch packed",
        ),
    ],
)
def test_padding_without_a_bound_is_refused(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        dispatch(sparse_line(flags))


def test_the_model_gets_the_factor_of_rotary_scaling(sparse_line):
    line = sparse_line("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32")
    fill_defaults(line, "cpu")
    validate(line.args)
    config = model_config(line.args, SwitchConfig.from_args(line.args))
    assert (config.rope_scaling, config.rope_scaling_factor) == (True, 32.0)


def test_megatron_gets_its_configuration_and_our_layers(sparse_line):
    line = sparse_line("--seed 5 --swiglu --num-query-groups 2 --group-query-attention")
    fill_defaults(line, "cpu")
    validate(line.args)
    config = model_config(line.args, SwitchConfig.from_args(line.args))
    assert config.transformer.num_moe_experts == 4
    assert config.transformer.moe_layer_freq == [0, 1, 0, 1]
    assert config.transformer.moe_expert_capacity_factor == 1.25
    assert config.transformer.num_query_groups == 2
    assert config.transformer.gated_linear_unit
    assert config.transformer_layer_spec.func.__name__ == "switch_gpt_layer_spec"
