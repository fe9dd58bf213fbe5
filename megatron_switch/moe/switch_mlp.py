"""The Switch layer as Megatron sees it: a mixture of experts that routes, exchanges and combines.

:class:`SwitchMLP` is a ``MoELayer``, because Megatron asks with ``isinstance`` in several places
(recompute, transformer layer, checkpoints), and takes over what a Switch layer does differently:
the router returns indices instead of maps, and dispatch is ours, so ``forward`` is ours too.
Weights are drawn when the layer's number is known, which is right after construction, from
generators keyed by seed, layer and global expert index: the same in every layout.

Shape letters:

    S  positions of a sequence on this rank    B  sequences in the micro-batch    D  model
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.moe.dispatcher import PackedDispatcher, PaddedDispatcher
from megatron_switch.moe.routed import RoutedTokens


class SwitchMLP(MoELayer):  # type: ignore[misc]
    """Mixture of experts with top-1 routing and limited capacity.

    Args:
        config: Megatron's transformer configuration.
        submodules: Builders of router and experts, from :mod:`megatron_switch.moe.spec`.
        layer_number: 1-based number of the layer in the whole model, if known already.
        pg_collection: Process groups.
        is_mtp_layer: Whether the layer belongs to multi-token prediction; refused.
        name: Name of the module in the model.
        switch: Switch settings, with device and dispatch mode resolved.
        seed: Seed of the initial weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        switch: SwitchConfig,
        seed: int,
    ) -> None:
        if is_mtp_layer:
            raise ConfigError(
                "Switch layers do not take part in multi-token prediction. Leave "
                "--mtp-num-layers out."
            )
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            pg_collection=pg_collection,
            is_mtp_layer=is_mtp_layer,
            name=name,
        )
        self.switch = switch
        self._seed = seed
        padded = switch.dispatch == "padded"
        self.token_dispatcher = (PaddedDispatcher if padded else PackedDispatcher)(
            config, pg_collection, overlap_chunks=switch.overlap_chunks
        )
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """Take the layer's number in the whole model, and draw the initial weights under it."""
        super().set_layer_number(layer_number)
        if self.config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw router and expert weights from generators that name this layer."""
        scale = self.switch.init_scale_value()
        draw = {"seed": self._seed, "layer_number": self.layer_number, "init_scale": scale}
        self.router.reset_switch_parameters(**draw)
        self.experts.reset_parameters(**draw)

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Route tokens to experts and add up what comes back.

        Args:
            hidden_states: Shape (S, B, D).
            intermediate_tensors: Must be None: partial execution belongs to schedules that are
                refused with Switch.
            padding_mask: True for padding, shape (B, S), bool; None without padding.

        Returns:
            Expert outputs of shape (S, B, D), exactly zero for dropped tokens and padding, and None
            in the place of a bias.
        """
        assert intermediate_tensors is None, "refused: --overlap-moe-expert-parallel-comm"
        if self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ConfigError(
                f"With --tensor-model-parallel-size {self.attn_tp_group.size()} every tensor rank "
                "would route the same tokens. Add --sequence-parallel."
            )
        if self.moe_layer_recompute and self.training:
            output: Tensor = tensor_parallel.checkpoint(
                self._routed_forward, False, hidden_states, padding_mask
            )
        else:
            output = self._routed_forward(hidden_states, padding_mask)
        return output, None

    def _routed_forward(self, hidden_SBD: Tensor, padding_BS: Tensor | None) -> Tensor:
        x_BSD = hidden_SBD.transpose(0, 1).contiguous()
        x_TD = x_BSD.flatten(0, 1)
        routed: RoutedTokens = self.router(x_BSD, padding_BS)
        try:
            y_TD: Tensor = self.token_dispatcher.run(x_TD, routed, self.experts)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._memory_advice(x_TD, routed)) from error
        return y_TD.view_as(x_BSD).transpose(0, 1).contiguous()

    def _memory_advice(self, x_TD: Tensor, routed: RoutedTokens) -> str:
        """Say what the exchange needs and which flags shrink it."""
        num_tokens, width = x_TD.shape
        slots = routed.num_groups * routed.capacity * self.config.num_moe_experts
        mebibytes = slots * width * x_TD.element_size() / 2**20
        return (
            f"Out of memory in Switch layer {self.layer_number}: T = {num_tokens} tokens on this "
            f"rank, E = {self.config.num_moe_experts} experts, C = {routed.capacity} slots each "
            f"in {routed.num_groups} groups; {slots} slots of {width} elements are "
            f"{mebibytes:.0f} MiB a buffer, of which an exchange holds several. Lower "
            "--micro-batch-size or --moe-expert-capacity-factor, raise "
            "--expert-model-parallel-size, or recompute with --recompute-granularity selective "
            "--recompute-modules moe."
        )
