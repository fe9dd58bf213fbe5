"""The Switch router: logits, routing over whole capacity groups, losses and statistics.

:class:`SwitchRouter` is the shell around the pure functions of this package. It decides how many
slots an expert has and over which tokens a loss is taken, and attaches the losses' gradients. It
builds no [tokens, experts] map and drops nothing itself: a token is dropped where its slot is not
below the capacity, and dispatch reads the comparison.

Decisions:

* Logits, softmax and argmax are float32 whatever the model's dtype (float64 in tests that
  need a reference); jitter multiplies the float32 router input, in training only; there is no bias.
* Rows are batch-major (all of sequence 0 first), as in Mesh-TensorFlow, whatever Megatron's
  [S, B] layout.
* Losses count tokens before any drop: over each sequence with capacity group ``sequence``, over
  the micro-batch otherwise. Each rank attaches its share; Megatron sums gradients over shards and
  averages them over data-parallel ranks and micro-batches. With the loss counted per token a
  micro-batch weighs as much as its tokens in the loss
  (:mod:`megatron_switch.moe.micro_batch_state`).
* Statistics are recorded once per micro-batch: in training where gradients are enabled, so that a
  recomputed layer records once, and in evaluation apart from training.
* Like Megatron's routers it returns a pair whose second item is the chosen experts, which
  ``--moe-routing-trace-path`` reads.

Shape letters:

    S  positions of a sequence on this rank    B  sequences in the micro-batch
    T  tokens on this rank, T = B * S          D  model
    E  experts                                 G  groups over which balance is measured
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_random_logits,
    router_gating_linear,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.moe import counter_rng
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.capacity_groups import CapacityGroups, Rows
from megatron_switch.moe.initialization import init_router_weight_
from megatron_switch.moe.losses import load_balancing_share, router_z_share
from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, statistics_row
from megatron_switch.moe.metrics.tracker import record_routing
from megatron_switch.moe.micro_batch_state import loss_tokens, step_key
from megatron_switch.moe.routing import (
    RoutedTokens,
    RouterProbabilities,
    SwitchRouting,
    router_probabilities,
)


class SwitchRouter(TopKRouter):  # type: ignore[misc]
    """Top-1 router with first-come capacity.

    Args:
        config: Megatron's transformer configuration.
        pg_collection: Process groups; tensor, context, tensor-and-context are read, and the ranks
            that share all experts.
        is_mtp_layer: Always False; multi-token prediction is refused with Switch.
        switch: Switch settings.

    Raises:
        LayoutError: If the ranks cannot form the capacity groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
        *,
        switch: SwitchConfig,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.switch = switch
        if self.bias is not None:  # Megatron makes one wherever linear layers have a bias
            del self.bias
            self.register_parameter("bias", None)
        self.groups = CapacityGroups(switch.capacity_group, pg_collection)

    def forward(
        self, x_BSD: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[RoutedTokens, Tensor]:
        """Route this rank's tokens.

        Args:
            x_BSD: Layer input after its norm, batch-major, shape (B, S, D).
            padding_mask: True for padding, shape (B, S), bool; None without padding.

        Returns:
            The routing, with slots counted over whole capacity groups, whose gates carry the
            gradients of the losses as well; and each token's expert, shape (T, 1), which Megatron's
            routing trace reads.

        Raises:
            ConfigError: If the padding mask is not as above.
        """
        rows = self.groups.rows(x_BSD, padding_mask)
        capacity = self.capacity_of(rows.num_sequences, rows.length)
        key_T = self._keys(rows) if self._draws_noise() else None
        logits_TE = self.gating(self._jittered(x_BSD.flatten(0, 1), key_T))
        if self.config.moe_router_force_load_balancing:
            logits_TE = apply_random_logits(logits_TE)
        scores = router_probabilities(logits_TE)
        routing, counts_GE = self.groups.route(
            scores.probs_TE, rows, capacity=capacity, order=self.switch.drop_order
        )
        if not self.training or torch.is_grad_enabled():
            routing = self._account(scores, routing, counts_GE, rows)
        routed = RoutedTokens(
            routing=routing,
            group_T=rows.group_T,
            num_groups=rows.num_groups,
            capacity=capacity,
            key_T=key_T if self.switch.expert_dropout else None,
        )
        return routed, routing.expert_T.unsqueeze(1)

    def reset_switch_parameters(
        self, *, seed: int, layer_number: int, init_scale: float | None
    ) -> None:
        """Draw the weight; the same in every layout.

        Args:
            seed: Seed of the run.
            layer_number: 1-based number of the layer in the whole model.
            init_scale: Scale of the truncated normal, or None for Megatron's ``init_method``.
        """
        init_router_weight_(
            self.weight,
            seed=seed,
            layer_number=layer_number,
            scale=init_scale,
            init_method=self.config.init_method,
        )

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of tokens, float32, shape (T, E), without jitter.

        Args:
            input: Tokens, shape (T, D) or (B, S, D), any floating dtype.
        """
        x_TD = input.reshape(-1, input.shape[-1])
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        if len(x_TD) == 0:  # Megatron's function cannot reshape an empty tensor
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))
        # Of one type: jitter makes float32 of the input, and Transformer Engine's product takes no
        # pair of types. Without jitter both stay 16 bits wide, and only the product is float32.
        weight_ED = self.weight.to(x_TD.dtype)
        logits_TE: Tensor = router_gating_linear(x_TD, weight_ED, None, dtype)
        return logits_TE

    def capacity_of(self, num_sequences: int, length: int) -> int:
        """Return the slots per expert and capacity group.

        Args:
            num_sequences: Sequences in the micro-batch.
            length: Positions of a sequence on this rank.
        """
        if self.switch.capacity is not None:
            return self.switch.capacity
        factor = self.switch.eval_capacity_factor
        if self.training:
            given = self.config.moe_expert_capacity_factor
            factor = -1.0 if given is None else given
        return self._capacity_at(self.groups.size(num_sequences, length), factor)

    def _capacity_at(self, num_tokens: int, factor: float) -> int:
        return expert_capacity(
            num_tokens,
            self.num_experts,
            factor,
            min_capacity=self.switch.min_capacity,
            rounding=self.switch.capacity_rounding,
        )

    def _keys(self, rows: Rows) -> Tensor:
        """Return the tokens' random keys: by index in the whole micro-batch, on any rank."""
        assert self.layer_number is not None, "noise is keyed by the layer's number"
        return counter_rng.token_keys(step_key(), self.layer_number, self.groups.positions(rows))

    def _jittered(self, x_TD: Tensor, key_T: Tensor | None) -> Tensor:
        jitter_eps = self.config.moe_input_jitter_eps
        if not (self.training and jitter_eps):
            return x_TD
        assert key_T is not None, "forward makes keys wherever there is noise"
        x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        return counter_rng.jitter(x_TD, key_T, jitter_eps)

    def _draws_noise(self) -> bool:
        noise = self.config.moe_input_jitter_eps or self.switch.expert_dropout
        return bool(self.training and noise)

    def _account(
        self, scores: RouterProbabilities, routing: SwitchRouting, counts_GE: Tensor, rows: Rows
    ) -> SwitchRouting:
        """Record statistics, and in training attach the losses' gradients to the gates."""
        num_tokens = counts_GE.sum()
        balance_share = load_balancing_share(
            scores.probs_TE,
            counts_GE,
            group_T=rows.group_T if rows.num_groups > 1 else None,
            padding_T=rows.padding_T,
        )
        z_share = router_z_share(
            scores.logsumexp_T, padding_T=rows.padding_T, num_tokens=num_tokens
        )
        if self.layer_number is not None:
            group_size = self.groups.size(rows.num_sequences, rows.length)
            row = statistics_row(
                routing,
                balance_share=balance_share,
                z_share=z_share,
                sweep_capacities=tuple(
                    self._capacity_at(group_size, f) for f in CAPACITY_FACTOR_SWEEP
                ),
                counts_micro_batch=self.tp_cp_group.rank() == 0,
            )
            record_routing(self.layer_number, row, training=self.training)
        if not self.training:
            return routing
        weight: Tensor | int = 1
        if self.calculate_per_token_loss:  # Megatron divides these gradients by tokens in the loss
            counted = loss_tokens()
            weight = num_tokens if counted is None else counted
        coefficients = (self.get_aux_loss_coeff("aux_loss"), self.config.moe_z_loss_coeff)
        for coefficient, share in zip(coefficients, (balance_share, z_share), strict=True):
            if coefficient:
                loss = coefficient * share * weight
                # Adds the loss's gradient in backward; the gates' values do not change.
                gate_T = MoEAuxLossAutoScaler.apply(routing.gate_T, loss)
                routing = replace(routing, gate_T=gate_T)
        return routing
