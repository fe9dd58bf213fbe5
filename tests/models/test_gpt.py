"""The Switch block: which layer is what on which stage, and equality with Megatron's own."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import L2Norm
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from support.tiny_gpt import (
    MOE,
    SEQ,
    VOCAB,
    build_gpt,
    logits,
    model_parallel,
    stock_moe,
    stock_spec,
    switch_spec,
    tiny_config,
    tokens_BS,
)

from megatron_switch.errors import ConfigError
from megatron_switch.models import gpt
from megatron_switch.models.core_attention import TorchDotProductAttention
from megatron_switch.models.gpt import (
    check_supported,
    switch_gpt_layer_spec,
)
from megatron_switch.models.norms import LayerNorm, RMSNorm
from megatron_switch.testing.ranks import run_ranks


def sparse_layers(spec):
    return [int(layer.submodules.mlp is stock_moe) for layer in spec.layer_specs]


def moe_config(pattern, **settings):
    return tiny_config(**(MOE | {"num_layers": len(pattern), "moe_layer_freq": pattern} | settings))


def test_the_builder_stands_on_the_sparse_layers_and_nowhere_else():
    spec = switch_spec(moe_config([0, 1, 1, 0]), pp_rank=0)
    assert sparse_layers(spec) == [0, 1, 1, 0]
    assert spec.layer_specs[0].submodules.mlp.func == MLP.as_mlp_submodule


def test_a_model_without_experts_is_dense_everywhere():
    spec = switch_spec(tiny_config(), pp_rank=0)
    assert sparse_layers(spec) == [0, 0]
    assert spec.layer_specs[0].submodules.input_layernorm is LayerNorm


def test_layers_share_no_mutable_part_with_each_other_or_with_megatron(monkeypatch):
    upstream = []

    def record(*args, **kwargs):
        upstream.append(original(*args, **kwargs))
        return upstream[-1]

    original = gpt.get_gpt_decoder_block_spec
    monkeypatch.setattr(gpt, "get_gpt_decoder_block_spec", record)
    spec = switch_spec(moe_config([1, 1, 0, 0]), pp_rank=0)
    assert upstream[0].layer_specs[0] is upstream[0].layer_specs[1]
    assert upstream[0].layer_specs[0].submodules.mlp.func is MoELayer
    parts = [
        part
        for layer in (*spec.layer_specs, upstream[0].layer_specs[0], upstream[0].layer_specs[2])
        for part in (
            layer,
            layer.submodules,
            layer.submodules.self_attention,
            layer.submodules.self_attention.submodules,
        )
    ]
    assert len({id(part) for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("normalization", "norm"), [("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)]
)
def test_the_local_spec_has_our_norms_and_attention(normalization, norm):
    spec = switch_spec(moe_config([0, 1], normalization=normalization), pp_rank=0)
    assert spec.layer_norm is norm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        assert layer.submodules.input_layernorm is norm
        assert layer.submodules.pre_mlp_layernorm is norm
        assert attention.core_attention is TorchDotProductAttention
        assert attention.q_layernorm is attention.k_layernorm is IdentityOp


@pytest.mark.parametrize(("setting", "norm"), [("qk_layernorm", RMSNorm), ("qk_l2_norm", L2Norm)])
def test_queries_and_keys_are_normalised_where_asked(setting, norm):
    config = tiny_config(normalization="RMSNorm", **{setting: True})
    attention = switch_spec(config, pp_rank=0).layer_specs[0].submodules.self_attention.submodules
    assert attention.q_layernorm is attention.k_layernorm is norm


def test_megatron_s_attention_stays_where_it_is_asked_for_by_name():
    config = tiny_config(attention_backend=AttnBackend.local)
    attention = switch_spec(config, pp_rank=0).layer_specs[0].submodules.self_attention
    assert attention.submodules.core_attention is DotProductAttention


STAGES = {  # settings: sparse pattern of every (pipeline rank, virtual stage), written by hand
    "even": (
        {"pipeline_model_parallel_size": 2},
        {(0, None): [0, 0, 1, 0], (1, None): [1, 1, 0, 1]},
    ),
    "interleaved": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {(0, 0): [0, 0], (1, 0): [1, 0], (0, 1): [1, 1], (1, 1): [0, 1]},
    ),
    "uneven": (
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2},
        {(0, None): [0, 0], (1, None): [1, 0, 1], (2, None): [1, 0, 1]},
    ),
}


@pytest.mark.parametrize("case", STAGES)
def test_every_pipeline_stage_gets_its_own_layers(case):
    settings, stages = STAGES[case]
    config = moe_config([0, 0, 1, 0, 1, 1, 0, 1], pipeline_dtype=torch.float32, **settings)
    for (pp_rank, vp_stage), pattern in stages.items():
        spec = switch_spec(config, pp_rank=pp_rank, vp_stage=vp_stage)
        assert sparse_layers(spec) == pattern, (pp_rank, vp_stage)


class TransformerEngineNorm:
    """Stands for Transformer Engine's norm, which is not installed here."""


