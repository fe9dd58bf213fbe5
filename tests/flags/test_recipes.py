"""A recipe is the named system's values, and with them the system's capacity, drops and losses.

Numbers are compared with the papers and with the libraries' own defaults, and with the column of
docs/semantics.md (``tests/test_semantics_doc.py``). Drops are those of the systems' own code, run
on ten tokens that want four experts; expert 0 is wanted by tokens 0, 1, 3, 4 and 7.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from transformers import SwitchTransformersConfig

from megatron_switch.config import SwitchConfig
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.initialization import init_expert_weight_
from megatron_switch.moe.losses import load_balancing_loss, router_z_loss
from megatron_switch.moe.routing import route, router_probabilities

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "switch_routing.json").read_text())
NUM_TOKENS, NUM_EXPERTS = len(GOLDEN["input"]["assign"]), GOLDEN["input"]["E"]

FACTOR, EVAL_FACTOR = "moe_expert_capacity_factor", "switch_eval_capacity_factor"
CAPACITY, LEAST = "switch_capacity", "switch_min_capacity"
GROUP, ORDER = "switch_capacity_group", "switch_drop_order"
SEQUENCE, FIRST, BEST = "sequence", "first_come", "probability"
BALANCE, Z_LOSS, JITTER = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"
SCALE = "switch_init_scale"


def test_recipes_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        RECIPES["switch"]["moe_aux_loss_coeff"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        RECIPES["mine"] = {}  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        # Fedus, Zoph and Shazeer, arXiv:2101.03961
        ("switch", BALANCE, 1e-2),  # section 2.2, below equation (6): alpha
        ("switch", SCALE, "0.1"),  # section 2.4: the usual scale 1.0, reduced by a factor of 10
        ("mesh", SCALE, "1.0"),  # table 3: the default that it is compared with
        # Zoph et al., arXiv:2202.08906
        ("st-moe", Z_LOSS, 1e-3),  # c_z of the router z-loss
        ("st-moe", BALANCE, 1e-2),  # c_B of the balancing loss
    ],
)
def test_a_recipe_has_the_papers_number(name, setting, value):
    assert RECIPES[name][setting] == value


def test_the_recipe_of_hugging_face_is_their_configuration():
    theirs, ours = SwitchTransformersConfig(), RECIPES["hf"]
    assert ours[CAPACITY] == theirs.expert_capacity
    assert ours[JITTER] == theirs.router_jitter_noise
    assert ours[BALANCE] == theirs.router_aux_loss_coef
    assert ours[Z_LOSS] == theirs.router_z_loss_coef
    assert float(ours[SCALE]) == theirs.initializer_factor


def test_the_recipe_of_megatron_is_its_configuration():
    theirs = {field.name: field.default for field in fields(TransformerConfig)}
    ours = RECIPES["megatron"]
    assert theirs["moe_expert_capacity_factor"] is None
    assert max(ours[FACTOR], ours[EVAL_FACTOR]) < 0  # no limit
    assert ours[BALANCE] == theirs["moe_aux_loss_coeff"]
    assert ours[Z_LOSS] == (theirs["moe_z_loss_coeff"] or 0)
    assert ours[JITTER] == theirs["moe_input_jitter_eps"]
    assert (ours[ORDER], theirs["moe_token_drop_policy"]) == (BEST, "probs")


def test_every_recipe_sets_the_same_flags():
    assert {frozenset(recipe) for recipe in RECIPES.values()} == {frozenset(RECIPES["switch"])}


def golden_logits_TE():
    gate_T = torch.tensor(GOLDEN["input"]["gate"], dtype=torch.float64)
    probs_TE = ((1 - gate_T) / (NUM_EXPERTS - 1)).unsqueeze(1).repeat(1, NUM_EXPERTS)
    probs_TE[torch.arange(NUM_TOKENS), GOLDEN["input"]["assign"]] = gate_T
    return probs_TE.log() + 0.1 * torch.arange(NUM_TOKENS).unsqueeze(1)


@pytest.mark.parametrize(
    ("name", "changes", "sequences", "slots", "dropped", "balance"),
    [
        pytest.param("mesh", {FACTOR: 1.0, LEAST: 1}, 1, 2, [3, 4, 7], 1.248, id="mesh"),
        pytest.param("mesh", {FACTOR: 1.0}, 1, 4, [7], 1.248, id="mesh, at least 4"),
        pytest.param("switch", {FACTOR: 1.0, LEAST: 1}, 1, 2, [3, 4, 7], 1.248, id="switch"),
        pytest.param("switch", {FACTOR: 1.4, LEAST: 1}, 1, 3, [4, 7], 1.248, id="switch 3.5"),
        pytest.param("flaxformer", {FACTOR: 1.0, LEAST: 1}, 1, 2, [3, 4, 7], 1.248, id="flax"),
        pytest.param("flaxformer", {FACTOR: 1.4, LEAST: 1}, 1, 4, [7], 1.248, id="flax 3.5"),
        pytest.param(
            "flaxformer", {FACTOR: 1.0, LEAST: 1, ORDER: BEST}, 1, 2, [0, 3, 4], 1.248, id="BPR"
        ),
        pytest.param("hf", {CAPACITY: 2}, 1, 2, [3, 4, 7], 1.248, id="hf 1x10"),
        pytest.param("hf", {CAPACITY: 1}, 2, 1, [1, 3, 4, 8], 1.469333, id="hf 2x5"),
        pytest.param("hf", {}, 2, 64, [], 1.469333, id="hf default"),
        pytest.param("megatron", {FACTOR: 1.0}, 1, 3, [0, 3], 1.248, id="megatron"),
        pytest.param("megatron", {FACTOR: 0.8}, 1, 2, [0, 3, 4], 1.248, id="megatron 0.8"),
        pytest.param("megatron", {}, 1, 10, [], 1.248, id="megatron, no capacity"),
        # In order of position, which Megatron documents and does not keep.
        pytest.param(
            "megatron", {FACTOR: 1.0, ORDER: FIRST}, 1, 3, [4, 7], 1.248, id="megatron position"
        ),
        # DeepSpeed's rounding, least capacity and, without random selection, the order it means.
        pytest.param(
            "megatron", {FACTOR: 1.0, LEAST: 4, ORDER: FIRST}, 1, 4, [7], 1.248, id="deepspeed"
        ),
    ],
)
def test_a_recipe_drops_what_its_system_drops(name, changes, sequences, slots, dropped, balance):
    recipe = {**RECIPES[name], **changes}
    group_T = None
    if recipe[GROUP] == SEQUENCE:
        group_T = torch.arange(NUM_TOKENS) * sequences // NUM_TOKENS
    capacity = recipe[CAPACITY] or expert_capacity(
        NUM_TOKENS,
        NUM_EXPERTS,
        recipe[FACTOR],
        min_capacity=recipe[LEAST],
        rounding=recipe["switch_capacity_rounding"],
    )
    assert capacity == slots
    logits_TE = golden_logits_TE()
    routing = route(logits_TE, capacity=capacity, group_T=group_T, order=recipe[ORDER])
    assert (~routing.kept_T).nonzero().flatten().tolist() == dropped
    probs_TE = router_probabilities(logits_TE).probs_TE
    loss = load_balancing_loss(probs_TE, routing.expert_T, group_T=group_T)
    assert loss.item() == pytest.approx(balance, abs=1e-6)
    assert router_z_loss(logits_TE).item() == pytest.approx(0.285)


@pytest.mark.parametrize("name", RECIPES)
def test_the_default_capacity_is_the_systems(name):
    """Of 1000 tokens and 7 experts: 178.57 slots in training, 285.71 in evaluation, not exact."""
    recipe = RECIPES[name]

    def slots(factor):
        return recipe[CAPACITY] or expert_capacity(
            1000,
            7,
            factor,
            min_capacity=recipe[LEAST],
            rounding=recipe["switch_capacity_rounding"],
        )

    actual = tuple(map(slots, (recipe[FACTOR], recipe[EVAL_FACTOR])))
    special = {"flaxformer": (179, 286), "hf": (64, 64), "megatron": (1000, 1000)}
    assert actual == special.get(name, (178, 285))


@pytest.mark.parametrize("name", RECIPES)
def test_initial_weights_have_the_systems_scale(name):
    scale = SwitchConfig(init_scale=RECIPES[name][SCALE]).init_scale_value()
    weight = torch.empty(64, 400)
    init_expert_weight_(
        weight,
        matrix="fc1",
        seed=1,
        layer_number=2,
        expert=0,
        scale=scale,
        init_method=lambda tensor: torch.nn.init.normal_(tensor, std=0.02),
        shard=0,
        num_shards=1,
        gated=False,
    )
    cut = 0.8796  # what a normal distribution keeps of its deviation when cut at two of them
    deviation = {"mesh": cut / 20, "hf": cut / 20, "megatron": 0.02}
    expected = deviation.get(name, cut * (0.1 / 400) ** 0.5)
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
