"""The Switch layer as a Megatron module: route, dispatch, compute, combine.

:class:`SwitchMLP` is a ``MoELayer``, because Megatron checks with ``isinstance`` in several places
(recompute, transformer layer, checkpoints). It overrides what a Switch layer does differently: the
router returns indices instead of maps, and the dispatcher is ours, so ``forward`` is ours too.
Weights are drawn when the layer's number is known, which is right after construction, from a
counter keyed by seed, layer and global expert index: the same in every layout.

Shape letters:

    S  positions of a sequence on this rank    B  sequences in the micro-batch    D  model
"""

import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules, te_checkpoint
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.moe.cuda_graph_rules import check_cuda_graphs
from megatron_switch.moe.dispatcher import Dispatcher, PaddedDispatcher, build_dispatcher
from megatron_switch.moe.experts import build_experts
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.moe.routing import RoutedTokens


def switch_mlp_spec(
    switch: SwitchConfig, *, seed: int, layers_before: int = 0
) -> functools.partial[Any]:
    """Return a builder for ``submodules.mlp`` of a transformer layer spec.

    Args:
        switch: Switch settings, with dispatch mode resolved.
        seed: Seed of the initial weights.
        layers_before: Layers of the model in front of the stack that the layer belongs to.

    Returns:
        Callable with the keyword arguments of Megatron's ``MlpBuilder`` protocol; it makes a
        :class:`SwitchMLP`.
    """
    submodules = MoESubmodules(
        experts=functools.partial(build_experts, switch=switch),
        router=functools.partial(SwitchRouter, switch=switch),
    )
    return functools.partial(
        SwitchMLP, submodules=submodules, switch=switch, seed=seed, layers_before=layers_before
    )


class SwitchMLP(MoELayer):  # type: ignore[misc]
    """Mixture of experts with top-1 routing and limited capacity.

    Args:
        config: Megatron's transformer configuration.
        submodules: Builders of router and experts, from :func:`switch_mlp_spec`.
        layer_number: 1-based number of the layer in its stack, if known already.
        pg_collection: Process groups.
        is_mtp_layer: Whether the layer belongs to multi-token prediction; refused.
        name: Name of the module in the model.
        switch: Switch settings, with device and dispatch mode resolved.
        seed: Seed of the initial weights.
        layers_before: Layers of the model in front of its stack, which are numbered first: those of
            the encoder for a decoder's layer.
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
        layers_before: int = 0,
    ) -> None:
        _refuse_unsupported(config, switch, is_mtp_layer)
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
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
        self._layers_before = layers_before
        self.token_dispatcher: Dispatcher = build_dispatcher(config, switch, pg_collection)
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number in the whole model, from that in its stack, and draw weights."""
        super().set_layer_number(self._layers_before + layer_number)
        if self.config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw router and expert weights, keyed by this layer's number."""
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
            hidden_states: This rank's tokens, shape (S, B, D).
            intermediate_tensors: Must be None: partial execution belongs to schedules that are
                refused with Switch.
            padding_mask: True for padding, shape (B, S), bool; None without padding.

        Returns:
            Expert outputs of shape (S, B, D), exactly zero for dropped tokens and padding, and None
            for the bias.

        Raises:
            ConfigError: If tensor ranks hold the same tokens, or the mask does not fit them.
            OutOfMemoryError: With sizes, and the flags that reduce them.
        """
        assert intermediate_tensors is None, "refused: --overlap-moe-expert-parallel-comm"
        if self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ConfigError(
                f"With --tensor-model-parallel-size {self.attn_tp_group.size()} every tensor rank "
                "would route the same tokens. Add --sequence-parallel."
            )
        if not (self.moe_layer_recompute and self.training):
            return self._routed_forward(hidden_states, padding_mask), None
        # For fp8 and fp4 Transformer Engine must know that a second forward pass is a recompute.
        engine = self.config.fp8 or self.config.fp4
        states = (tensor_parallel.random.get_cuda_rng_tracker, self.tp_group) if engine else ()
        checkpoint = te_checkpoint if engine else tensor_parallel.checkpoint
        output: Tensor = checkpoint(
            self._routed_forward, False, *states, hidden_states, padding_mask
        )
        return output, None

    def _routed_forward(self, hidden_SBD: Tensor, padding_BS: Tensor | None) -> Tensor:
        x_BSD = hidden_SBD.transpose(0, 1).contiguous()
        try:
            routed: RoutedTokens = self.router(x_BSD, padding_BS)[0]
            y_TD = self.token_dispatcher.run(x_BSD.flatten(0, 1), routed, self.experts)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise torch.OutOfMemoryError(self._memory_advice(x_BSD)) from error
        return y_TD.view_as(x_BSD).transpose(0, 1).contiguous()

    def _memory_advice(self, x_BSD: Tensor) -> str:
        """Return sizes of the layer's largest buffers, and the flags that reduce them."""
        num_sequences, length, width = x_BSD.shape
        num_tokens, num_experts = num_sequences * length, self.config.num_moe_experts
        capacity = self.router.capacity_of(num_sequences, length)
        rows = self._most_rows(num_tokens, self.router.groups.count(num_sequences), capacity)
        row_bytes = width * x_BSD.element_size()
        factor = (
            "--moe-expert-capacity-factor" if self.training else "--switch-eval-capacity-factor"
        )
        if self.switch.capacity is not None:
            factor = "--switch-capacity"
        return (
            f"Out of memory in Switch layer {self.layer_number}: T = {num_tokens} tokens on this "
            f"rank, E = {num_experts} experts, C = {capacity} slots per expert and capacity group. "
            f"This rank's experts take up to {rows} rows of {row_bytes} bytes, "
            f"{rows * row_bytes / 2**20:.1f} MiB, in several copies; the router's "
            f"probabilities take {4 * num_tokens * num_experts / 2**20:.1f} MiB. Lower "
            f"--micro-batch-size or {factor}, raise --expert-model-parallel-size, or recompute "
            "with --recompute-granularity selective --recompute-modules moe."
        )

    def _most_rows(self, num_tokens: int, num_groups: int, capacity: int) -> int:
        """Return how many rows this rank's experts can be sent.

        Args:
            num_tokens: Tokens of a rank.
            num_groups: Capacity groups of a micro-batch.
            capacity: Slots per expert and capacity group.
        """
        grid = self.token_dispatcher.grid
        groups = grid.local_experts * num_groups
        shards: int = self.router.tp_cp_group.size()
        if isinstance(self.token_dispatcher, PaddedDispatcher):  # sent, filled or not
            return grid.peers * groups * -(-capacity // shards)
        micro_batches = 1 if self.switch.capacity_group == "ep" else -(-grid.peers // shards)
        return min(grid.peers * num_tokens, micro_batches * groups * capacity)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out: on a GPU a class says so, on the CPU only the message."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _refuse_unsupported(
    config: TransformerConfig, switch: SwitchConfig, is_mtp_layer: bool
) -> None:
    if is_mtp_layer:
        raise ConfigError(
            "Switch layers do not take part in multi-token prediction. Leave --mtp-num-layers out."
        )
    if config.cuda_graph_impl != "none":
        check_cuda_graphs(config, switch)
