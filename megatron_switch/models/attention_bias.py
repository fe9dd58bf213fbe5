"""Relative attention bias as in T5, in a core attention that needs no Transformer Engine.

A stack has one table of biases, a number for each bucket of distances and each head, and all its
layers add the same bias to their scores. :class:`RelativeAttentionBias` holds the table under
Megatron's name and with Megatron's buckets, which are those of Hugging Face; what differs is that a
tensor-parallel rank makes the bias of its own heads only. The table itself is whole on every rank,
and so is its gradient.

Bias and hidden keys become one tensor, made once and shared by the layers of a stack. It is passed
as the attention mask: Megatron's recomputation gives that to a recomputed layer as an argument, so
that a gradient comes back, whereas an ``attention_bias`` would be held by a closure, whose graph is
freed by the time the second layer needs it. :class:`BiasedDotProductAttention` adds it to the
scores.

Hidden keys get the lowest finite number, not minus infinity: a query that may see no key averages
over all of them, as in Hugging Face, and is never NaN.

Shape letters: S queries, K keys, B micro-batch, H heads on this rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_switch.models.core_attention import TorchDotProductAttention


class RelativeAttentionBias(RelativePositionEmbedding):  # type: ignore[misc]
    """The table of one stack.

    Args:
        config: Settings of the stack; the number of heads is read, and how to draw the table.
        bidirectional: Whether keys after a query have buckets of their own: an encoder's do.
        num_buckets: Buckets of distances.
        max_distance: Distance from which on all share the last bucket.
        tp_group: Ranks that share the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        bidirectional: bool,
        num_buckets: int,
        max_distance: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(
            bidirectional=bidirectional,
            init_method=config.init_method,
            num_attention_heads=config.num_attention_heads,
            relative_attention_num_buckets=num_buckets,
            relative_attention_max_distance=max_distance,
        )
        assert config.num_attention_heads % tp_group.size() == 0, "checked by the configuration"
        self._tp_group = tp_group
        self._num_heads = config.num_attention_heads // tp_group.size()

    def forward(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the bias of this rank's heads, shape [1, H, S, K]; both lengths are whole."""
        weight = copy_to_tensor_model_parallel_region(
            self.relative_attention_bias.weight, group=self._tp_group
        )
        query_S1 = torch.arange(num_queries, device=weight.device).unsqueeze(1)
        key_K = torch.arange(num_keys, device=weight.device)
        bucket_SK = self._relative_position_bucket(
            key_K - query_S1,
            bidirectional=self.bidirectional,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        # All buckets, but only the columns of this rank's heads.
        first = self._tp_group.rank() * self._num_heads
        bias_SKH = F.embedding(bucket_SK, weight[:, first : first + self._num_heads])
        return bias_SKH.permute(2, 0, 1).unsqueeze(0)


def hide_keys(bias: Tensor, hidden: Tensor | None) -> Tensor:
    """Return a bias that also hides keys.

    Args:
        bias: Shape [1, H, S, K].
        hidden: True hides a key, broadcastable to [B, H, S, K]; None hides none.

    Returns:
        Broadcast shape, dtype of the bias.
    """
    if hidden is None:
        return bias
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


def later_keys(length: int, device: torch.device) -> Tensor:
    """Return which keys come after each query: bool, shape [S, S]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


class BiasedDotProductAttention(TorchDotProductAttention):
    """Core attention whose mask may be a bias."""

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

        Arguments, result and errors are those of :class:`TorchDotProductAttention`, except that a
        floating-point ``attention_mask`` is added to the scores.
        """
        if attention_mask is not None and attention_mask.is_floating_point():
            assert attention_bias is None, "one of the two is the bias"
            attention_mask, attention_bias = None, attention_mask
        return super().forward(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )
