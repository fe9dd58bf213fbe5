"""The advice is about the setting that is off, not about one that is as the paper has it."""

from dataclasses import replace

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.training.logs.balance_settings import BalanceSettings

SETTINGS = BalanceSettings(coefficient=0.01, init_scale="0.1", lr=1e-3, warm_up=True)


@pytest.mark.parametrize(
    ("coefficient", "advice"),
    [
        (0.0, "nothing balances the load, because --moe-aux-loss-coeff is 0: set it to 0.01"),
        (0.001, "raise --moe-aux-loss-coeff, which is 0.001 (the Switch paper has 0.01)"),
        (0.01, "raise --moe-aux-loss-coeff, which is 0.01 (0.1 is strong)"),
        (0.2, "--moe-aux-loss-coeff is 0.2, which is strong already"),
    ],
)
def test_the_coefficient_decides_what_is_said_of_it(coefficient, advice):
    assert replace(SETTINGS, coefficient=coefficient).balance_advice() == advice


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "lower --lr, which is 0.001, or lengthen its warm-up"),
        ({"warm_up": False}, "--lr 0.001 has no warm-up: add --lr-warmup-iters, or lower it"),
        (
            {"init_scale": "1.0"},
            "--switch-init-scale is 1.0: larger values than 0.1 destabilise routing; lower --lr, "
            "which is 0.001, or lengthen its warm-up",
        ),
        ({"init_scale": None}, "lower --lr, which is 0.001, or lengthen its warm-up"),
    ],
)
def test_initialisation_comes_before_the_learning_rate(changes, advice):
    assert replace(SETTINGS, **changes).start_advice() == advice


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", replace(SETTINGS, warm_up=False)),
        ("--lr-warmup-fraction 0.1", SETTINGS),
        ("--lr-warmup-iters 3 --moe-aux-loss-coeff 0", replace(SETTINGS, coefficient=0.0)),
        ("--lr-warmup-iters 3 --load run", replace(SETTINGS, init_scale=None)),
        ("--lr-warmup-iters 3 --switch-init-scale megatron",
         replace(SETTINGS, init_scale="megatron")),
    ],
)  # fmt: skip
def test_settings_are_those_of_the_run(sparse_line, flags, settings):
    args = sparse_line(flags).args
    if isinstance(args.moe_aux_loss_coeff, list):  # Megatron's validation does this
        (args.moe_aux_loss_coeff,) = args.moe_aux_loss_coeff
    assert BalanceSettings.of(args, SwitchConfig.from_args(args)) == settings
