"""The Switch layer on any grid of ranks equals a loop over the undivided batch, losses included."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from support.layout_case import D, Layout, Part, each_layout, start_groups
from support.switch_case import (
    Case,
    Oracle,
    WholeMicroBatch,
    build_layer,
    check_against,
    new_tracker,
    run_part,
    summed_gradients,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import ConfigError
from megatron_switch.moe import switch_mlp
from megatron_switch.moe.micro_batch_state import set_step_key
from megatron_switch.moe.switch_mlp import switch_mlp_spec
from megatron_switch.testing.ranks import run_ranks

LAYOUTS = [
    Layout(1),
    Layout(2, ep=2),
    Layout(4, ep=4),
    Layout(2, tp=2),
    Layout(4, tp=4),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, ep=2, etp=2),
    Layout(2, cp=2),
    Layout(8, tp=2, cp=2, ep=2, etp=2),
]

CASES = {
    "micro-batch": Case(),
    "micro-batch, padding, tokens": Case(
        padding=True, sequences=3, config={"calculate_per_token_loss": True}
    ),
    "sequence": Case({"capacity_group": "sequence"}, padding=True, sequences=3),
    "ep": Case({"capacity_group": "ep"}, padding=True),
    "ep, tokens": Case({"capacity_group": "ep"}, {"calculate_per_token_loss": True}, sequences=3),
    "probability": Case({"drop_order": "probability"}, padding=True),
    "probability, sequence": Case(
        {"drop_order": "probability", "capacity_group": "sequence", "capacity": 1}, sequences=3
    ),
    "probability, ep": Case({"drop_order": "probability", "capacity_group": "ep"}, padding=True),
    "absolute, chunks": Case({"capacity": 3, "overlap_chunks": 2}, padding=True),
    "all dropped": Case(config={"moe_expert_capacity_factor": 0.1}, padding=True),
    "no drop": Case(config={"moe_expert_capacity_factor": -1.0}, padding=True),
}


def dispatch_modes(case, layout):
    """Return the modes that can serve a case; none where no capacity group can be formed."""
    spans = case.switch.get("capacity_group") == "ep"
    if spans and layout.ep * layout.etp % (layout.tp * layout.cp):
        return []
    return ["packed"] if spans else ["packed", "padded"]


@each_layout(LAYOUTS)
def test_every_layout_equals_the_undivided_layer(layout):
    num_microbatches = layout.world // (layout.tp * layout.cp)
    per_exchange = layout.ep * layout.etp // (layout.tp * layout.cp)
    oracles = {
        name: Oracle(case, num_microbatches, per_exchange)
        for name, case in CASES.items()
        if dispatch_modes(case, layout)
    }
    for oracle in oracles.values():
        assert len(oracle.expected)  # computed once, here, not on every rank
    run_ranks(_check_layout, layout.world, layout, oracles)


def _check_layout(rank, layout, oracles):
    part = Part(layout, start_groups(layout))
    for name, oracle in oracles.items():
        for dispatch in dispatch_modes(oracle.case, layout):
            layer = build_layer(oracle.case, layout, part.groups, dispatch)
            try:
                check_against(oracle, layer, part)
            except AssertionError as error:
                raise AssertionError(f"{name}, {dispatch}") from error


NOISE = Case({"expert_dropout": 0.4}, {"moe_input_jitter_eps": 0.3}, padding=True)


@pytest.mark.parametrize(
    "layout", [Layout(1), Layout(2, cp=2), Layout(4, tp=2, ep=2, etp=2)], ids=str
)
def test_noise_depends_neither_on_layout_nor_on_dispatch(layout):
    run_ranks(_check_noise, layout.world, layout)


def _check_noise(rank, layout):
    part = Part(layout, start_groups(layout))
    oracle = Oracle(NOISE, layout.world // (layout.tp * layout.cp))
    alone = WholeMicroBatch.alone(0)
    whole = build_layer(NOISE, alone.layout, alone.groups)
    expected = []
    for index in range(oracle.num_microbatches):
        set_step_key(1000 + index)
        expected.append(run_part(whole, oracle, replace(alone, index=index)))
    noisy = torch.stack([rows["y"] for rows in expected]).view_as(oracle.x_MBSD)
    gradients_x = torch.stack([rows["x"] for rows in expected]).view_as(oracle.x_MBSD)

    for dispatch in ("packed", "padded"):
        layer = build_layer(NOISE, layout, part.groups, dispatch)
        set_step_key(1000 + part.microbatch)
        actual = run_part(layer, oracle, part) | summed_gradients(layer, part)
        torch.testing.assert_close(actual["y"], part.of(noisy))
        torch.testing.assert_close(actual["x"], part.of(gradients_x))
        torch.testing.assert_close(actual["router"], whole.router.weight.grad)
        wi_grad, wo_grad = whole.experts.weight1.grad, whole.experts.weight2.grad
        torch.testing.assert_close(actual["wi"], part.shard_of_wi(wi_grad, gated=False))
        torch.testing.assert_close(actual["wo"], part.shard_of_wo(wo_grad))

        set_step_key(2000)
        assert not torch.allclose(run_part(layer, oracle, part)["y"], actual["y"])
        # No noise in evaluation: the same as a layer that has none.
        plain = build_layer(replace(NOISE, switch={}, config={}), layout, part.groups, dispatch)
        in_evaluation = run_part(layer.eval(), oracle, part)["y"]
        assert torch.equal(in_evaluation, run_part(plain.eval(), oracle, part)["y"])


def plain_forward(layer, hidden_SBD, mask_BS):
    return layer(hidden_SBD, padding_mask=mask_BS)[0]


def recomputed_forward(layer, hidden_SBD, mask_BS):
    return tensor_parallel.checkpoint(partial(plain_forward, layer), False, hidden_SBD, mask_BS)


def test_recomputing_repeats_the_noise_of_its_own_micro_batch():
    run_ranks(_check_recompute, 1)


def _check_recompute(rank):
    part = Part(Layout(1), start_groups(Layout(1)))
    oracle = Oracle(NOISE, 2)
    moe = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    with cuda_on_cpu():
        expected = _two_micro_batches(oracle, build_layer(NOISE, part.layout, part.groups))
        for changes, forward in ((moe, plain_forward), ({}, recomputed_forward)):
            layer = build_layer(NOISE, part.layout, part.groups, **changes)
            actual = _two_micro_batches(oracle, layer, forward)
            assert all(map(torch.equal, actual, expected))


def _two_micro_batches(oracle, layer, forward=plain_forward):
    """Run both forward passes before the first backward, as a pipeline does."""
    tracker = new_tracker()
    leaves = [x_BSD.transpose(0, 1).clone().requires_grad_() for x_BSD in oracle.x_MBSD]
    outputs = []
    for index, leaf in enumerate(leaves):
        set_step_key(1000 + index)
        outputs.append(forward(layer, leaf, oracle.padding_MBS[index]))
    for output, grad in zip(outputs, oracle.out_grad_MBSD, strict=True):
        output.backward(grad.transpose(0, 1))
    report = tracker.step()
    assert report.tokens_L.tolist() == [(~oracle.padding_T).sum()]  # once, not twice
    parameters = [parameter.grad for parameter in layer.parameters()]
    return [*outputs, *(leaf.grad for leaf in leaves), *parameters, report.z_loss_L]


def test_scaled_precisions_are_recomputed_by_transformer_engine(monkeypatch):
    calls = []

    def engine_checkpoint(function, distribute, tracker, group, *inputs):
        calls.append((distribute, tracker, group))
        return function(*inputs)

    monkeypatch.setattr(switch_mlp, "te_checkpoint", engine_checkpoint)
    run_ranks(_check_engine, 1, calls)


def _check_engine(rank, calls):
    moe = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    layer = build_layer(Case(), Layout(1), start_groups(Layout(1)), **moe)
    hidden_SBD = torch.randn(8, 2, D, dtype=torch.float64)
    expected, _ = layer.eval()(hidden_SBD)
    layer.config.fp8 = "hybrid"
    layer.train()(hidden_SBD)
    assert calls == [(False, tensor_parallel.get_cuda_rng_tracker, layer.tp_group)]
    assert torch.equal(layer.eval()(hidden_SBD)[0], expected)
    assert len(calls) == 1  # nothing is recomputed in evaluation


@pytest.mark.parametrize("dispatch", ["packed", "padded"])
def test_what_is_kept_for_backward_outside_the_experts_is_bounded(dispatch):
    run_ranks(_check_kept_bytes, 1, dispatch)


class _FreeExperts(nn.Module):
    """Differentiable in rows and gates, and keeps nothing."""

    def forward(self, rows_RD, tokens_per_expert_e, gate_R):
        return rows_RD * 2.0 + gate_R.unsqueeze(1), None


def _check_kept_bytes(rank, dispatch):
    groups = start_groups(Layout(1))
    num_tokens, width, num_experts = 1024, 64, 32
    sizes = {"hidden_size": width, "num_moe_experts": num_experts, "params_dtype": torch.float32}
    for changes in ({}, {"capacity_group": "sequence"}, {"moe_input_jitter_eps": 0.1}):
        switch = {k: v for k, v in changes.items() if k == "capacity_group"}
        config = sizes | {k: v for k, v in changes.items() if k not in switch}
        layer = build_layer(Case(switch), Layout(1), groups, dispatch, **config)
        layer.experts = _FreeExperts()
        kept = {}

        def note(tensor, kept=kept, weight=layer.router.weight):
            storage = tensor.untyped_storage()
            if storage.data_ptr() != weight.untyped_storage().data_ptr():
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hidden_SBD = torch.randn(num_tokens // 4, 4, width, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output, _ = layer(hidden_SBD)
        output.sum().backward()
        bound = 4 * num_tokens * (num_experts + width) + 64 * num_tokens
        assert 4 * num_tokens * num_experts < sum(kept.values()) <= bound


@pytest.mark.slow
def test_padded_layer_reads_nothing_back():
    # In a process of its own: the groups of a world of eight exist only here.
    run_ranks(_check_fake, 1)


def _check_fake(rank):
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    layout = Layout(8, tp=2, cp=2, ep=2)
    groups = start_groups(layout)
    with FakeTensorMode():
        for case in (NOISE, Case({"drop_order": "probability", "capacity_group": "sequence"})):
            tracker = new_tracker()
            layer = build_layer(case, layout, groups, "padded", params_dtype=torch.bfloat16)
            set_step_key(7)
            hidden_SBD = torch.randn(4, 2, D, dtype=torch.bfloat16, requires_grad=True)
            output, _ = layer(hidden_SBD, padding_mask=torch.zeros(2, 4, dtype=torch.bool))
            output.sum().backward()
            assert hidden_SBD.grad.shape == output.shape == (4, 2, D)
            assert layer.router.weight.grad.shape == layer.router.weight.shape
            layer.eval()(hidden_SBD)
            assert set(tracker.metrics) == {"training", "evaluation"}
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def test_no_token_at_all_is_no_trouble():
    run_ranks(_check_empty, 1)


def _check_empty(rank):
    groups = start_groups(Layout(1))
    for case in (Case(), Case({"capacity_group": "sequence", "drop_order": "probability"})):
        for dispatch in ("packed", "padded"):
            layer = build_layer(case, Layout(1), groups, dispatch)
            hidden_SBD = torch.randn(0, 2, D, dtype=torch.float64, requires_grad=True)
            output, _ = layer(hidden_SBD)
            output.sum().backward()
            assert output.shape == (0, 2, D)
            assert not any(parameter.grad.any() for parameter in layer.parameters())


def test_half_precision_models_route_in_float32():
    run_ranks(_check_half_precision, 1)


def _check_half_precision(rank):
    groups = start_groups(Layout(1))
    case = Case(config={"moe_input_jitter_eps": 0.1, "params_dtype": torch.bfloat16})
    layer = build_layer(case, Layout(1), groups)
    inputs = []
    gating = layer.router.gating
    layer.router.gating = lambda x_TD: inputs.append(x_TD) or gating(x_TD)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}

    set_step_key(5)
    hidden_SBD = torch.ones(4096, 2, D, dtype=torch.bfloat16, requires_grad=True)
    output, _ = layer(hidden_SBD)
    output.sum().backward()
    assert output.dtype == hidden_SBD.grad.dtype == torch.bfloat16
    assert layer.router.weight.grad.dtype == torch.bfloat16
    (noise_TD,) = inputs  # of ones, so the input is the noise
    assert noise_TD.dtype == gating(noise_TD).dtype == torch.float32
    assert abs(noise_TD.mean().item() - 1.0) < 1e-3
    assert noise_TD.min() >= 0.9
    assert noise_TD.max() <= 1.1
    assert len(noise_TD.unique()) > 10_000  # bfloat16 has 26 numbers in that range

    layer.eval()(hidden_SBD)
    assert inputs[-1].dtype == torch.bfloat16
    assert gating(inputs[-1]).dtype == torch.float32


def test_out_of_memory_names_sizes_and_flags():
    run_ranks(_check_out_of_memory, 1)


def _check_out_of_memory(rank):
    groups = start_groups(Layout(1))

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def message(dispatch="packed", training=True, fails="experts", how=fail, **switch):
        layer = build_layer(Case(switch), Layout(1), groups, dispatch)
        getattr(layer, fails).register_forward_pre_hook(how)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            layer.train(training)(torch.randn(8, 3, D, dtype=torch.float64))
        assert re.search("CUDA out of memory|can't allocate memory", str(caught.value.__cause__))
        return str(caught.value)

    # 24 tokens, 0.75 * 24 / 4 slots for each of 4 experts, 6 elements of 8 bytes.
    text = message()
    assert "Switch layer 3: T = 24 tokens on this rank, E = 4 experts, C = 4 slots" in text
    assert "up to 16 rows of 48 bytes, 0.0 MiB" in text
    assert "--micro-batch-size or --moe-expert-capacity-factor, raise --expert-model" in text
    assert "--recompute-granularity selective --recompute-modules moe" in text
    assert "up to 12 rows" in message(dispatch="padded", capacity_group="sequence")
    assert "C = 12 slots" in message(training=False)
    assert "or --switch-eval-capacity-factor" in message(training=False, fails="router")
    assert "up to 36 rows" in message(dispatch="padded", capacity=9)
    assert re.search("up to 24 rows .* or --switch-capacity,", message(capacity=9))
    # The CPU's allocator has no class of its own, and other errors are not about memory.
    assert message(how=lambda *_: torch.empty(2**60, dtype=torch.uint8)) == text
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        message(how=lambda *_: torch.zeros(2) @ torch.zeros(3))


def test_what_a_layer_refuses():
    run_ranks(_check_refusals, 1)


def _check_refusals(rank):
    groups = start_groups(Layout(1))
    builder = switch_mlp_spec(SwitchConfig(dispatch="packed", expert_dropout=0.1), seed=1)
    config = Case().transformer(Layout(1))
    with pytest.raises(ConfigError, match="Leave --mtp-num-layers out"):
        builder(config=config, pg_collection=groups, is_mtp_layer=True)
    config.cuda_graph_impl = "local"
    with pytest.raises(
        ConfigError,
        match=r"repeat the noise .* --switch-expert-dropout 0\.1.*--cuda-graph-impl local",
    ):
        builder(config=config, pg_collection=groups)
    layer = build_layer(Case(), Layout(1), groups)
    layer.attn_tp_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ConfigError, match=r"size 2 every tensor rank .* Add --sequence-parallel"):
        layer(torch.randn(8, 2, D, dtype=torch.float64))


def test_megatron_sees_an_moe_layer():
    run_ranks(_check_is_megatrons, 1)


def _check_is_megatrons(rank):
    start_groups(Layout(1))
    case = Case(config={"add_bias_linear": True, "sequence_parallel": False})
    layer = build_layer(case, Layout(1), groups=None)  # Megatron's groups by default
    assert isinstance(layer, MoELayer)
    assert [name for name, _ in layer.named_parameters()] == [
        "router.weight",
        "experts.weight1",
        "experts.weight2",
    ]
    assert layer.router.layer_number == 3
    weight = layer.router.weight.clone()
    layer.set_layer_number(4)
    assert not torch.equal(layer.router.weight, weight)
    layer.set_layer_number(3)
    assert torch.equal(layer.router.weight, weight)
    kept = build_layer(case, Layout(1), None, perform_initialization=False)
    kept.router.weight.data.fill_(1.0)
    kept.set_layer_number(9)
    assert (kept.router.weight == 1.0).all()
