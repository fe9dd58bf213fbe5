"""What the router decides on its own: capacities, benchmark logits, what its watchers see.

Routing, losses and their gradients on any grid of ranks are in ``test_switch_mlp.py``.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router_trace import (
    RouterTracer,
    load_hidden_states_for_record,
    load_logits_for_record,
)
from support.layout_case import D, E, Layout, S, start_groups
from support.switch_case import LAYER, Case, build_layer, new_tracker
from torch import nn

from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import ConfigError
from megatron_switch.moe import router as router_module
from megatron_switch.moe.micro_batch_state import set_loss_tokens, set_step_key
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.testing.ranks import run_ranks


def hidden_SBD():
    random = torch.Generator().manual_seed(4)
    return torch.randn(S, 2, D, generator=random, dtype=torch.float64)


def test_capacity_follows_flag_phase_and_group():
    run_ranks(_check_capacity, 1)


def _check_capacity(rank):
    groups = start_groups(Layout(1))

    def capacities(factor=1.25, **switch):
        case = Case({"min_capacity": 0} | switch, {"moe_expert_capacity_factor": factor})
        router = build_layer(case, Layout(1), groups).router
        return router.train().capacity_of(3, 10), router.eval().capacity_of(3, 10)

    # 30 tokens in 3 sequences, 4 experts; the factor while evaluating is 2 by default.
    assert capacities() == (9, 15)
    assert capacities(capacity_rounding="ceil") == (10, 15)
    assert capacities(capacity_group="sequence") == (3, 5)
    assert capacities(min_capacity=12) == (12, 15)
    assert capacities(eval_capacity_factor=0.5) == (9, 3)
    assert capacities(factor=-1.0, eval_capacity_factor=1.0) == (30, 7)
    assert capacities(factor=None, eval_capacity_factor=-1.0) == (30, 30)
    assert capacities(factor=100.0, capacity_group="sequence") == (10, 5)
    assert capacities(capacity=2, min_capacity=4) == (2, 2)


def test_without_a_balancing_loss_nothing_is_attached():
    run_ranks(_check_no_loss, 1)


def _check_no_loss(rank):
    groups = start_groups(Layout(1))
    for balancing, with_loss in (("none", False), (["aux_loss"], True)):
        config = {"moe_router_load_balancing_type": balancing, "moe_z_loss_coeff": None}
        config["moe_aux_loss_coeff"] = [3.0] if with_loss else 3.0
        layer = build_layer(Case(config=config), Layout(1), groups)
        (layer(hidden_SBD())[0] * 0.0).sum().backward()
        assert layer.router.weight.grad.any() == with_loss


def test_balanced_routing_logs_exactly_one():
    run_ranks(_check_balanced, 1)


def _check_balanced(rank):
    layer = build_layer(Case(), Layout(1), start_groups(Layout(1)))
    layer.router.weight.data.copy_(5.0 * torch.eye(E, D))
    x_TD = torch.eye(E, D, dtype=torch.float64).repeat(2 * S // E, 1)  # one for each expert in turn
    tracker = new_tracker()
    layer(x_TD.view(2, S, D).transpose(0, 1))
    report = tracker.step()
    assert report.balance_loss == 1.0
    assert report.load_LE.tolist() == [[0.25] * E]
    assert report.dropped == 0.25  # capacity factor 0.75


def test_loss_gradients_follow_megatrons_loss_scale():
    run_ranks(_check_loss_scale, 1)


def _check_loss_scale(rank):
    groups = start_groups(Layout(1))
    gradients = []
    for scale in (1.0, 1024.0):
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
        layer = build_layer(Case(), Layout(1), groups)
        (layer(hidden_SBD())[0] * 0.0).sum().backward()
        gradients.append(layer.router.weight.grad)
    assert torch.equal(gradients[1], 1024.0 * gradients[0])


def test_counted_per_token_losses_weigh_by_tokens_in_the_loss_not_by_tokens_routed():
    """Megatron's weigh by the tokens routed on each rank, which is right for no loss mask."""
    run_ranks(_check_weight, 1)


def _check_weight(rank):
    groups = start_groups(Layout(1))
    gradients = {}
    for counted in (None, 1.0, 6.0):
        get_cuda_rng_tracker().reset()
        layer = build_layer(Case(), Layout(1), groups, calculate_per_token_loss=True)
        if counted is not None:
            set_loss_tokens(torch.tensor(counted))
        (layer(hidden_SBD())[0] * 0.0).sum().backward()
        gradients[counted] = layer.router.weight.grad
    torch.testing.assert_close(gradients[6.0], 6.0 * gradients[1.0])
    # Where nobody says what is in the loss, all tokens are.
    torch.testing.assert_close(gradients[None], 2.0 * S * gradients[1.0])


def test_padding_masks_are_checked():
    run_ranks(_check_masks, 1)


