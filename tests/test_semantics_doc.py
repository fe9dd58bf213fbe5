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


RECIPE_OF = {
    "Mesh-TensorFlow": "mesh",
    "Flaxformer": "flaxformer",
    "Hugging Face 5.18 and later": "hf",
    "Megatron-Core 0.19.2": "megatron",
    "here": "switch",
}
"""Recipe by the heading of its system's column."""


def column_of(system: str) -> dict[str, str]:
    """Return a system's cells in the table of systems, by row."""
    lines = PAGE.split("## Against other systems")[1].splitlines()
    heading, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")
    )
    return {row[0]: row[heading.index(system)] for row in rows}


@pytest.mark.parametrize("system", RECIPE_OF)
def test_a_recipe_is_its_systems_column(system):
    cells, recipe = column_of(system), RECIPES[RECIPE_OF[system]]
    train, evaluation = recipe["moe_expert_capacity_factor"], recipe["switch_eval_capacity_factor"]
    if recipe["switch_capacity"] is not None:
        factors = f"{recipe['switch_capacity']} slots in both"
    else:
        factors = "one for both, off" if train < 0 else f"{train} / {evaluation}"
        rounding = recipe["switch_capacity_rounding"]
        assert cells["rounding"] == {"round": "half to even"}.get(rounding, rounding)
        assert int(cells["least capacity"] or 0) == recipe["switch_min_capacity"]
    assert cells["train / evaluation factor"] == factors
    order = {"first_come": "first", "probability": "highest probability"}
    assert cells["who keeps a slot"].startswith(order[recipe["switch_drop_order"]])
    assert (cells["group"] == "one sequence") == (recipe["switch_capacity_group"] == "sequence")
    balance, z_loss = recipe["moe_aux_loss_coeff"], recipe["moe_z_loss_coeff"]
    assert cells["balancing loss, coefficient"].endswith(f", {balance or 'off'}")
    assert cells["router z-loss"] == str(z_loss or "off")


def test_the_plain_settings_are_those_of_the_default_recipe():
    plain, recipe = SwitchConfig(), RECIPES["switch"]
    for name in ("capacity_rounding", "min_capacity", "init_scale", "capacity_group", "drop_order"):
        assert getattr(plain, name) == recipe[FLAG_PREFIX + name], name


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
