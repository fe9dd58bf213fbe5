"""Mistakes that other mixtures of experts have made, and that no other test here would notice.

Each test is named after what must not happen. Most such mistakes are covered by the comparison of
every layout with a plain loop (``test_switch_mlp.py``); these are about what is logged, about a
single coefficient, and about choices that the loop shares.
"""

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from support.layout_case import D, E, Layout, S, start_groups
from support.switch_case import LAYER, Case, Tracker, build_layer, new_tracker

from megatron_switch.moe.losses import load_balancing_loss, router_z_loss
from megatron_switch.moe.metrics.routing_counts import (
    CAPACITY_FACTOR_SWEEP,
    RoutingReport,
    statistics_row,
)
from megatron_switch.moe.routing import route, router_probabilities
from megatron_switch.testing.ranks import run_ranks

NO_LOSSES = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}


def hidden_SBD(seed=4, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(S, 2, D, generator=random, dtype=torch.float64).to(dtype)


def test_a_router_that_learns_from_the_balancing_loss_only():
    """The gate is a probability and no constant 1, so the model's own loss reaches the router."""
    run_ranks(_check_router_learns, 1)


def _check_router_learns(rank):
    layer = build_layer(Case({"capacity": 8}, NO_LOSSES), Layout(1), start_groups(Layout(1)))
    output, _ = layer(hidden_SBD())
    output.square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("loss", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_a_coefficient_that_is_only_on_or_off(loss):
    run_ranks(_check_linear, 1, loss)


def _check_linear(rank, loss):
    groups = start_groups(Layout(1))
    gradients = []
    for coefficient in (0.5, 1.0, 3.0):
        case = Case(config=NO_LOSSES | {loss: coefficient})
        layer = build_layer(case, Layout(1), groups)
        (layer(hidden_SBD())[0] * 0.0).sum().backward()
        gradients.append(layer.router.weight.grad / coefficient)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_two_collapsed_layers_that_look_balanced_together():
    run_ranks(_check_two_layers, 1)


def _check_two_layers(rank):
    groups = start_groups(Layout(1))
    tracker = Tracker((LAYER, LAYER + 1))
    set_moe_metrics_tracker(tracker)
    for number in (0, 1):
        layer = build_layer(Case(), Layout(1), groups)
        layer.set_layer_number(LAYER + number)
        layer.router.weight.data.zero_()
        layer.router.weight.data[number] = 50.0
        layer(hidden_SBD().abs())
    report = tracker.step()
    assert report.balance_loss_L.tolist() == pytest.approx([E, E])
    assert report.balance_loss == pytest.approx(E)  # over all logits at once it would be E / 2
    assert report.load_ratio_L.tolist() == [E, E]


def test_losses_that_are_weaker_in_a_deeper_model():
    """Each layer's losses are added to the model's, whole, and not their mean over layers."""
    run_ranks(_check_sum_over_layers, 1)


def _check_sum_over_layers(rank):
    groups = start_groups(Layout(1))
    config = {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}
    layers = [build_layer(Case(config=config), Layout(1), groups) for _ in range(2)]
    layers[1].set_layer_number(LAYER + 1)
    sum((layer(hidden_SBD())[0] * 0.0).sum() for layer in layers).backward()
    x_TD = hidden_SBD().transpose(0, 1).flatten(0, 1)
    for layer in layers:
        weight_ED = layer.router.weight.detach().requires_grad_()
        logits_TE = x_TD @ weight_ED.t()
        balance = load_balancing_loss(logits_TE.softmax(dim=1), logits_TE.argmax(dim=1))
        (3.0 * balance + 2.0 * router_z_loss(logits_TE)).backward()  # the case's coefficients
        torch.testing.assert_close(layer.router.weight.grad, weight_ED.grad)


def test_a_low_balancing_loss_over_a_skewed_load():
    """With probabilities near 1/E the loss is near 1, whoever is chosen: the load is logged too."""
    logits_TE = torch.zeros(8, E)
    logits_TE[:, 2] = 1e-3
    routing = route(logits_TE, capacity=4)
    probs_TE = router_probabilities(logits_TE).probs_TE
    row = statistics_row(
        routing,
        balance_share=load_balancing_loss(probs_TE, routing.expert_T),
        z_share=torch.tensor(0.0),
        sweep_capacities=(4,) * len(CAPACITY_FACTOR_SWEEP),
        counts_micro_batch=True,
    )
    report = RoutingReport.of(row.unsqueeze(0), (1,))
    assert report.balance_loss == pytest.approx(1.0, abs=1e-2)
    assert report.load_ratio == E
    assert report.dead_experts == E - 1


def test_a_choice_that_half_precision_turns_into_a_tie():
    """Probabilities .49972 and .50022 are one number in bfloat16, and the lower index would win."""
    run_ranks(_check_near_tie, 1)


def _check_near_tie(rank):
    groups = start_groups(Layout(1))
    case = Case({"capacity": 8}, NO_LOSSES | {"params_dtype": torch.bfloat16})
    router = build_layer(case, Layout(1), groups).router
    router.weight.data.zero_()
    router.weight.data[1] = 2.0**-10
    x_BSD = torch.zeros(1, 1, D, dtype=torch.bfloat16)
    x_BSD[..., 0] = 1.0
    routed, _ = router(x_BSD)
    probs_E = router.gating(x_BSD).softmax(dim=-1).flatten()
    assert probs_E.bfloat16().unique().numel() == 1
    assert routed.routing.expert_T.tolist() == [1]


@pytest.mark.parametrize("dispatch", ["packed", "padded"])
def test_a_padded_buffer_that_makes_the_balancing_loss_one(dispatch):
    """The loss is of what routers chose, not of the slots that were sent."""
    run_ranks(_check_padded_loss, 1, dispatch)


def _check_padded_loss(rank, dispatch):
    case = Case({"capacity": 4})
    layer = build_layer(case, Layout(1), start_groups(Layout(1)), dispatch)
    layer.router.weight.data.zero_()
    layer.router.weight.data[3] = 50.0
    tracker = new_tracker()
    layer(hidden_SBD().abs())
    report = tracker.step()
    assert report.balance_loss == pytest.approx(E)
    assert report.load_LE.tolist() == [[0.0, 0.0, 0.0, 1.0]]
    assert report.dropped == (2 * S - 4) / (2 * S)


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2, etp=2)], ids=str)
def test_a_group_of_one_expert_parallel_rank_is_the_micro_batch(layout):
    run_ranks(_check_ep_of_one, 2, layout)


def _check_ep_of_one(rank, layout):
    groups = start_groups(layout)  # on data-parallel ranks all experts each, or cut in two
    outputs = []
    for kind in ("microbatch", "ep"):
        layer = build_layer(Case({"capacity_group": kind}), layout, groups)
        outputs.append(layer(hidden_SBD(seed=rank))[0])
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[0] == 0).all(dim=-1).any()  # capacity is binding
