"""Every expert flag of the installed Megatron is classified, and the classes hold."""

from argparse import Action, ArgumentParser, Namespace

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import attribute_of
from megatron_switch.flags.megatron_moe import (
    FLAGS,
    NAME_PARTS,
    check_megatron_flags,
    fixed_defaults,
    ignored_flags,
)


@pytest.fixture(scope="module")
def upstream() -> dict[str, Action]:
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return {flag: action for action in parser._actions for flag in action.option_strings}


@pytest.fixture
def args(upstream: dict[str, Action]) -> Namespace:
    values = {action.dest: action.default for action in upstream.values()}
    return Namespace(**{**values, **fixed_defaults(), "num_experts": 8})


def test_every_expert_flag_of_megatron_is_classified(upstream):
    family = {flag for flag in upstream if any(part in flag for part in NAME_PARTS)}
    assert family - set(FLAGS) == set(), "classify these flags in flag_classes.py"
    assert set(FLAGS) - set(upstream) == set(), "Megatron has these flags no more"


@pytest.mark.parametrize("flag", FLAGS)
def test_attribute_and_default_are_megatrons(flag, upstream):
    rule, action = FLAGS[flag], upstream[flag]
    assert attribute_of(flag) == action.dest
    if rule.kind == "refused":  # what is refused must be off unless somebody asks for it
        assert action.default == rule.accepted[0]
    if rule.kind == "fixed" and action.choices is not None:
        assert rule.accepted[0] in action.choices


def test_defaults_pass(args):
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
    ignored = ignored_flags({"moe_permute_fusion", "moe_router_topk", "lr"})
    assert list(ignored) == ["--moe-permute-fusion"]
    assert "which Switch does not build" in ignored["--moe-permute-fusion"]
