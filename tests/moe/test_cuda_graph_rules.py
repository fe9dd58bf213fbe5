"""A graph that cannot be captured, or would repeat what must change, is refused with a way out."""

from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import CudaGraphModule

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.moe.cuda_graph_rules import check_cuda_graphs


def check(impl, modules=(), *, dispatch="padded", expert_dropout=0.0, **changes):
    values = {
        "cuda_graph_impl": impl,
        "cuda_graph_modules": [CudaGraphModule[name] for name in modules],
        "moe_input_jitter_eps": None,
        "calculate_per_token_loss": False,
    }
    switch = SwitchConfig(dispatch=dispatch, expert_dropout=expert_dropout)
    check_cuda_graphs(SimpleNamespace(**values | changes), switch)


@pytest.mark.parametrize(
    ("impl", "modules", "dispatch"),
    [
        ("local", [], "padded"),
        ("full_iteration", [], "padded"),
        ("transformer_engine", ["moe"], "padded"),
        ("transformer_engine", ["attn"], "packed"),
        ("local", ["attn", "mlp"], "packed"),  # of dense layers
    ],
)
def test_what_can_be_captured_is_accepted(impl, modules, dispatch):
    check(impl, modules, dispatch=dispatch)


@pytest.mark.parametrize("modules", [["moe_router"], ["moe_router", "moe_preprocess"]])
def test_a_part_of_the_layer_cannot_be_captured(modules):
    shown = " ".join(sorted(modules))
    with pytest.raises(
        ConfigError, match=rf"got --cuda-graph-modules {shown}\. Use --cuda-graph-modules attn"
    ):
        check("local", modules)


@pytest.mark.parametrize(
    ("impl", "modules", "shown"),
    [
        ("local", [], "whole layers"),
        ("full_iteration", [], "whole layers"),
        ("transformer_engine", ["attn", "moe"], "--cuda-graph-modules attn moe"),
    ],
)
def test_packed_dispatch_cannot_be_captured(impl, modules, shown):
    message = rf"--cuda-graph-impl {impl} \({shown}\)\. Use --switch-dispatch padded"
    with pytest.raises(ConfigError, match=message):
        check(impl, modules, dispatch="packed")


@pytest.mark.parametrize("noise", [{"moe_input_jitter_eps": 0.01}, {"expert_dropout": 0.1}])
def test_noise_would_be_that_of_one_micro_batch(noise):
    with pytest.raises(ConfigError, match=r"repeat the noise .* or leave --cuda-graph-impl local"):
        check("local", **noise)


def test_losses_would_have_the_weight_of_one_micro_batch():
    with pytest.raises(ConfigError, match=r"by the tokens of one\. .*--cuda-graph-impl local"):
        check("local", calculate_per_token_loss=True)
