"""A number that its flag cannot have is refused before anything reckons with it."""

import math
from argparse import Namespace

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.arguments.ranges import _RANGES, check_flag_values


def test_an_ordinary_command_line_passes(sparse_line, dense_line):
    check_flag_values(sparse_line().args)
    check_flag_values(dense_line().args)


def test_every_range_is_that_of_a_flag(sparse_line):
    assert set(_RANGES) <= set(vars(sparse_line().args))


@pytest.mark.parametrize("name", sorted(_RANGES))
def test_what_is_not_finite_is_no_value_of_any_flag(name):
    for value in (math.nan, math.inf):
        message = f"--{name.replace('_', '-')} {value}: must be finite and "
        with pytest.raises(ConfigError, match=message):
            check_flag_values(Namespace(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("micro_batch_size", 0, "at least 1 and at most 1.09951e+12"),
        ("num_layers", 0, "at least 1"),
        ("log_interval", 0, "at least 1"),
        ("eval_interval", -1, "at least 1"),
        ("train_iters", -3, "at least 1"),
        ("seed", -1, "at least 0"),
        ("switch_capacity", 10**23, "at most 1.09951e+12"),
        ("make_vocab_size_divisible_by", 0, "at least 1"),
        ("moe_aux_loss_coeff", -1.0, "at least 0"),
        ("moe_aux_loss_coeff", [0.1, -1.0], "at least 0"),
        ("moe_z_loss_coeff", -1e-3, "at least 0"),
        ("lr", -1e-3, "at least 0"),
        ("adam_beta1", 1.0, "at least 0 and below 1"),
        ("adam_eps", 0.0, "above 0"),
        ("lr_warmup_fraction", 1.5, "at least 0 and at most 1"),
    ],
)
def test_a_number_out_of_range_is_refused(name, value, allowed):
    with pytest.raises(ConfigError) as error:
        check_flag_values(Namespace(**{name: value}))
    assert f"--{name.replace('_', '-')} " in str(error.value)
    assert allowed in str(error.value)


def test_every_wrong_number_is_listed():
    with pytest.raises(ConfigError, match=r"--num-layers 0: .*\n.*--seed -1: "):
        check_flag_values(Namespace(num_layers=0, seed=-1, lr=1e-3, train_iters=None))


def test_negative_capacity_factors_are_dropless():
    check_flag_values(Namespace(moe_expert_capacity_factor=-1.0, switch_eval_capacity_factor=-1.0))
