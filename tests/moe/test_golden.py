"""Routing, losses and outputs reproduce values computed by hand and by other systems.

Ten tokens, four experts; expert 0 is wanted by tokens 0, 1, 3, 4 and 7. What Mesh-TensorFlow,
Flaxformer, Hugging Face and Megatron-Core drop of them is listed for each setting in which one of
our modes has their semantics.
"""

import json
from pathlib import Path

import pytest
import torch
from support.layout_case import Layout, start_groups
from support.switch_case import Case, build_layer

from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.losses import load_balancing_loss, router_z_loss
from megatron_switch.moe.reference import switch_layer
from megatron_switch.moe.routing import route, router_probabilities
from megatron_switch.testing.ranks import run_ranks

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "switch_routing.json").read_text())
NUM_TOKENS = len(GOLDEN["input"]["assign"])
NUM_EXPERTS = GOLDEN["input"]["E"]


@pytest.fixture
def logits_TE():
    gate_T1 = torch.tensor(GOLDEN["input"]["gate"], dtype=torch.float64).unsqueeze(1)
    assign_T1 = torch.tensor(GOLDEN["input"]["assign"]).unsqueeze(1)
    probs_TE = ((1 - gate_T1) / (NUM_EXPERTS - 1)).expand(-1, NUM_EXPERTS)
    probs_TE = probs_TE.scatter(1, assign_T1, gate_T1)
    return probs_TE.log() + 0.1 * torch.arange(NUM_TOKENS).unsqueeze(1)


def rows(indices):
    return torch.isin(torch.arange(NUM_TOKENS), torch.tensor(indices, dtype=torch.int64))


def dropped(routing, padding_T):
    return torch.arange(NUM_TOKENS)[~routing.kept_T & ~padding_T].tolist()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_golden_tokens_are_dropped(logits_TE, case, dtype):
    logits_TE = logits_TE.to(dtype)
    group_T = None if case["groups"] is None else torch.tensor(case["groups"])
    padding_T = rows(case["padding"])
    routing = route(logits_TE, capacity=case["capacity"], group_T=group_T, padding_T=padding_T)
    assert dropped(routing, padding_T) == case["dropped"]

    loss = load_balancing_loss(
        router_probabilities(logits_TE).probs_TE,
        routing.expert_T,
        group_T=group_T,
        padding_T=padding_T,
    )
    assert loss.item() == pytest.approx(case["aux"], abs=1e-6)


def test_choices_probabilities_and_losses(logits_TE):
    golden = GOLDEN["input"]
    routing = route(logits_TE, capacity=2)
    assert routing.expert_T.tolist() == golden["assign"]
    assert routing.gate_T.tolist() == pytest.approx(golden["gate"])
    assert (routing.tokens_per_expert_E / NUM_TOKENS).tolist() == pytest.approx(golden["f"])

    probs_TE = router_probabilities(logits_TE).probs_TE.requires_grad_()
    assert probs_TE.mean(dim=0).tolist() == pytest.approx(golden["P"])
    loss = load_balancing_loss(probs_TE, routing.expert_T)
    assert loss.item() == pytest.approx(golden["aux"])
    loss.backward()
    assert probs_TE.grad.tolist() == [pytest.approx([0.20, 0.08, 0.08, 0.04])] * NUM_TOKENS
    assert router_z_loss(logits_TE).item() == pytest.approx(golden["z"])


@pytest.mark.parametrize("activation", [torch.relu, lambda hidden: hidden])
def test_the_layer_has_the_golden_row_sums(logits_TE, activation):
    # Expert e maps x to (e + 1) * x: through relu, as relu(x) - relu(-x).
    eye = torch.eye(NUM_EXPERTS, dtype=torch.float64)
    if activation is torch.relu:
        wi_FD, wo_DF = torch.cat([eye, -eye]), torch.cat([eye, -eye], dim=1)
    else:
        wi_FD, wo_DF = eye, eye
    scale_E = torch.arange(1, NUM_EXPERTS + 1).view(-1, 1, 1)
    y_TD = switch_layer(
        logits_TE,
        eye,
        wi_FD.expand(NUM_EXPERTS, -1, -1),
        scale_E * wo_DF,
        capacity=2,
        activation=activation,
    )
    assert y_TD.sum(dim=1).tolist() == pytest.approx(GOLDEN["row_sums_capacity_2"], abs=5e-5)
    assert y_TD.sum().item() == pytest.approx(-43.38181, abs=5e-6)


ROW_SUMS = {
    # First come, first served; then what Megatron's own layer gives, which keeps the largest gates.
    ("first_come", 2): GOLDEN["row_sums_capacity_2"],
    ("probability", 3): [
        *(0.0, -8.9181, -9.0502, 0.0, -5.3978),
        *(-5.4666, -5.5026, -9.0576, -3.6286, -8.5178),
    ],
}


