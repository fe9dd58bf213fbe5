"""Switch-T5: Megatron's ``T5Model`` with experts in both stacks, and T5's own arithmetic.

What 0.19.2 lacks and this class adds (parameter names stay Megatron's, so that checkpoints move):

    * scores are not divided by sqrt(channels) (``softmax_scale`` 1.0); instead the weights of the
      query projections start smaller by that factor;
    * relative attention bias without Transformer Engine, one table a stack;
    * the head: where it is the embedding, its input is multiplied by width^-0.5 and it has no bias;
    * padding masks: hidden as keys of the encoder, and passed to the routers, where padding takes
      no expert's slot and counts in no loss;
    * process groups of experts, which upstream's default leaves out;
    * layers are numbered through: the decoder's follow the encoder's. Statistics, noise and initial
      weights of sparse layers go by these numbers, so the two stacks never share any.

Guaranteed: with the weights of Hugging Face's ``SwitchTransformersForConditionalGeneration`` it
computes the same function, in float32 to 1e-5.

Refused: pipeline and context parallelism.

Shape letters: B sequences, S positions (of the encoder or of the decoder), D model, V vocabulary.

Sources:
    Raffel et al., arXiv:1910.10683; Switch Transformer, arXiv:2101.03961.
"""

from typing import Any

import torch
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_model import t5_position_ids
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_switch.models.attention_bias import RelativeAttentionBias, hide_keys, later_keys
from megatron_switch.models.gpt import MlpBuilder
from megatron_switch.models.t5_layers import t5_block_spec


