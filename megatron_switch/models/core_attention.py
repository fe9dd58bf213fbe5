"""Core attention through ``torch.nn.functional.scaled_dot_product_attention``.

Megatron's own ``DotProductAttention`` stores the scores and the probabilities of every head,
two tensors of shape [B, H, S, K]. torch's fused kernels store neither, on CPU and on CUDA, so
memory grows with S and not with S squared. This class has the same constructor and the same
``forward`` and computes the same function, to rounding.

Guaranteed:
    * Plain causal training builds no [S, K] tensor of any kind.
    * Given masks, sliding windows (``window_size``), an additive bias, grouped-query heads
      and attention dropout compose freely.
    * Under a causal layer a query never sees a later key. With fewer queries than keys the
      queries are the last ones (a KV cache), and a given mask can hide more but reveal nothing.
    * Dropout draws from the same stream of Megatron's generator tracker as the original,
      so recomputation repeats it.

Intended differences:
    * The softmax is always computed in float32, whatever ``attention_softmax_in_fp32`` says,
      and the scale is applied to float32 scores. ``apply_query_key_layer_scaling``, which divides
      by the layer number and multiplies again to keep float16 in range, therefore has no effect.
    * A query that may see no key at all gets zeros; the original fills hidden scores with
      -10000 and so averages over hidden keys.

Refused: context parallelism, packed sequences, softmax sinks, and reading the largest logit
back (QK clipping), all of which need Transformer Engine's kernels.

Shape letters: S queries, K keys, B micro-batch, H query heads and G key heads on this rank
(G divides H), N channels of a head.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from megatron_switch.errors import ConfigError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class TorchDotProductAttention(nn.Module):
    """Softmax attention with Megatron's interface and torch's fused kernels."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Keep the settings; there are no parameters.

        Args:
            config: Model settings.
            layer_number: Number of the layer, from 1; decides whether it has the window.
            attn_mask_type: What a query may see when ``forward`` does not say.
            attention_type: ``self`` or ``cross``; the arithmetic is the same.
            attention_dropout: Dropout probability; None takes the configuration's.
            softmax_scale: Factor on the scores; None is 1 / sqrt(channels of a head).
            cp_comm_type: Part of the interface; only context parallelism has a use for it.
            pg_collection: Part of the interface; heads are counted from the tensors.

        Raises:
            ConfigError: If the settings ask for what these kernels cannot do.
        """
        super().__init__()
        check_attention(config)
        self.config = config
        self.attn_mask_type = attn_mask_type
        default_scale = 1.0 / math.sqrt(config.kv_channels)
        self.softmax_scale = default_scale if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: tuple[int, int] | None = tuple(config.window_size) if has_window else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the attended values.

        Args:
            query: Shape [S, B, H, N].
            key: Shape [K, B, G, N].
            value: Shape [K, B, G, N].
            attention_mask: True hides a key, broadcastable to [B, H, S, K]; None hides none
                but those that ``attn_mask_type`` hides.
            attn_mask_type: Overrides the layer's mask type, except that ``no_mask`` does not
                lift causality: Megatron passes it while decoding with a KV cache, where it is
                right for one query at a time only.
            attention_bias: Added to the scaled scores, broadcastable to [B, H, S, K].
            packed_seq_params: Must be None.

        Returns:
            Shape [S, B, H * N].

        Raises:
            ConfigError: If the batch holds packed sequences.
        """
        if packed_seq_params is not None:
            raise ConfigError(
                "Sequences packed into one row need Transformer Engine's attention. Use "
                "--transformer-impl transformer_engine, or train without --sft and "
                "--dataloader-inter-document-masking (--reset-attention-mask separates "
                "documents here)."
            )
        causal = self._is_causal(attn_mask_type)
        unmasked = attention_mask is None and attention_bias is None and self.window is None
        # torch aligns is_causal to the first key, so it is only right for a square.
        plain = causal and unmasked and query.size(0) == key.size(0)
        mask = None
        if not plain:
            visible = visible_keys(
                query.size(0),
                key.size(0),
                causal=causal,
                window=self.window,
                attention_mask=attention_mask,
                device=query.device,
            )
            mask = _with_bias(visible, attention_bias, query.dtype)
        return self._attend(query, key, value, mask, is_causal=plain)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
    ) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        heads_per_group = query.size(1) // key.size(1)
        grouped = heads_per_group > 1 and _kernel_groups_heads(
            SDPAParams(query, key, value, mask, dropout, is_causal, True)
        )
        if heads_per_group > 1 and not grouped:
            key, value = (x.repeat_interleave(heads_per_group, dim=1) for x in (key, value))
        with self._dropout_stream():
            context = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _is_causal(self, attn_mask_type: AttnMaskType | None) -> bool:
        if attn_mask_type is None or attn_mask_type is AttnMaskType.no_mask:
            attn_mask_type = self.attn_mask_type
        return attn_mask_type in _CAUSAL

    def _dropout_stream(self) -> AbstractContextManager[None]:
        # As the original: heads differ between tensor-parallel ranks, so does the dropout;
        # with sequence parallelism Megatron leaves the default stream in place.
        if not self.training or self.dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        stream: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return stream


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    attention_mask: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Return which keys each query may see; the last query is aligned with the last key.

    Args:
        num_queries: Number of queries, S.
        num_keys: Number of keys, K.
        causal: Whether keys after the query are hidden.
        window: How many keys before and after the query are visible; a negative number means
            all of them. None is (-1, -1).
        attention_mask: True hides a key, broadcastable to [B, H, S, K].
        device: Where to put the result.

    Returns:
        True where visible, shape [S, K] or broadcast with ``attention_mask``; None if every
        query sees every key.
    """
    left, right = window or (-1, -1)
    if causal and num_queries > 1:
        right = 0
    visible = None
    if left >= 0 or right >= 0:
        offset = num_keys - num_queries
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        if right >= 0:
            visible = visible.tril(offset + right)
        if left >= 0:
            visible = visible.triu(offset - left)
    if attention_mask is not None:
        seen = attention_mask.logical_not()
        visible = seen if visible is None else visible & seen
    return visible


def _with_bias(
    visible: Tensor | None, attention_bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    if attention_bias is None:
        return visible
    bias = attention_bias.to(dtype)
    return bias if visible is None else bias.masked_fill(~visible, -math.inf)


def _kernel_groups_heads(params: SDPAParams) -> bool:
    """Return whether a kernel with memory linear in S takes fewer key heads than query heads.

    Only CUDA's flash kernel does: half precision, no mask, a recent enough GPU. Asked to group
    heads in any other case, torch falls back to the kernel that stores [B, H, S, K].
    """
    return params.query.is_cuda and can_use_flash_attention(params)


def check_attention(config: TransformerConfig) -> None:
    """Refuse what torch's attention kernels cannot do.

    Args:
        config: Model settings.

    Raises:
        ConfigError: With the first such setting.
    """
    refused = {
        f"--context-parallel-size {config.context_parallel_size}": config.context_parallel_size > 1,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
        "--qk-clip": config.qk_clip,
        "--log-max-attention-logit": config.log_max_attention_logit,
        "fp8_dot_product_attention": config.fp8_dot_product_attention,
        "fp8_multi_head_attention": config.fp8_multi_head_attention,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"torch's attention kernels have no equivalent of {setting}. Leave it at its "
                "default, or use --transformer-impl transformer_engine."
            )
