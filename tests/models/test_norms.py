"""Norms without TE or Apex: torch's values, Megatron's marks, sequence-parallel gradients."""

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions import fused_layer_norm
from support.tiny_gpt import model_parallel, tiny_config
from torch import nn

from megatron_switch.errors import ConfigError
from megatron_switch.models.norms import LayerNorm, RMSNorm, local_norm
from megatron_switch.testing.ranks import run_ranks

D = 32
BOTH = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def build(kind, **settings):
    config = tiny_config(normalization=kind, **settings)
    return local_norm(config)(config=config, hidden_size=D, eps=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_the_formula(kind, dtype):
    norm = build(kind).to(dtype)
    x_TD = torch.randn(6, D).to(dtype)
    x64_TD = x_TD.double()
    if kind == "LayerNorm":
        x64_TD = x64_TD - x64_TD.mean(-1, keepdim=True)
    expected_TD = x64_TD * (x64_TD.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(norm(x_TD), expected_TD.to(dtype))


@BOTH
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_is_marked_as_megatron_expects(kind, sequence_parallel):
    size = 2 if sequence_parallel else 1
    norm = build(kind, sequence_parallel=sequence_parallel, tensor_model_parallel_size=size)
    marks = {name: p.sequence_parallel for name, p in norm.named_parameters()}
    names = {"weight", "bias"} if kind == "LayerNorm" else {"weight"}
    assert marks == dict.fromkeys(names, sequence_parallel)


@BOTH
def test_two_sequence_parallel_ranks_have_the_gradient_of_one(kind):
    run_ranks(_check_gradient, 2, kind)


def _check_gradient(rank, kind):
    with model_parallel(tensor_model_parallel_size=2):
        config = tiny_config(
            normalization=kind, sequence_parallel=True, tensor_model_parallel_size=2
        )
        norm = local_norm(config)(config=config, hidden_size=D)
        reference = getattr(nn, kind)(D, eps=1e-5)
        x_SD, target_SD = torch.randn(2, 8, D)
        ((reference(x_SD) - target_SD) ** 2).sum().backward()

        model = DistributedDataParallel(config, DistributedDataParallelConfig(), norm)
        mine = slice(4 * rank, 4 * rank + 4)
        ((model(x_SD[mine]) - target_SD[mine]) ** 2).sum().backward()
        weight = norm.weight.main_grad.clone()
        finalize_model_grads([model])

        assert not torch.allclose(weight, norm.weight.main_grad)  # a part of the sum only
        for name, parameter in norm.named_parameters():
            torch.testing.assert_close(parameter.main_grad, reference.get_parameter(name).grad)


def test_apex_is_used_where_its_kernels_import_and_are_asked_for(monkeypatch):
    monkeypatch.setattr(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
    apex = fused_layer_norm.FusedLayerNorm
    assert local_norm(tiny_config(persist_layer_norm=True)) is apex
    assert local_norm(tiny_config()) is LayerNorm
    assert local_norm(tiny_config(persist_layer_norm=True, normalization="RMSNorm")) is RMSNorm


@BOTH
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("layernorm_zero_centered_gamma", r"store the scale itself.*--apply-layernorm-1p"),
        ("memory_efficient_layer_norm", r"keep their input .*memory_efficient_layer_norm is set"),
    ],
)
def test_what_torch_cannot_do_is_refused(kind, setting, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, **{setting: True})


def test_an_unknown_normalization_is_refused():
    config = tiny_config()
    config.normalization = "L2Norm"
    with pytest.raises(ConfigError, match=r"LayerNorm or RMSNorm, got --normalization L2Norm"):
        local_norm(config)
