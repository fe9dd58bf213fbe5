"""``SwitchMLP`` equals Hugging Face's Switch layer, values and gradients, in float32.

Hugging Face counts capacity over one sequence, as an absolute number, and so does a layer with
``--switch-capacity-group sequence --switch-capacity N``. Weights are copied as they are. Releases
from 5.0 to 5.17 never enforce capacity and return probabilities where logits are expected, and
those before 4.52 give dropped tokens another output than zero. They are no oracle; the extra ``hf``
asks for later ones, and the first tests here look whether the installed router is one.
"""

import json
import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import torch
from support.layout_case import FF, D, E, Layout, S, start_groups
from support.switch_case import Case, build_layer, new_tracker

from megatron_switch.flags.recipes import RECIPES
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.testing.ranks import run_ranks

pytest.importorskip("transformers", reason="needs the extra hf: pip install -e '.[hf]'")
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
    SwitchTransformersTop1Router,
    load_balancing_loss_func,
    router_z_loss_func,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "switch_routing.json").read_text())
SEQUENCES = 3
BINDING, LOOSE = 2, S
"""Capacities: eight tokens over four experts leave some without a slot, or none."""


def hf_config(capacity, *, num_experts=E, width=D):
    return SwitchTransformersConfig(
        d_model=width,
        d_ff=FF,
        num_experts=num_experts,
        expert_capacity=capacity,
        dense_act_fn="relu",
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        router_bias=False,
        router_dtype="float32",
    )


def is_an_oracle(router_class):
    """Whether a router class drops what finds no slot, per sequence, and returns logits."""
    router = router_class(hf_config(2, num_experts=2, width=2))
    router.classifier.weight.data.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
    x_BSD = torch.ones(2, 4, 2)  # every token to expert 0
    kept_BSE, _, logits_BSE = router(x_BSD)
    drops = kept_BSE.sum(dim=-1).tolist() == [[1, 1, 0, 0]] * 2
    return drops and torch.equal(logits_BSE, router.classifier(x_BSD))


class RouterOfRelease5(SwitchTransformersTop1Router):
    """Does what releases 5.0 to 5.17 do: it counts along a dim of size one."""

    def forward(self, x_BSD):
        flat = super().forward(x_BSD.flatten(0, 1).unsqueeze(1))
        kept, gate, _ = (values.view(*x_BSD.shape[:2], -1) for values in flat)
        return kept, gate, gate


def test_the_installed_router_is_an_oracle_and_a_broken_one_is_found():
    assert is_an_oracle(SwitchTransformersTop1Router), f"transformers {version('transformers')}"
    assert not is_an_oracle(RouterOfRelease5)


def test_the_package_asks_for_a_release_that_is_one():
    (needed,) = [line for line in requires("megatron-switch") if line.startswith("transformers")]
    least = re.search(r">=(\d+)\.(\d+)", needed)
    assert (int(least[1]), int(least[2])) >= (5, 18)


def batch(seed=1):
    random = torch.Generator().manual_seed(seed)
    shape = (SEQUENCES, S, D)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def hf_layer(capacity):
    torch.manual_seed(7)
    layer = SwitchTransformersSparseMLP(hf_config(capacity))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def stacked(theirs, matrix, *, gradient=False):
    """Return one matrix of all experts, or its gradient; an idle expert's is zero."""
    weights = [getattr(theirs.experts[f"expert_{e}"], matrix).weight for e in range(E)]
    if not gradient:
        return torch.stack(weights).detach()
    return torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])


@pytest.mark.parametrize("capacity", [1, BINDING, LOOSE])
@pytest.mark.parametrize("dispatch", ["packed", "padded"])
def test_outputs_and_all_gradients_are_equal(capacity, dispatch):
    run_ranks(_check_layer, 1, capacity, dispatch)


