"""A value that a flag cannot have is refused before anything is derived from it."""

import math
from argparse import ArgumentParser, Namespace

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.known_flags import (
    KNOWN_FLAGS,
    check_megatron_flags,
    check_values,
    fixed_defaults,
    flags_with,
    flags_without_effect,
)

RANGED = sorted(name for name, traits in KNOWN_FLAGS.items() if traits.range is not None)


@pytest.fixture(scope="module")
def defaults() -> dict[str, object]:
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return {action.dest: action.default for action in parser._actions}


@pytest.fixture
def args(defaults) -> Namespace:
    return Namespace(**{**defaults, **fixed_defaults(), "num_experts": 8})


@pytest.mark.parametrize("name", RANGED)
def test_what_is_not_finite_is_no_value_of_any_flag(name):
    for value in (math.nan, math.inf):
        message = f"{flag_name(name)} must be finite and .*, got {value}"
        with pytest.raises(ConfigError, match=message):
            check_values(Namespace(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("micro_batch_size", 0, "at least 1 and at most 2^40, got 0."),
        ("num_layers", 0, "at least 1"),
        ("log_interval", 0, "at least 1"),
        ("eval_interval", -1, "at least 1"),
        ("train_iters", -3, "at least 1"),
        ("seed", -1, "at least 1"),
        ("switch_capacity", 10**23, "at least 1 and at most 2^40, got 1e+23."),
        ("switch_span_density", 1.0, "above 0 and below 1, got 1. T5 uses 0.15."),
        ("make_vocab_size_divisible_by", 0, "at least 1"),
        ("moe_expert_capacity_factor", 0.0, "other than 0, got 0. A factor of 0 would drop every"),
        ("moe_aux_loss_coeff", -1.0, "at least 0"),
        ("moe_aux_loss_coeff", [0.1, -1.0], "at least 0, got -1."),
        ("moe_z_loss_coeff", -1e-3, "at least 0"),
        ("lr", -1e-3, "at least 0"),
        ("adam_beta1", 1.0, "at least 0 and below 1"),
        ("adam_eps", 0.0, "above 0"),
        ("lr_warmup_fraction", 1.5, "at least 0 and at most 1"),
    ],
)
def test_a_number_out_of_range_is_refused(name, value, allowed):
    with pytest.raises(ConfigError) as error:
        check_values(Namespace(**{name: value}))
    assert f"{flag_name(name)} must be {allowed}" in str(error.value)


def test_every_wrong_number_is_listed():
    with pytest.raises(ConfigError, match=r"--num-layers .* got 0\.\n.*--seed .* got -1\."):
        check_values(Namespace(num_layers=0, seed=-1, lr=1e-3, train_iters=None))


def test_negative_capacity_factors_are_dropless():
    check_values(Namespace(moe_expert_capacity_factor=-1.0, switch_eval_capacity_factor=-1.0))


def test_defaults_of_megatron_and_fixed_values_are_accepted(args):
    check_values(args)
    check_megatron_flags(args)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("moe_router_topk", 2, r"--moe-router-topk must be 1 .* got 2\. Switch sends every token"),
        ("moe_token_dispatcher_type", "flex", r"must be alltoall .* got flex.*--switch-dispatch"),
        ("moe_token_drop_policy", "probs", r"must be position .* got probs.*--switch-drop-order"),
        (
            "moe_router_load_balancing_type",
            ["sinkhorn"],
            r"--moe-router-load-balancing-type must be aux_loss or none .* got sinkhorn",
        ),
        (
            "moe_router_load_balancing_type",
            ["aux_loss", "seq_aux_loss"],
            r"takes one value with Switch, got aux_loss seq_aux_loss",
        ),
        ("moe_aux_loss_coeff", [0.1, 0.2], r"--moe-aux-loss-coeff takes one value"),
        ("moe_router_enable_expert_bias", True, r"--moe-router-enable-expert-bias cannot be used"),
        (
            "moe_shared_expert_intermediate_size",
            128,
            r"--moe-shared-expert-intermediate-size 128 cannot be used .* Leave it out\.",
        ),
        ("mtp_num_layers", 1, r"--mtp-num-layers 1 cannot be used with Switch layers"),
    ],
)
def test_message_names_flag_value_and_way_out(args, attribute, value, message):
    setattr(args, attribute, value)
    with pytest.raises(ConfigError, match=message):
        check_megatron_flags(args)


def test_all_problems_are_named_at_once(args):
    args.moe_router_topk = 2
    args.moe_latent_size = 64
    with pytest.raises(ConfigError, match=r"(?s)--moe-latent-size.*--moe-router-topk"):
        check_megatron_flags(args)


def test_a_dense_model_may_keep_any_value(args):
    args.num_experts = None
    args.moe_router_topk = 2
    check_megatron_flags(args)


def test_one_value_in_a_list_is_one_value(args):
    args.moe_router_load_balancing_type = ["none"]
    args.moe_aux_loss_coeff = [0.01]
    check_megatron_flags(args)


def test_only_flags_that_were_typed_are_reported_as_ignored():
    idle = flags_without_effect({"moe_permute_fusion", "moe_router_topk", "lr"}, {})
    assert list(idle) == ["--moe-permute-fusion"]
    assert "which Switch does not build" in idle["--moe-permute-fusion"]


def test_the_first_condition_that_fails_is_the_reason():
    failed = {"spans": "pairs", "t5": "a gpt", "drops": "no drops"}
    given = {"switch_span_length", "switch_min_capacity", "switch_capacity", "num_layers"}
    assert flags_without_effect(given, failed) == {
        "--switch-min-capacity": "no drops",
        "--switch-span-length": "a gpt",
    }


def test_flags_of_both_kinds_say_what_another_value_means_on_resume():
    assert {"switch_capacity", "moe_z_loss_coeff"} <= set(flags_with("overridable"))
    assert {"switch_arch", "hidden_size"} <= set(flags_with("model"))
    assert "switch_nodes_per_leaf" in flags_with("free")
