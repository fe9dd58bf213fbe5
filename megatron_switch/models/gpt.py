"""The layer specs of a Switch GPT: Megatron's own block, with a few parts replaced.

Megatron's builder takes a callable for ``GPTModelConfig.transformer_layer_spec``; give it

    functools.partial(switch_gpt_layer_spec, switch_mlp_spec=builder)

Everything here starts from the block spec that Megatron itself would build for this pipeline
stage, so rotary embeddings, gated units, grouped-query attention, tied embeddings and uneven
pipelines are Megatron's. Replaced are

    * on sparse layers, the MLP: ``switch_mlp_spec`` takes the place of Megatron's MoE layer;
    * in the local spec (no Transformer Engine), the norms, the final one and those on queries
      and keys included, and the core attention: see :mod:`megatron_switch.models.norms` and
      :mod:`megatron_switch.models.core_attention`;
    * in the local spec, one checkpoint key: Megatron stores the norm before an MLP as part of
      the MLP's first linear layer, where Transformer Engine fuses the two. It does so on
      sparse layers too, where Transformer Engine fuses nothing; without that entry a
      checkpoint moves between the two specs.

Upstream's sparse layers all share one spec object, and so do its dense ones. What is changed
here is copied first.
"""

import functools
from dataclasses import replace
from typing import Any, Protocol

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_switch.errors import ConfigError
from megatron_switch.models.core_attention import TorchDotProductAttention, check_attention
from megatron_switch.models.norms import check_norms, local_norm

_MLP_NORM_KEY = "pre_mlp_layernorm."
"""Entry of the local spec's key map that renames the norm before an MLP into the MLP."""


class ModelConfig(Protocol):
    """What this module reads of Megatron's ``GPTModelConfig``."""

    @property
    def transformer(self) -> TransformerConfig:
        """The transformer's settings."""
        ...


class MlpBuilder(Protocol):
    """What Megatron's transformer layer calls to build its MLP.

    The layer passes these four by name. It then calls ``set_layer_number`` (from 1, over all
    pipeline stages) where the module has it, and treats the module as sparse where it is an
    instance of Megatron's ``MoELayer``.
    """

    def __call__(
        self,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool,
        name: str | None = None,
    ) -> Any:
        """Return the module: ``forward(hidden_SBD, *, padding_mask) -> (output_SBD, bias)``."""
        ...


def switch_gpt_layer_spec(
    config: ModelConfig,
    *,
    switch_mlp_spec: MlpBuilder,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers that one pipeline stage builds, and the norm after the last layer.

    Without experts (``num_moe_experts`` is None) all layers are dense. With Transformer Engine
    and no experts the result is Megatron's own block, unchanged.

    Args:
        config: Megatron's model configuration.
        switch_mlp_spec: Builder of the sparse layers' MLP.
        vp_stage: Virtual pipeline stage, or None without interleaving.
        pp_rank: Pipeline stage; None takes this process's from Megatron's groups.

    Returns:
        One layer spec for each layer of the stage, in order.

    Raises:
        ConfigError: If the model has parts that this block cannot hold.
    """
    transformer = config.transformer
    check_supported(transformer)
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=transformer.transformer_impl == "transformer_engine",
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    layers = [_with_switch_mlp(layer, switch_mlp_spec) for layer in block.layer_specs]
    if transformer.transformer_impl != "local":
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm)
    return TransformerBlockSubmodules(
        layer_specs=[_with_torch_parts(layer, transformer) for layer in layers],
        layer_norm=local_norm(transformer),
    )


def check_supported(config: TransformerConfig) -> None:
    """Refuse the model parts that this package's GPT block cannot hold.

    Args:
        config: Megatron's transformer configuration.

    Raises:
        ConfigError: With the flag of the first such part.
    """
    if config.transformer_impl == "transformer_engine" and not HAVE_TE:
        raise ConfigError(
            "--transformer-impl transformer_engine needs Transformer Engine, which does not "
            "import here. Install it with the extra 'te' (pip install 'megatron-switch[te]'), or "
            "use --transformer-impl local."
        )
    local = config.transformer_impl == "local"
    sparse = config.num_moe_experts is not None
    backends = (AttnBackend.auto, AttnBackend.local)
    refused = {
        "--transformer-impl inference_optimized": config.transformer_impl == "inference_optimized",
        "--experimental-attention-variant": config.experimental_attention_variant is not None,
        "--heterogeneous-layers-config-path": config.heterogeneous_block_specs,
        "--mtp-num-layers with --num-experts": sparse and config.mtp_num_layers is not None,
        # Megatron's block spec takes neither for its dense layers; experts know the second.
        "--use-grouped-gemm-for-dense-mlp": config.use_grouped_gemm_for_dense_mlp,
        "--use-transformer-engine-op-fuser without --num-experts": (
            config.use_transformer_engine_op_fuser and not sparse
        ),
        "--multi-latent-attention with --transformer-impl local": (
            local and config.multi_latent_attention
        ),
        "--kitchen-config-file with --transformer-impl local": local and config.use_kitchen,
        f"--attention-backend {config.attention_backend.name} with --transformer-impl local": (
            local and config.attention_backend not in backends
        ),
    }
    for flags, is_set in refused.items():
        if is_set:
            raise ConfigError(f"The Switch GPT block does not support {flags}. Leave it out.")
    if local:
        check_norms(config)
    if local and config.attention_backend != AttnBackend.local:
        check_attention(config)


def is_sparse(layer: ModuleSpec) -> bool:
    """Return whether Megatron made ``layer`` a mixture of experts."""
    mlp = layer.submodules.mlp
    return isinstance(mlp, functools.partial) and mlp.func is MoELayer


def _with_switch_mlp(layer: ModuleSpec, switch_mlp_spec: MlpBuilder) -> ModuleSpec:
    if not is_sparse(layer):
        return layer
    parts = layer.submodules
    key_map = dict(parts.sharded_state_dict_keys_map)
    key_map.pop(_MLP_NORM_KEY, None)  # Transformer Engine's specs have no such entry.
    parts = replace(parts, mlp=switch_mlp_spec, sharded_state_dict_keys_map=key_map)
    return replace(layer, submodules=parts)


def _with_torch_parts(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Replace the norms and the core attention of a layer of the local spec."""
    norm = local_norm(config)
    # Asked for by name, Megatron's own attention stays.
    stock_attention = config.attention_backend == AttnBackend.local
    attention = layer.submodules.self_attention
    attention_parts = replace(
        attention.submodules,
        core_attention=DotProductAttention if stock_attention else TorchDotProductAttention,
        q_layernorm=_norm_or_kept(attention.submodules.q_layernorm, norm),
        k_layernorm=_norm_or_kept(attention.submodules.k_layernorm, norm),
    )
    parts = replace(
        layer.submodules,
        input_layernorm=norm,
        self_attention=replace(attention, submodules=attention_parts),
        pre_mlp_layernorm=norm,
    )
    return replace(layer, submodules=parts)


def _norm_or_kept(builder: Any, norm: Any) -> Any:
    """Return ``norm`` in place of Megatron's norm; norms without parameters stay."""
    return builder if builder in (None, IdentityOp, L2Norm) else norm
