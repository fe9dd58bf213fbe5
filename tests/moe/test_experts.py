"""Our experts compute what Megatron's do and are marked for its optimizers as its own are."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from support.layout_case import FF, D, E, Layout, Part, Problem, start_groups, switch_config
from torch import nn

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import LayoutError
from megatron_switch.moe import experts as module
from megatron_switch.moe.experts import (
    GroupedExperts,
    TransformerEngineExperts,
    build_experts,
    engine_config,
)
from megatron_switch.testing.ranks import run_ranks

ALONE = Layout(1)
RELU = {"activation_func": F.relu}
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": False}
CLAMPED = {
    "activation_func": F.gelu,
    "gated_linear_unit": True,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
}
COUNTS = torch.tensor([5, 0, 2, 6])


class Group:
    """Stands for a process group of which only rank and size are asked."""

    def __init__(self, rank=0, size=1):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def groups(ep=(0, 1), etp=(0, 1)):
    return ProcessGroupCollection(ep=Group(*ep), expt_tp=Group(*etp), expt_dp=Group())


KINDS = pytest.mark.parametrize("kind", [RELU, SWIGLU, CLAMPED], ids=["relu", "swiglu", "clamped"])


@KINDS
def test_same_values_and_gradients_as_megatrons_experts(kind):
    run_ranks(_check_equals_megatron, 1, kind)


@KINDS
def test_in_bfloat16_as_close_to_the_exact_result_as_megatrons_experts(kind):
    run_ranks(_check_as_close_as_megatron, 1, kind)


def _check_equals_megatron(rank, kind):
    ours, theirs = _results(start_groups(ALONE), torch.float64, kind)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected)


def _check_as_close_as_megatron(rank, kind):
    # The gate is multiplied elsewhere, so single elements are rounded otherwise.
    real_groups = start_groups(ALONE)
    exact, _ = _results(real_groups, torch.float64, kind)
    for actual, theirs, expected in zip(
        *_results(real_groups, torch.bfloat16, kind), exact, strict=True
    ):
        error, their_error = ((x.double() - expected).norm() for x in (actual, theirs))
        assert error <= 1.5 * their_error
        assert error < 0.01 * expected.norm()


def _results(real_groups, dtype, kind):
    """Return outputs and gradients of ours and of Megatron's; bfloat16 values in every dtype."""
    config = switch_config(ALONE, params_dtype=dtype, **kind)
    ours = GroupedExperts(E, config, pg_collection=real_groups)
    theirs = LocalSpecProvider().grouped_mlp_modules(False)(E, config, pg_collection=real_groups)
    draw = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(shape, generator=draw).bfloat16().to(dtype)

    for weight in (ours.weight1, ours.weight2):
        weight.data.copy_(drawn(*weight.shape) * weight.shape[2] ** -0.5)
    for index, expert in enumerate(theirs.local_experts):
        expert.linear_fc1.weight.data.copy_(ours.weight1[index])
        expert.linear_fc2.weight.data.copy_(ours.weight2[index])

    rows_RD, direction_RD = drawn(13, D), drawn(13, D)
    gate_R = torch.rand(13, generator=draw).to(torch.promote_types(dtype, torch.float32))
    results = []
    for experts in (ours, theirs):
        leaves = [rows_RD.clone().requires_grad_(), gate_R.clone().requires_grad_()]
        out_RD, bias = experts(leaves[0], COUNTS, leaves[1])
        assert bias is None
        out_RD.backward(direction_RD)
        results.append([out_RD.detach(), *(leaf.grad for leaf in leaves)])
    results[0] += [ours.weight1.grad, ours.weight2.grad]
    for name in ("linear_fc1", "linear_fc2"):
        grads = [getattr(expert, name).weight.grad for expert in theirs.local_experts]
        results[1].append(torch.stack(grads))
    return results


@pytest.mark.parametrize(
    "layout",
    [Layout(2, ep=2), Layout(2, tp=2), Layout(2, tp=2, etp=2), Layout(4, tp=2, ep=2)],
    ids=str,
)
def test_gradient_norm_counts_every_weight_once(layout):
    run_ranks(_check_norm, layout.world, layout)