@pytest.mark.parametrize("dispatch", ["packed", "padded"])
def test_a_layer_takes_all_of_sequence_0_first(logits_TE, dispatch):
    run_ranks(_check_order, 1, logits_TE, dispatch)


def _check_order(rank, logits_TE, dispatch):
    """Megatron's layout is [S, B]; slots are counted as if it were [B, S]."""
    groups = start_groups(Layout(1))
    config = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0, "hidden_size": NUM_EXPERTS}
    eye = torch.eye(NUM_EXPERTS, dtype=torch.float64)
    for order, capacity, expected in (
        ("first_come", 2, [3, 4, 7]),
        ("first_come", 3, [4, 7]),  # by position, 3 keeps 0, 1, 7
        ("probability", 3, [0, 3]),
    ):
        switch = {"capacity": capacity, "drop_order": order}
        layer = build_layer(Case(switch, config), Layout(1), groups, dispatch)
        with torch.no_grad():
            layer.router.weight.copy_(eye)
            layer.experts.weight1.copy_(torch.cat([eye, -eye]).expand_as(layer.experts.weight1))
            scale_E = torch.arange(1, NUM_EXPERTS + 1).view(-1, 1, 1)
            layer.experts.weight2.copy_(scale_E * torch.cat([eye, -eye], dim=1))
        y_SBD, _ = layer(logits_TE.view(2, 5, NUM_EXPERTS).transpose(0, 1))
        y_T = y_SBD.transpose(0, 1).sum(dim=-1).flatten()
        assert (y_T == 0).nonzero().flatten().tolist() == expected
        if (order, capacity) in ROW_SUMS:
            assert y_T.tolist() == pytest.approx(ROW_SUMS[order, capacity], abs=5e-5)


@pytest.mark.parametrize("row", GOLDEN["capacity_table"]["rows"])
def test_the_golden_capacities_are_met(row):
    tokens, experts, factor, *expected = row
    results = [
        expert_capacity(tokens, experts, factor, min_capacity=1, rounding=rounding)
        for rounding in ("floor", "round", "ceil")
    ]
    assert results == expected


FIRST_COME, PROBABILITY = "first_come", "probability"


@pytest.mark.parametrize(
    ("rounding", "factor", "least", "group_size", "order", "capacity", "expected", "loss"),
    [
        pytest.param("floor", 1.0, 1, 10, FIRST_COME, 2, [3, 4, 7], 1.248, id="mesh"),
        pytest.param("floor", 1.0, 4, 10, FIRST_COME, 4, [7], 1.248, id="mesh-least-4"),
        pytest.param("floor", 1.0, 1, 5, FIRST_COME, 1, [1, 3, 4, 8], 1.469333, id="mesh-groups"),
        pytest.param("round", 1.0, 1, 10, FIRST_COME, 2, [3, 4, 7], 1.248, id="flaxformer"),
        pytest.param("round", 1.4, 1, 10, FIRST_COME, 4, [7], 1.248, id="flaxformer-half-even"),
        pytest.param("round", 1.0, 1, 10, PROBABILITY, 2, [0, 3, 4], 1.248, id="flaxformer-bpr"),
        pytest.param("ceil", 1.0, 0, 10, PROBABILITY, 3, [0, 3], 1.248, id="megatron-probs"),
        pytest.param("ceil", 0.8, 0, 10, PROBABILITY, 2, [0, 3, 4], 1.248, id="megatron-probs-0.8"),
        pytest.param(None, None, 0, 10, FIRST_COME, 2, [3, 4, 7], 1.248, id="hf-1x10"),
        pytest.param(None, None, 0, 5, FIRST_COME, 1, [1, 3, 4, 8], 1.469333, id="hf-2x5"),
    ],
)
def test_what_other_systems_drop(
    logits_TE, rounding, factor, least, group_size, order, capacity, expected, loss
):
    if factor is not None:  # Hugging Face takes the capacity itself
        assert capacity == expert_capacity(
            group_size, NUM_EXPERTS, factor, min_capacity=least, rounding=rounding
        )
    group_T = torch.arange(NUM_TOKENS) // group_size
    logits_TE = logits_TE.float()
    routing = route(logits_TE, capacity=capacity, group_T=group_T, order=order)
    assert dropped(routing, rows([])) == expected
    probs_TE = router_probabilities(logits_TE).probs_TE
    actual = load_balancing_loss(probs_TE, routing.expert_T, group_T=group_T)
    assert actual.item() == pytest.approx(loss, abs=1e-6)
