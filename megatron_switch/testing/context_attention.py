"""Causal attention over a context-parallel sequence, on any device.

Megatron's plain attention refuses context parallelism, and Transformer Engine's supports it in half
precision only. Layouts are compared in float32, on CPUs too, so this class all-gathers the keys and
values of the whole sequence for the local queries. It is for checking numbers, not for training:
every rank holds all keys.

Guaranteed: with one context-parallel rank, or any number, the values and gradients are those of
plain causal softmax attention on the undivided sequence.

Refused: given masks, biases, dropout, packed sequences and windows.

Shape letters: S positions on this rank, K positions of the whole sequence, B micro-batch, H query
heads and G key heads on this rank (G divides H), N channels of a head.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn import functional

from megatron_switch.moe.sequence_shards import SequenceShards


class ContextAttention(nn.Module):
    """Softmax attention with Megatron's interface, over all context-parallel ranks."""

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
            layer_number: Part of the interface.
            attn_mask_type: Must be causal.
            attention_type: Must be ``self``.
            attention_dropout: Must be 0, here or in the configuration.
            softmax_scale: Factor on the scores; None is 1 / sqrt(channels of a head).
            cp_comm_type: Part of the interface; there is one way here.
            pg_collection: Process groups; ``cp`` is read.
        """
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal, attn_mask_type
        assert attention_type == "self", attention_type
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, dropout
        assert config.window_size is None, config.window_size
        assert pg_collection is not None, "Megatron's layers pass their groups"
        self.config = config
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._ranks: dist.ProcessGroup = pg_collection.cp

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
            key: Shape [S, B, G, N].
            value: Shape [S, B, G, N].
            attention_mask: Must be None.
            attn_mask_type: Part of the interface.
            attention_bias: Must be None.
            packed_seq_params: Must be None.

        Returns:
            Shape [S, B, H * N].
        """
        assert (attention_mask, attention_bias, packed_seq_params) == (None, None, None)
        shards = SequenceShards.of(query.size(0), tensor_size=1, context_size=self._ranks.size())
        mine_S = shards.positions(self._ranks.rank()).to(query.device)
        theirs_K = torch.cat([shards.positions(rank) for rank in range(self._ranks.size())])
        visible_SK = mine_S.unsqueeze(1) >= theirs_K.to(query.device)
        heads_per_group = query.size(2) // key.size(2)
        key, value = (
            # Backward sums the gradients of all ranks' queries.
            gather_from_sequence_parallel_region(part, group=self._ranks).repeat_interleave(
                heads_per_group, dim=2
            )
            for part in (key, value)
        )
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible_SK, scale=self.softmax_scale
        )
        return context.permute(2, 0, 1, 3).flatten(2)