class SwitchT5Model(T5Model):  # type: ignore[misc]
    """Encoder and decoder with Switch layers.

    Args:
        encoder_config: Settings of the encoder.
        decoder_config: Settings of the decoder; they differ in depth and sparse layers only.
        encoder_mlp_spec: Builder of the encoder's sparse MLPs.
        decoder_mlp_spec: Builder of the decoder's, which numbers layers behind the encoder's.
        vocab_size: Rows of the embedding.
        max_sequence_length: Most positions of a sequence; there is no table of that size.
        tied_head: Whether the head is the embedding.
        num_buckets: Buckets of the relative attention bias.
        max_distance: Distance from which on all share the last bucket.
        parallel_output: Whether logits stay split over tensor-parallel ranks.
        pg_collection: Process groups, those of experts included.

    Raises:
        ConfigError: If the settings ask for what a T5 does not have.
    """

    def __init__(
        self,
        *,
        encoder_config: TransformerConfig,
        decoder_config: TransformerConfig,
        encoder_mlp_spec: MlpBuilder,
        decoder_mlp_spec: MlpBuilder,
        vocab_size: int,
        max_sequence_length: int,
        tied_head: bool,
        num_buckets: int = 32,
        max_distance: int = 128,
        parallel_output: bool = True,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        for config in (encoder_config, decoder_config):
            config.softmax_scale = 1.0
        super().__init__(
            config=decoder_config,
            encoder_config=encoder_config,
            transformer_encoder_layer_spec=t5_block_spec(
                encoder_config, decoder=False, switch_mlp_spec=encoder_mlp_spec
            ),
            transformer_decoder_layer_spec=t5_block_spec(
                decoder_config, decoder=True, switch_mlp_spec=decoder_mlp_spec
            ),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=tied_head,
            # Not "relative": upstream's own tables would be drawn only to be replaced.
            position_embedding_type="none",
            pg_collection=pg_collection,
        )
        for name, config in (("encoder", encoder_config), ("decoder", decoder_config)):
            table = RelativeAttentionBias(
                config,
                bidirectional=name == "encoder",
                num_buckets=num_buckets,
                max_distance=max_distance,
                tp_group=pg_collection.tp,
            )
            self.add_module(f"{name}_relative_pos_emb", table)
        if self.output_layer.bias is not None:  # upstream ties the bias to the tied head
            del self.output_layer.bias
            self.output_layer.register_parameter("bias", None)
        if decoder_config.perform_initialization:
            self._shrink_queries()

    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor,
        *,
        encoder_padding: Tensor | None = None,
        decoder_padding: Tensor | None = None,
        lm_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **absent: Any,
    ) -> Tensor:
        """Return losses, or logits where there are no labels.

        Args:
            encoder_input_ids: int64, shape (B, S of the encoder); None where what was encoded is
                given.
            decoder_input_ids: The target moved one place to the right, behind the start token:
                int64, shape (B, S of the decoder).
            encoder_padding: True for padding, bool, shape of the encoder's tokens.
            decoder_padding: Likewise for the decoder, where padding is on the right: causality
                hides it from every token, so that it is kept from experts only.
            lm_labels: The target, int64, shape of the decoder's tokens.
            encoder_hidden_states: What :meth:`encode` returned for the same padding.
            **absent: Megatron's other arguments, for masks of other kinds and for its inference
                engine; none may have a value.

        Returns:
            Cross-entropy of each label, float32, shape (B, S of the decoder); or logits, shape
            (B, S of the decoder, V), this rank's part of V with ``parallel_output``.
        """
        assert not any(value is not None for value in absent.values()), absent
        encoded = encoder_hidden_states
        if encoded is None:
            assert encoder_input_ids is not None, "either tokens or what was encoded"
            encoded = self.encode(encoder_input_ids, encoder_padding)
        hidden = self._decode(decoder_input_ids, decoder_padding, encoded, encoder_padding)
        weight = None
        if self.share_embeddings_and_output_weights:
            hidden = hidden * self.config.hidden_size**-0.5
            weight = self.shared_embedding_or_output_weight()
        logits: Tensor = self.lm_head(hidden, word_embeddings_weight=weight)
        if lm_labels is None:
            return logits.transpose(0, 1).contiguous()
        loss_BS: Tensor = self.compute_language_model_loss(lm_labels, logits)
        return loss_BS

    def encode(self, tokens_BS: Tensor, padding_BS: Tensor | None = None) -> Tensor:
        """Return the encoder's output for this rank's positions, shape (S, B, D)."""
        embedded = self.embedding(input_ids=tokens_BS, position_ids=t5_position_ids(tokens_BS))
        length = tokens_BS.size(1)
        bias = self.encoder_relative_pos_emb(length, length)
        encoded: Tensor = self.encoder(
            hidden_states=embedded,
            attention_mask=hide_keys(bias, _as_hidden_keys(padding_BS)),
            padding_mask=self._of_this_rank(padding_BS),
        )
        return encoded

    def _decode(
        self,
        tokens_BS: Tensor,
        padding_BS: Tensor | None,
        encoded: Tensor,
        encoder_padding_BS: Tensor | None,
    ) -> Tensor:
        embedded = self.embedding(input_ids=tokens_BS, position_ids=t5_position_ids(tokens_BS))
        length = tokens_BS.size(1)
        bias = self.decoder_relative_pos_emb(length, length)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=hide_keys(bias, later_keys(length, bias.device)),
            context=encoded,
            context_mask=_as_hidden_keys(encoder_padding_BS),
            padding_mask=self._of_this_rank(padding_BS),
        )
        return hidden

    def _of_this_rank(self, padding_BS: Tensor | None) -> Tensor | None:
        """Return the part of a padding mask that belongs to this rank's positions."""
        if padding_BS is None or not self.config.sequence_parallel:
            return padding_BS
        padding_SB = padding_BS.transpose(0, 1).contiguous()
        mine_SB: Tensor = scatter_to_sequence_parallel_region(padding_SB, group=self.tp_group)
        return mine_SB.transpose(0, 1).contiguous()

    @torch.no_grad()
    def _shrink_queries(self) -> None:
        """Divide the query projections' initial weights by sqrt(channels), as T5 does.

        Raffel et al. leave the scores unscaled and put the factor into the initial weights.
        """
        channels = self.config.kv_channels
        for layer in (*self.encoder.layers, *self.decoder.layers):
            weight = layer.self_attention.linear_qkv.weight  # rows: head, then q, k, v
            weight.view(-1, 3, channels, weight.size(1))[:, 0].mul_(channels**-0.5)
        for layer in self.decoder.layers:
            layer.cross_attention.linear_q.weight.mul_(channels**-0.5)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take what another pipeline stage sent: there is none, so nothing."""


def _as_hidden_keys(padding_BS: Tensor | None) -> Tensor | None:
    """Return a padding mask in the shape of an attention mask: [B, 1, 1, K]."""
    return None if padding_BS is None else padding_BS[:, None, None, :]
