"""The layer specs of a Switch-T5's two stacks, from Megatron's own T5 specs.

Megatron's specs are dense and lack half of T5. Replaced are, in every layer,

    * the core attention: :mod:`megatron_switch.models.attention_bias`, with or without Transformer
      Engine. Both stacks use mask type ``arbitrary``: what a query may see is in the bias;
    * the dense MLP: with dropout between activation and second matrix;
    * on sparse layers, the MLP: ``switch_mlp_spec``, and one checkpoint key, as in
      :mod:`megatron_switch.models.gpt`;
    * without Transformer Engine, the norms, which upstream takes from Apex or refuses under
      sequence parallelism;

and after the last layer the norm, which upstream's local spec does not have, followed by dropout.

Parameter names stay Megatron's.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from megatron.core.models.T5 import t5_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_switch.architecture.layer_pattern import sparse_layers
from megatron_switch.errors import ConfigError
from megatron_switch.models.attention_bias import BiasedDotProductAttention
from megatron_switch.models.core_attention import check_attention
from megatron_switch.models.gpt import MlpBuilder, check_supported
from megatron_switch.models.norms import RMSNorm

_MLP_NORM_KEY = "pre_mlp_layernorm."


class T5MLP(MLP):  # type: ignore[misc]
    """Megatron's MLP without biases, with T5's dropout on the hidden activation."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the layer's output and None in the place of a bias.

        Args:
            hidden_states: This rank's tokens, shape (S, B, D).
            per_token_scale: Must be None; it belongs to experts.
        """
        assert per_token_scale is None, "a dense layer scales no token"
        hidden, _ = self.linear_fc1(hidden_states)
        if self.config.gated_linear_unit:
            gate, linear = hidden.chunk(2, dim=-1)
            hidden = self.config.activation_func(gate) * linear
        else:
            hidden = self.config.activation_func(hidden)
        # Tensor-parallel ranks hold different columns, so they draw from their own streams.
        if self.training and self.config.hidden_dropout:
            with _rank_stream(self.config, inside_a_block=True):
                hidden = F.dropout(hidden, self.config.hidden_dropout)
        output, _ = self.linear_fc2(hidden)
        return output, None


class FinalNorm(RMSNorm):
    """The norm after the last layer of a stack, with T5's dropout behind it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        """Build the norm; arguments and errors are those of ``RMSNorm``."""
        super().__init__(config, hidden_size, eps=eps)
        self._config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised tokens, same shape."""
        hidden = super().forward(hidden)
        if not (self.training and self._config.hidden_dropout):
            return hidden
        # With sequence parallelism ranks hold different tokens, otherwise the same ones.
        with _rank_stream(self._config, inside_a_block=False):
            return F.dropout(hidden, self._config.hidden_dropout)


def _rank_stream(
    config: TransformerConfig, *, inside_a_block: bool
) -> AbstractContextManager[None]:
    """Return the random stream of this tensor-parallel rank, or the one that ranks share.

    With sequence parallelism Megatron's block runs its layers in the rank's stream already; the
    final norm comes after that.
    """
    if config.sequence_parallel == inside_a_block:
        return nullcontext()
    stream: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return stream


def t5_block_spec(
    config: TransformerConfig, *, decoder: bool, switch_mlp_spec: MlpBuilder
) -> TransformerBlockSubmodules:
    """Return the layers of a stack and the norm after them.

    Args:
        config: Settings of this stack; ``num_layers`` and ``moe_layer_freq`` are its own.
        decoder: Whether the stack is the decoder.
        switch_mlp_spec: Builder of the sparse layers' MLP.

    Raises:
        ConfigError: If the settings ask for what a T5 does not have.
    """
    check_t5_supported(config)
    sparse: tuple[int, ...] = ()
    if config.num_moe_experts is not None:
        sparse = sparse_layers(config.moe_layer_freq, config.num_layers)
    layers = [
        _layer(config, decoder, switch_mlp_spec if layer in sparse else None)
        for layer in range(config.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=FinalNorm)


def check_t5_supported(config: TransformerConfig) -> None:
    """Refuse the model parts that a T5 does not have, or that this package's has not.

    Raises:
        ConfigError: With the flag of the first such part.
    """
    refused = {
        f"--normalization {config.normalization} (T5 has RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "biases in linear layers (add --disable-bias-linear)": config.add_bias_linear,
        "--add-qkv-bias": config.add_qkv_bias,
        "--group-query-attention": config.num_query_groups != config.num_attention_heads,
        "--multi-latent-attention": config.multi_latent_attention,
        "--qk-layernorm": config.qk_layernorm,
        "--qk-l2-norm": config.qk_l2_norm,
        "--window-size": config.window_size is not None,
        "--mtp-num-layers": config.mtp_num_layers is not None,
        "--use-kitchen": config.use_kitchen,
        f"--attention-backend {config.attention_backend.name} (its attention is torch's)": (
            config.attention_backend != AttnBackend.auto
        ),
        "--inference-fuse-tp-communication": config.inference_fuse_tp_communication,
        "--use-mup": config.use_mup,
    }
    for part, is_set in refused.items():
        if is_set:
            raise ConfigError(f"Switch-T5 does not support {part}. Leave it out.")
    if config.pipeline_model_parallel_size > 1:
        raise ConfigError(PIPELINE_REFUSAL.format(config.pipeline_model_parallel_size))
    check_attention(config)
    check_supported(config)


PIPELINE_REFUSAL = (
    "--switch-arch t5 has no pipeline parallelism, got --pipeline-model-parallel-size {}: every "
    "decoder layer needs the encoder's output, and Megatron's schedules pass one tensor from stage "
    "to stage. Share the model with --tensor-model-parallel-size and --expert-model-parallel-size."
)
"""Message of the refusal; takes the size."""


def _layer(config: TransformerConfig, decoder: bool, sparse_mlp: MlpBuilder | None) -> ModuleSpec:
    """Return one layer; every call makes a spec of its own."""
    engine = config.transformer_impl == "transformer_engine"
    layer: ModuleSpec = _STOCK[decoder, engine]()
    parts = layer.submodules
    key_map = dict(parts.sharded_state_dict_keys_map)
    changes: dict[str, Any] = {
        "self_attention": _biased(parts.self_attention),
        "mlp": functools.partial(T5MLP.as_mlp_submodule, **parts.mlp.keywords),
    }
    if decoder:
        changes["cross_attention"] = _biased(parts.cross_attention)
    if not engine:
        changes |= {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
        if decoder:
            changes["pre_cross_attn_layernorm"] = RMSNorm
    if sparse_mlp is not None:
        key_map.pop(_MLP_NORM_KEY, None)
        changes |= {"mlp": sparse_mlp, "pre_mlp_layernorm": RMSNorm}
    return replace(layer, submodules=replace(parts, **changes, sharded_state_dict_keys_map=key_map))


def _biased(attention: ModuleSpec) -> ModuleSpec:
    return replace(
        attention,
        params={**attention.params, "attn_mask_type": AttnMaskType.arbitrary},
        submodules=replace(attention.submodules, core_attention=BiasedDotProductAttention),
    )


_STOCK = {
    (False, False): t5_spec.encoder_model_with_local_spec,
    (False, True): t5_spec.encoder_model_with_transformer_engine_default_spec,
    (True, False): t5_spec.decoder_model_with_local_spec,
    (True, True): t5_spec.decoder_model_with_transformer_engine_default_spec,
}
"""Megatron's specs, by (is a decoder's, is Transformer Engine's)."""