@pytest.fixture
def transformer_engine(monkeypatch):
    """Let specs be made of Transformer Engine's names without the package; nothing is built."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    monkeypatch.setattr(gpt, "HAVE_TE", True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", TESpecProvider)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", TransformerEngineNorm)


@pytest.mark.usefixtures("transformer_engine")
def test_with_transformer_engine_only_the_sparse_mlp_changes():
    config = moe_config([0, 1], transformer_impl="transformer_engine")
    spec = switch_spec(config, pp_rank=0)
    stock = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, pp_rank=0
    )
    assert spec.layer_norm is TransformerEngineNorm
    assert sparse_layers(spec) == [0, 1]
    for ours, theirs in zip(spec.layer_specs, stock.layer_specs, strict=True):
        changed = {
            field.name
            for field in fields(theirs.submodules)
            if getattr(ours.submodules, field.name) != getattr(theirs.submodules, field.name)
        }
        assert changed == {"mlp"}  # two partial() objects are never equal, so on dense layers too
    dense = [block.layer_specs[0].submodules.mlp for block in (spec, stock)]
    assert dense[0].func == dense[1].func
    assert dense[0].keywords == dense[1].keywords


def test_megatron_s_model_builder_takes_the_spec_and_calls_ours_as_documented():
    run_ranks(_check_builder_call, 1)


def _check_builder_call(rank):
    calls = []

    def builder(**kwargs):
        calls.append(kwargs)
        return stock_moe(**kwargs)

    with model_parallel():
        config = tiny_config(**MOE)
        model_config = GPTModelConfig(
            transformer=config,
            transformer_layer_spec=partial(switch_gpt_layer_spec, switch_mlp_spec=builder),
            vocab_size=VOCAB,
            seq_length=SEQ,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = GPTModelBuilder(model_config).build_model(groups)
    (call,) = calls
    assert set(call) == {"config", "pg_collection", "is_mtp_layer", "name"}
    assert call["config"] is config
    assert call["is_mtp_layer"] is False
    sparse = model.decoder.layers[1]
    assert sparse.is_moe_layer
    assert sparse.mlp.layer_number == 2


SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": False,
}
MODELS = {  # settings of the transformer, choices of the whole model
    "plain": ({}, {}),
    "biases, absolute positions, tied": (
        {"add_bias_linear": True},
        {
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
    ),
    "llama": ({"normalization": "RMSNorm", "num_query_groups": 2, **SWIGLU}, {}),
    "query and key norms": ({"normalization": "RMSNorm", "qk_layernorm": True}, {}),
    "sparse": ({"normalization": "RMSNorm", **MOE}, {"share_embeddings_and_output_weights": True}),
}


def test_logits_and_gradients_are_those_of_megatron_s_local_spec():
    run_ranks(_check_against_stock, 1)


def _check_against_stock(rank):
    with model_parallel():
        for name, (settings, choices) in MODELS.items():
            config = tiny_config(**settings)
            ours = build_gpt(config, switch_spec(config), **choices)
            stock = build_gpt(config, stock_spec(config), **choices)
            assert [*ours.state_dict()] == [*stock.state_dict()], name
            stock.load_state_dict(ours.state_dict())
            ids_BS = tokens_BS()
            outputs = [logits(model, ids_BS) for model in (ours, stock)]
            torch.testing.assert_close(*outputs, msg=lambda text, name=name: f"{name}: {text}")
            for output in outputs:
                output.square().mean().backward()
            for (key, mine), theirs in zip(
                ours.named_parameters(), stock.parameters(), strict=True
            ):
                assert mine.grad is not None, f"{name}: {key}"
                difference = (mine.grad - theirs.grad).norm()
                assert difference <= 1e-5 * theirs.grad.norm(), f"{name}: {key}"


def test_selective_recompute_of_attention_with_dropout_changes_nothing():
    run_ranks(_check_recompute, 1)


def _check_recompute(rank):
    with model_parallel():
        gradients = []
        for recompute in ({}, {"recompute_granularity": "selective"}):
            config = tiny_config(attention_dropout=0.3, num_query_groups=2, **recompute)
            torch.manual_seed(3)
            model = build_gpt(config, switch_spec(config))
            model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
            logits(model, tokens_BS()).square().mean().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    for direct, recomputed in zip(*gradients, strict=True):
        assert torch.equal(direct, recomputed)


def test_tensor_and_sequence_parallel_ranks_have_the_logits_of_one():
    run_ranks(_check_tensor_parallel, 2)


def _check_tensor_parallel(rank):
    settings = {"normalization": "RMSNorm", "num_query_groups": 2, **SWIGLU}
    outputs = []
    for size in (1, 2):
        with model_parallel(tensor_model_parallel_size=size):
            config = tiny_config(
                tensor_model_parallel_size=size, sequence_parallel=size > 1, **settings
            )
            torch.manual_seed(11)  # weights are drawn whole, then cut: use_cpu_initialization
            model = build_gpt(config, switch_spec(config))
            outputs.append(logits(model, tokens_BS()).detach())
            norms = [p for name, p in model.named_parameters() if "norm" in name]
            assert norms
            assert all(p.sequence_parallel == (size > 1) for p in norms)
    torch.testing.assert_close(outputs[1], outputs[0])


def test_checkpoint_keys_of_the_local_spec_are_transformer_engine_s():
    run_ranks(_check_keys, 1)


def _check_keys(rank):
    with model_parallel():
        config = tiny_config(normalization="RMSNorm", **MOE)
        model = build_gpt(config, switch_spec(config))
        shards = model.sharded_state_dict(metadata={"dp_cp_group": None}).values()
    keys = {shard.key for shard in shards if "norm" in shard.key}
    assert keys == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
    }


def test_pipeline_stages_build_their_layers_and_the_last_one_the_final_norm():
    run_ranks(_check_stages, 2)


def _check_stages(rank):
    with model_parallel(pipeline_model_parallel_size=2):
        config = tiny_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **MOE)
        model = build_gpt(
            config, switch_spec(config), pre_process=rank == 0, post_process=rank == 1
        )
    (layer,) = model.decoder.layers
    assert layer.layer_number == rank + 1
    assert layer.is_moe_layer == (rank == 1)
    assert isinstance(model.decoder.final_layernorm, LayerNorm) == (rank == 1)


REFUSED = {
    "--mtp-num-layers with --num-experts": {**MOE, "mtp_num_layers": 1},
    "--experimental-attention-variant": {"experimental_attention_variant": "dsa"},
    "--heterogeneous-layers-config-path": {"heterogeneous_block_specs": True},
    "--multi-latent-attention with --transformer-impl local": {"multi_latent_attention": True},
    "--transformer-impl inference_optimized": {"transformer_impl": "inference_optimized"},
    "--attention-backend flash": {"attention_backend": AttnBackend.flash},
    "--use-grouped-gemm-for-dense-mlp": {**MOE, "use_grouped_gemm_for_dense_mlp": True},
    "--use-transformer-engine-op-fuser without": {"use_transformer_engine_op_fuser": True},
    "--kitchen-config-file": {"use_kitchen": True},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_model_parts_that_do_not_fit_are_refused_by_their_flag(flag):
    config = tiny_config()
    for name, value in REFUSED[flag].items():  # set, not built: Megatron has checks of its own
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"does not support {flag}.*Leave it out"):
        check_supported(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_parallel_size", 2, r"no equivalent of --context-parallel-size 2"),
        ("layernorm_zero_centered_gamma", True, r"--apply-layernorm-1p is set"),
    ],
)
def test_what_torchs_modules_cannot_do_is_refused_before_they_are_built(name, value, message):
    config = tiny_config()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        check_supported(config)


def test_transformer_engine_that_is_not_installed_is_refused():
    config = tiny_config()
    config.transformer_impl = "transformer_engine"
    with pytest.raises(ConfigError, match=r"needs Transformer Engine.*extra 'te'.*local"):
        check_supported(config)