def _check_masks(rank):
    layer = build_layer(Case(), Layout(1), start_groups(Layout(1)))
    with pytest.raises(ConfigError, match=r"shape \(2, 8\), got \(8, 2\)"):
        layer(hidden_SBD(), padding_mask=torch.zeros(S, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"one bool a token.*got \(16,\) of torch.int64"):
        layer(hidden_SBD(), padding_mask=torch.zeros(2, S, dtype=torch.int64))


def test_forced_balance_draws_logits_and_keeps_gradients():
    run_ranks(_check_forced_balance, 1)


def _check_forced_balance(rank):
    groups = start_groups(Layout(1))
    with cuda_on_cpu():
        model_parallel_cuda_manual_seed(1)
        config = {"moe_router_force_load_balancing": True}
        router = build_layer(Case(config=config), Layout(1), groups).router
        start = get_cuda_rng_tracker().get_states()
        x_BSD = torch.zeros(1, 4096, D, dtype=torch.float64)  # all logits would be 0
        choices = []
        for states in (start, None, start):
            if states is not None:
                get_cuda_rng_tracker().set_states(dict(states))
            routed, expert_T1 = router(x_BSD + 1.0)
            choices.append(expert_T1.flatten())
        assert torch.equal(choices[0], choices[2])
        assert not torch.equal(choices[0], choices[1])
        assert torch.bincount(choices[0], minlength=E).min() > 0.9 * 4096 / E
        routed.routing.gate_T.sum().backward()
        assert router.weight.grad.any()


@pytest.mark.parametrize("jitter", [None, 0.01])
def test_the_product_of_the_router_has_factors_of_one_type(jitter):
    run_ranks(_check_factors, 1, jitter)


def _check_factors(rank, jitter):
    groups = start_groups(Layout(1))
    case = Case({}, {"moe_input_jitter_eps": jitter, "params_dtype": torch.bfloat16})
    router = build_layer(case, Layout(1), groups).router.bfloat16()
    set_step_key(1)
    seen = []

    def product(x_TD, weight_ED, bias, dtype):
        seen.append((x_TD.dtype, weight_ED.dtype, dtype))
        return torch.nn.functional.linear(x_TD.to(dtype), weight_ED.to(dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_module, "router_gating_linear", product)
        x_BSD = hidden_SBD().bfloat16().transpose(0, 1).contiguous().requires_grad_()
        routed, _ = router(x_BSD)
        routed.routing.gate_T.sum().backward()
    factor = torch.float32 if jitter else torch.bfloat16  # jitter multiplies in float32
    assert seen == [(factor, factor, torch.float32)]
    assert router.weight.grad.dtype == torch.bfloat16


def test_megatrons_router_trace_sees_every_token(tmp_path):
    run_ranks(_check_trace, 1, tmp_path)


def _check_trace(rank, folder):
    groups = start_groups(Layout(1))
    case = Case({"capacity_group": "sequence"}, {"moe_input_jitter_eps": 0.5})
    layer = build_layer(case, Layout(1), groups)
    # As Megatron names it: the third layer of a decoder.
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Module()])
    model.decoder.layers[2].mlp = layer
    tracer = RouterTracer(
        str(folder),
        max_steps=1,
        rank=0,
        training_mode=True,
        capture_hidden_states=True,
        capture_logits=True,
        dump_router_weights=True,
    )
    tracer.register_hooks([model])
    seen = []
    layer.router.register_forward_hook(lambda router, inputs, output: seen.append(output[0]))
    set_step_key(1)
    with cuda_on_cpu():  # the tracer asks whether a CUDA graph is being captured
        layer(hidden_SBD())
    tracer.advance_step(17)
    tracer.flush()

    (line,) = (folder / "router_trace_rank0.jsonl").read_text().splitlines()
    record = json.loads(line)
    expert_T = seen[0].routing.expert_T
    about = {name: record[name] for name in ("step", "layer", "block", "num_tokens", "topk")}
    assert about == {
        "step": 17,
        "layer": LAYER - 1,
        "block": "decoder",
        "num_tokens": 2 * S,
        "topk": 1,
    }
    assert record["top_indices"] == expert_T.unsqueeze(1).tolist()
    # Rows of the sidecars are batch-major; logits are those without jitter.
    x_TD = hidden_SBD().transpose(0, 1).flatten(0, 1)
    assert torch.equal(load_hidden_states_for_record(record, str(folder)), x_TD.bfloat16())
    logits_TE = (x_TD.bfloat16() @ layer.router.weight.bfloat16().t()).detach()
    traced_TE = load_logits_for_record(record, str(folder))
    torch.testing.assert_close(traced_TE, logits_TE, rtol=0.05, atol=0.05)
    weights = torch.load(folder / "router_state_rank0.pt")
    assert torch.equal(weights["decoder", None, LAYER - 1]["weight"], layer.router.weight.float())


def test_weight_gradients_are_summed_over_sequence_shards():
    groups = SimpleNamespace(
        **{name: SimpleNamespace(size=lambda: 1) for name in ("tp", "cp", "tp_cp", "tp_ep")},
        tp_dp_cp=None,
    )
    config = Case(config={"add_bias_linear": True}).transformer(Layout(2, tp=2))
    router = SwitchRouter(config, groups, switch=SwitchConfig())
    assert router.weight.sequence_parallel  # what makes Megatron sum over tensor ranks
    assert router.bias is None