def _check_norm(rank, layout):
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(1, capacity=1)
    square = torch.zeros((), dtype=torch.float64)
    for parameter in part.experts(problem).parameters():
        # Megatron's filter, and the group over which it sums expert gradients.
        if param_is_not_tensor_parallel_duplicate(
            parameter, tp_group=part.groups.tp, expert_tp_group=part.groups.expt_tp
        ):
            square += parameter.detach().square().sum()
    dist.all_reduce(square, group=part.groups.tp_ep_pp)
    weights = (problem.wi_EFD, problem.wo_EDF)
    torch.testing.assert_close(square, sum(weight.square().sum() for weight in weights))


def test_parameters_are_marked_as_experts_in_every_layout():
    experts = GroupedExperts(E, switch_config(ALONE, **SWIGLU), pg_collection=groups())
    first, second = experts.weight1, experts.weight2
    assert first.allreduce is False
    assert second.allreduce is False
    assert (first.partition_dim, first.partition_stride) == (1, 2)
    assert (second.partition_dim, second.partition_stride) == (2, 1)
    assert first.tensor_model_parallel
    assert second.tensor_model_parallel
    assert first.dtype == torch.float64


def test_a_rank_starts_with_its_part_of_the_whole_layer():
    config = switch_config(ALONE)
    whole = GroupedExperts(E, config, pg_collection=groups())
    whole.reset_parameters(seed=3, layer_number=7, init_scale=0.1)
    part = GroupedExperts(E // 2, config, pg_collection=groups(ep=(1, 2), etp=(1, 2)))
    part.reset_parameters(seed=3, layer_number=7, init_scale=0.1)
    assert torch.equal(part.weight1, whole.weight1[2:, FF // 2 :])
    assert torch.equal(part.weight2, whole.weight2[2:, :, FF // 2 :])
    assert not torch.equal(whole.weight1[0], whole.weight1[1])


def test_hidden_width_must_be_divisible():
    with pytest.raises(
        LayoutError, match=r"8 is no multiple of 3.*--moe-ffn-hidden-size or --expert-tensor"
    ):
        GroupedExperts(E, switch_config(ALONE), pg_collection=groups(etp=(0, 3)))


def test_dropout_needs_keys_and_acts_in_training_only():
    experts = GroupedExperts(E, switch_config(ALONE), pg_collection=groups(), expert_dropout=0.5)
    experts.reset_parameters(seed=1, layer_number=1, init_scale=0.1)
    rows_RD, gate_R = torch.randn(13, D).double(), torch.rand(13).double()
    with pytest.raises(AssertionError, match="needs the tokens' keys"):
        experts(rows_RD, COUNTS, gate_R)
    keys = torch.arange(13)
    dropped_RD, _ = experts(rows_RD, COUNTS, gate_R, key_R=keys)
    again_RD, _ = experts(rows_RD, COUNTS, gate_R, key_R=keys)
    whole_RD, _ = experts.eval()(rows_RD, COUNTS, gate_R)
    assert torch.equal(dropped_RD, again_RD)
    assert not torch.allclose(dropped_RD, whole_RD)


class GroupedLinear(nn.Module):
    """Stands for Transformer Engine's grouped linear layers; the names are those 0.19.2 uses."""

    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        skip_bias_add,
        is_expert,
        tp_comm_buffer_name,
        pg_collection,
        name=None,
    ):
        super().__init__()
        assert is_expert
        assert not bias
        shape = [output_size, input_size]
        shape[tp_comm_buffer_name == "fc2"] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.zeros(shape)))

    def forward(self, rows_RD, counts):
        parts = rows_RD.split(counts.tolist() if torch.is_tensor(counts) else counts)
        weights = self.parameters()
        return torch.cat([x @ w.T for x, w in zip(parts, weights, strict=True)]), None


@pytest.fixture
def transformer_engine(monkeypatch):
    """Pretend that Transformer Engine is there, and CUDA."""
    submodules = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    spec = functools.partial(TEGroupedMLP, submodules=submodules)
    monkeypatch.setattr(
        module.TESpecProvider, "grouped_mlp_modules", lambda self, moe_use_grouped_gemm: spec
    )
    monkeypatch.setattr(module, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def build(config, **settings):
    switch = SwitchConfig(**settings)
    return build_experts(E // 2, config, pg_collection=groups(ep=(1, 2)), switch=switch)


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_is_used_where_it_is_and_starts_the_same():
    config = switch_config(ALONE, transformer_impl="transformer_engine", add_bias_linear=True)
    theirs = build(config)
    assert type(theirs) is TransformerEngineExperts
    assert config.add_bias_linear  # what other layers read is left alone
    ours = GroupedExperts(E // 2, switch_config(ALONE), pg_collection=groups(ep=(1, 2)))
    for experts in (ours, theirs):
        experts.reset_parameters(seed=5, layer_number=1, init_scale=0.1)
    for index in range(E // 2):
        first = getattr(theirs.linear_fc1, f"weight{index}")
        second = getattr(theirs.linear_fc2, f"weight{index}")
        assert first.allreduce is False
        assert second.allreduce is False
        assert torch.equal(first, ours.weight1[index].float())
        assert torch.equal(second, ours.weight2[index].float())


GELU = {"activation_func": F.gelu, "add_bias_linear": True}


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (GELU, False),  # Megatron fuses it with a bias, which dense layers have and experts do not
        ({"activation_func": F.gelu, "gated_linear_unit": True}, False),
        ({"activation_func": F.silu, "gated_linear_unit": True}, True),
        ({"activation_func": quick_gelu, "gated_linear_unit": True}, True),
        ({"activation_func": F.silu, "gated_linear_unit": True, "fusion": False}, False),
    ],
    ids=["gelu", "geglu", "swiglu", "quick-geglu", "not asked for"],
)
def test_the_engine_s_experts_fuse_what_megatron_can_fuse(kind, fused):
    kind = dict(kind)
    config = switch_config(ALONE, bias_activation_fusion=kind.pop("fusion", True), **kind)
    before = dict(vars(config))
    assert engine_config(config).bias_activation_fusion == fused
    assert not engine_config(config).add_bias_linear
    assert vars(config) == before  # dense layers keep their biases and their fusion


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("kind", [GELU, RELU], ids=["gelu", "relu"])
def test_the_engine_s_experts_compute_what_ours_do(kind):
    fuses = kind["activation_func"] is F.gelu
    config = switch_config(
        ALONE, transformer_impl="transformer_engine", bias_activation_fusion=fuses, **kind
    )
    theirs = build(config).double()
    ours = GroupedExperts(E // 2, switch_config(ALONE, **kind), pg_collection=groups(ep=(1, 2)))
    for experts in (ours, theirs):
        experts.reset_parameters(seed=5, layer_number=1, init_scale=0.1)
    counts = COUNTS[: E // 2]
    rows_RD = torch.randn(int(counts.sum()), D, dtype=torch.float64)
    gate_R = torch.rand(len(rows_RD), dtype=torch.float64)
    torch.testing.assert_close(
        theirs(rows_RD, counts, gate_R)[0], ours(rows_RD, counts, gate_R)[0], rtol=1e-6, atol=1e-7
    )


@pytest.mark.usefixtures("transformer_engine")
def test_expert_dropout_and_the_local_implementation_take_plain_torch(monkeypatch):
    local = switch_config(ALONE)
    transformer_engine = switch_config(ALONE, transformer_impl="transformer_engine")
    dropping = build(transformer_engine, expert_dropout=0.1)
    assert type(dropping) is GroupedExperts
    assert dropping.expert_dropout == 0.1
    assert type(build(local)) is GroupedExperts
    monkeypatch.setattr(module, "HAVE_TE", False)
    assert type(build(transformer_engine)) is GroupedExperts
    monkeypatch.setattr(module, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(build(transformer_engine)) is GroupedExperts
