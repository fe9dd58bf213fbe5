"""A recipe is the named system's values, as that system documents them."""

from fractions import Fraction

import pytest

from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.recipes import RECIPES


def test_recipes_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        RECIPES["switch"]["moe_aux_loss_coeff"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        RECIPES["mine"] = {}  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("switch", {"moe_expert_capacity_factor": 1.25, "switch_eval_capacity_factor": 2.0}),
        ("switch", {"moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 0.0}),
        ("mesh", {"moe_input_jitter_eps": 1e-2, "switch_capacity_rounding": "floor"}),
        ("flaxformer", {"switch_capacity_rounding": "round"}),
        ("hf", {"switch_capacity": 64, "switch_capacity_group": "sequence"}),
        ("hf", {"moe_aux_loss_coeff": 1e-3, "moe_z_loss_coeff": 1e-3}),
        ("st-moe", {"moe_z_loss_coeff": 1e-3}),
        ("megatron", {"moe_expert_capacity_factor": -1.0, "switch_init_scale": "megatron"}),
        ("megatron", {"moe_aux_loss_coeff": 0.0, "switch_drop_order": "probability"}),
    ],
)
def test_recipe_has_the_systems_values(name, values):
    assert values.items() <= RECIPES[name].items()


@pytest.mark.parametrize(
    ("name", "tokens", "experts"), [("switch", 100, 8), ("flaxformer", 100, 8), ("mesh", 30, 7)]
)
def test_capacity_of_a_recipe_is_equation_3_with_its_rounding(name, tokens, experts):
    recipe = RECIPES[name]
    capacity = expert_capacity(
        tokens,
        experts,
        recipe["moe_expert_capacity_factor"],
        min_capacity=recipe["switch_min_capacity"],
        rounding=recipe["switch_capacity_rounding"],
    )
    exact = Fraction(tokens) * Fraction("1.25") / experts
    assert capacity == (round(exact) if name == "flaxformer" else exact.__floor__())