def _check_layer(rank, capacity, dispatch):
    theirs = hf_layer(capacity)
    x_BSD, grad_BSD = batch()
    their_x = x_BSD.clone().requires_grad_()
    their_y = theirs(their_x)
    their_y.backward(grad_BSD)

    config = {"params_dtype": torch.float32, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
    case = Case({"capacity_group": "sequence", "capacity": capacity}, config)
    ours = build_layer(case, Layout(1), start_groups(Layout(1)), dispatch)
    with torch.no_grad():
        ours.router.weight.copy_(theirs.router.classifier.weight)
        ours.experts.weight1.copy_(stacked(theirs, "wi"))
        ours.experts.weight2.copy_(stacked(theirs, "wo"))
    our_x = x_BSD.transpose(0, 1).clone().requires_grad_()
    our_y, _ = ours(our_x)
    our_y.backward(grad_BSD.transpose(0, 1))

    kept_BSE, _, _ = theirs.router(x_BSD)
    dropped_BS = ~kept_BSE.bool().any(dim=-1)
    assert bool(dropped_BS.any()) == (capacity < LOOSE)
    assert torch.equal(~our_y.transpose(0, 1).bool().any(dim=-1), dropped_BS)
    pairs = {
        "y": (our_y.transpose(0, 1), their_y),
        "x": (our_x.grad.transpose(0, 1), their_x.grad),
        "router": (ours.router.weight.grad, theirs.router.classifier.weight.grad),
        "wi": (ours.experts.weight1.grad, stacked(theirs, "wi", gradient=True)),
        "wo": (ours.experts.weight2.grad, stacked(theirs, "wo", gradient=True)),
    }
    for name, (actual, expected) in pairs.items():
        assert expected.any(), name
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m
        )


def test_losses_of_one_layer_are_equal():
    run_ranks(_check_losses, 1)


def _check_losses(rank):
    theirs = hf_layer(BINDING)
    x_BSD, _ = batch()
    logits_BSE = theirs.router.classifier(x_BSD)
    case = Case(
        {"capacity_group": "sequence", "capacity": BINDING}, {"params_dtype": torch.float32}
    )
    ours = build_layer(case, Layout(1), start_groups(Layout(1)))
    ours.router.weight.data.copy_(theirs.router.classifier.weight)
    tracker = new_tracker()
    ours(x_BSD.transpose(0, 1))
    report = tracker.step()
    expected = load_balancing_loss_func(logits_BSE.softmax(dim=-1), logits_BSE.argmax(dim=-1))
    assert report.balance_loss == pytest.approx(expected.item(), rel=1e-5)
    assert report.z_loss == pytest.approx(router_z_loss_func(logits_BSE).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "capacity", "dropped"), [((1, 10), 2, [3, 4, 7]), ((2, 5), 1, [1, 3, 4, 8])]
)
def test_their_router_drops_what_the_golden_table_says(shape, capacity, dropped):
    gate, assign = GOLDEN["input"]["gate"], GOLDEN["input"]["assign"]
    probs_TE = (1 - torch.tensor(gate)).div(E - 1).unsqueeze(1).repeat(1, E)
    probs_TE[torch.arange(10), assign] = torch.tensor(gate)
    router = SwitchTransformersTop1Router(hf_config(capacity, width=E))
    router.classifier.weight.data.copy_(torch.eye(E))
    kept_BSE, _, _ = router(probs_TE.log().view(*shape, E))
    kept_T = kept_BSE.any(dim=-1).flatten()
    assert (~kept_T).nonzero().flatten().tolist() == dropped


def test_the_recipe_has_their_defaults():
    theirs, ours = SwitchTransformersConfig(), RECIPES["hf"]
    assert ours["switch_capacity"] == theirs.expert_capacity
    assert ours["moe_aux_loss_coeff"] == theirs.router_aux_loss_coef
    assert ours["moe_z_loss_coeff"] == theirs.router_z_loss_coef
    assert ours["moe_input_jitter_eps"] == theirs.router_jitter_noise
    assert expert_capacity(S, E, -1.0) == LOOSE  # what "not binding" means above
