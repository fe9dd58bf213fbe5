"""docs/semantics.md is true: its examples run, its flags exist, its defaults are the defaults."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.flags.argv import attribute_of, flag_name
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.training.arguments.parser import parse_command_line

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "semantics.md"
PAGE = PATH.read_text(encoding="utf-8")
RULES = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", PAGE, flags=re.MULTILINE))


def test_the_examples_run():
    torch.set_printoptions(precision=4)
    result = doctest.testfile(str(PATH), module_relative=False, verbose=False)
    assert result.attempted > 20
    assert result.failed == 0


def test_every_flag_exists():
    args = parse_command_line([]).args
    flags = set(re.findall(r"`(--[a-z0-9-]+)[ `]", PAGE))
    assert len(flags) > 15
    assert [flag for flag in flags if not hasattr(args, attribute_of(flag))] == []


@pytest.mark.parametrize(
    ("choice", "default"),
    [
        ("capacity", r"--moe-expert-capacity-factor` \(1\.25\)"),
        ("capacity", r"--switch-eval-capacity-factor` \(2\.0\)"),
        ("balancing loss", r"--moe-aux-loss-coeff`$"),
        ("z-loss", r"--moe-z-loss-coeff` \(0\)"),
        ("jitter", r"--moe-input-jitter-eps` \(off\)"),
        ("expert dropout", r"--switch-expert-dropout` \(0\)"),
    ],
)
def test_defaults_are_those_of_the_page(choice, default):
    assert re.search(default, RULES[choice])


def test_the_default_recipe_is_the_column_named_here():
    recipe = RECIPES["switch"]
    assert (recipe["moe_expert_capacity_factor"], recipe["switch_eval_capacity_factor"]) == (
        1.25,
        2,
    )
    assert (recipe["moe_aux_loss_coeff"], recipe["moe_z_loss_coeff"]) == (0.01, 0.0)
    assert recipe["moe_input_jitter_eps"] is None
    plain = SwitchConfig()
    assert (plain.capacity_rounding, plain.min_capacity, plain.init_scale) == ("floor", 4, "0.1")
    assert (plain.capacity_group, plain.drop_order) == ("microbatch", "first_come")
    assert plain.nonfinite == "raise"


def test_every_choice_of_a_setting_is_explained():
    explained = {
        "capacity_group": ("microbatch", "sequence", "ep"),
        "nonfinite": ("skip", "ignore"),
    }
    for field, choices in explained.items():
        assert flag_name(FLAG_PREFIX + field) in PAGE
        for choice in choices:
            assert f"`{choice}`" in PAGE or f" {choice}`" in PAGE, choice


def test_the_readme_leads_here():
    assert "](docs/semantics.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
