"""The list of --switch-* flags is frozen: names, defaults, choices, and the page that shows them.

Whoever changes a flag changes scripts and checkpoints that other people have. This file is where
that is done on purpose.
"""

import argparse
import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.flags.traits import Traits
from megatron_switch.training.arguments.parser import add_switch_arguments

ROOT = Path(__file__).resolve().parents[1]

FLAGS = {
    "--switch-arch": ("gpt", ["gpt", "t5"]),
    "--switch-recipe": ("switch", ["switch", "mesh", "flaxformer", "hf", "st-moe", "megatron"]),
    "--switch-capacity": (None, None),
    "--switch-drop-order": ("first_come", ["first_come", "probability"]),
    "--switch-init-scale": ("0.1", None),
    "--switch-eval-capacity-factor": (2.0, None),
    "--switch-min-capacity": (4, None),
    "--switch-capacity-rounding": ("floor", ["floor", "round", "ceil"]),
    "--switch-capacity-group": ("microbatch", ["microbatch", "sequence", "ep"]),
    "--switch-dispatch": ("auto", ["auto", "packed", "padded"]),
    "--switch-expert-dropout": (0.0, None),
    "--switch-overlap-chunks": (1, None),
    "--switch-activation": ("auto", ["auto", "relu", "gated-gelu"]),
    "--switch-decoder-layer-freq": (None, None),
    "--switch-span-density": (0.15, None),
    "--switch-span-length": (3.0, None),
    "--switch-device": ("auto", ["auto", "cuda", "cpu"]),
    "--switch-nodes-per-leaf": (None, None),
    "--switch-run-dir": (None, None),
    "--switch-keep-checkpoints": (None, None),
    "--switch-metrics-file": (None, None),
    "--switch-metrics-interval": (10, None),
    "--switch-nonfinite": ("raise", ["raise", "skip", "ignore"]),
    "--switch-override-checkpoint": (False, None),
    "--switch-model": (None, None),
}


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_switch_arguments(parser)
    return parser


def test_flags_defaults_and_choices_are_frozen(parser):
    actual = {
        action.option_strings[0]: (action.default, action.choices and list(action.choices))
        for action in parser._actions
    }
    assert actual == FLAGS


def test_a_flag_is_a_field_and_a_field_is_a_flag():
    assert [flag_name(FLAG_PREFIX + field.name) for field in fields(SwitchConfig)] == list(FLAGS)


def test_every_flag_declares_its_traits_beside_its_default():
    assert all(isinstance(field.metadata["traits"], Traits) for field in fields(SwitchConfig))


def test_every_flag_has_a_help_text(parser):
    assert [a.option_strings for a in parser._actions if not (a.help or "").endswith(".")] == []


@pytest.mark.parametrize("field", fields(SwitchConfig), ids=lambda field: field.name)
def test_defaults_are_plain_values(field):
    # Megatron stores its whole namespace in checkpoints and reads it back with weights_only=True.
    assert isinstance(field.default, str | int | float | None)


def test_settings_come_back_from_a_namespace(parser):
    args = parser.parse_args(["--switch-min-capacity", "0", "--switch-capacity-group", "sequence"])
    assert SwitchConfig.from_args(args) == SwitchConfig(min_capacity=0, capacity_group="sequence")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("capacity", 0, r"--switch-capacity must be at least 1 and at most 2\^40, got 0\."),
        ("min_capacity", -1, r"--switch-min-capacity must be at least 0 .*, got -1"),
        ("overlap_chunks", 0, r"--switch-overlap-chunks must be at least 1 .*, got 0"),
        ("nodes_per_leaf", 0, r"--switch-nodes-per-leaf must be at least 1 .*, got 0"),
        ("metrics_interval", 0, r"--switch-metrics-interval must be at least 1 .*, got 0"),
        (
            "eval_capacity_factor",
            0.0,
            r"--switch-eval-capacity-factor must be other than 0, got 0\. .* drop every token",
        ),
        ("expert_dropout", 1.0, r"--switch-expert-dropout must be at least 0 and below 1, got 1"),
        ("expert_dropout", -0.1, r"--switch-expert-dropout must be .*, got -0\.1"),
        (
            "span_density",
            0.0,
            r"--switch-span-density must be above 0 and below 1, got 0\. T5",
        ),
        ("span_density", 1.0, r"--switch-span-density must be above 0 and below 1, got 1"),
        ("span_length", 0.5, r"--switch-span-length must be at least 1, got 0\.5\. T5 uses 3\.0"),
        ("init_scale", "small", r"--switch-init-scale takes a positive number .* got 'small'"),
        ("init_scale", "0", r"--switch-init-scale takes a positive number .* got '0'"),
        ("init_scale", "nan", r"--switch-init-scale takes a positive number .* got 'nan'"),
    ],
)
def test_a_bad_value_is_refused_by_its_flags_name(field, value, message):
    with pytest.raises(ConfigError, match=message):
        SwitchConfig(**{field: value})


@pytest.mark.parametrize(("text", "scale"), [("0.1", 0.1), ("1", 1.0), ("megatron", None)])
def test_init_scale_is_a_number_or_megatrons(text, scale):
    assert SwitchConfig(init_scale=text).init_scale_value() == scale


def test_recipes_are_the_choices_of_the_flag_and_set_the_same_values():
    assert list(RECIPES) == FLAGS["--switch-recipe"][1]
    assert {frozenset(recipe) for recipe in RECIPES.values()} == {frozenset(RECIPES["switch"])}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_legal_configuration(name):
    ours = {
        attribute.removeprefix("switch_"): value
        for attribute, value in RECIPES[name].items()
        if attribute.startswith("switch_")
    }
    SwitchConfig(recipe=name, **ours)


def test_default_recipe_agrees_with_the_defaults_of_the_fields():
    recipe = RECIPES["switch"]
    for field in fields(SwitchConfig):
        assert recipe.get("switch_" + field.name, field.default) == field.default


def test_docs_flags_md_is_what_the_code_says():
    tool = ROOT / "tools" / "make_flags_doc.py"
    spec = importlib.util.spec_from_file_location("make_flags_doc", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == module.page(), "run: .venv/bin/python tools/make_flags_doc.py"
