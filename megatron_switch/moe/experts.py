"""The experts of a rank: feed-forward networks without biases, stacked in two parameters.

:class:`GroupedExperts` is plain torch and runs on any device. Where Transformer Engine is installed
and selected, :class:`TransformerEngineExperts` is Megatron's ``TEGroupedMLP``; both start from the
same weights and write the same checkpoints.

Guaranteed for both:

* Megatron's ``ExpertsInterface``. The gate scales the output: Megatron multiplies the hidden
  activation, before the second matrix; without biases that is the same.
* ``allreduce = False`` on every parameter in every layout, EP 1 included. Megatron then always
  builds the pair of optimizers (dense, experts), and checkpoints move between EP 1 and EP > 1.
* With expert-tensor parallelism a rank holds a slice of the hidden width and returns a partial sum;
  the dispatcher adds them up.
* Weights are drawn by :meth:`reset_parameters`, when the layer's number is known.

Shape letters:

    R  rows, ordered by expert    e  local experts    D  model
    F  hidden width of this rank's shard of an expert
"""

import copy
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import LayoutError
from megatron_switch.moe.counter_rng import dropout
from megatron_switch.moe.feed_forward import feed_forward
from megatron_switch.moe.initialization import init_expert_weight_
from megatron_switch.moe.sharded_state import ExpertShards, Offset


def build_experts(
    num_local_experts: int,
    config: TransformerConfig,
    *,
    pg_collection: ProcessGroupCollection,
    switch: SwitchConfig,
    name: str | None = None,
) -> "GroupedExperts | TransformerEngineExperts":
    """Return the experts of this rank, by device and installed packages.

    Transformer Engine's where ``--transformer-impl transformer_engine`` holds, it is installed and
    there is CUDA, except with expert dropout, which it lacks.

    Args:
        num_local_experts: Experts of this rank.
        config: Megatron's transformer configuration.
        pg_collection: Process groups; ``ep``, ``expt_tp`` and ``expt_dp`` are read.
        switch: Switch settings; expert dropout is read.
        name: Name of the module in the model.
    """
    if engine_has(config.transformer_impl, switch) and HAVE_TE and torch.cuda.is_available():
        return TransformerEngineExperts(
            num_local_experts, config, pg_collection=pg_collection, name=name
        )
    return GroupedExperts(
        num_local_experts, config, pg_collection=pg_collection, expert_dropout=switch.expert_dropout
    )


def engine_has(transformer_impl: str, switch: SwitchConfig) -> bool:
    """Return whether experts are Transformer Engine's, where it is installed: it has no dropout.

    Args:
        transformer_impl: ``--transformer-impl``.
        switch: Switch settings; expert dropout is read.
    """
    return transformer_impl == "transformer_engine" and switch.expert_dropout == 0.0


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """Experts in plain torch (:mod:`megatron_switch.moe.feed_forward`)."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        expert_dropout: float = 0.0,
    ) -> None:
        """Allocate the weights; :meth:`reset_parameters` draws them.

        Args:
            num_local_experts: Experts of this rank.
            config: Megatron's transformer configuration.
            pg_collection: Process groups; ``ep``, ``expt_tp`` and ``expt_dp`` are read.
            expert_dropout: Probability to drop a hidden element in training.

        Raises:
            LayoutError: If expert-tensor parallelism does not divide the hidden width.
        """
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        self.expert_dropout = expert_dropout

        tensor_size = self.tp_group.size()
        if config.moe_ffn_hidden_size % tensor_size:
            raise LayoutError(
                f"An expert's hidden width is cut evenly over expert-tensor ranks, but "
                f"{config.moe_ffn_hidden_size} is no multiple of {tensor_size}. Change "
                "--moe-ffn-hidden-size or --expert-tensor-parallel-size."
            )
        self.hidden_width = config.moe_ffn_hidden_size // tensor_size
        halves = 2 if config.gated_linear_unit else 1
        width, model = self.hidden_width, config.hidden_size
        self.weight1 = self._weight(halves * width, model, partition_dim=1, stride=halves)
        self.weight2 = self._weight(model, width, partition_dim=2, stride=1)

    def _weight(self, rows: int, columns: int, *, partition_dim: int, stride: int) -> Parameter:
        config = self.config
        weight = Parameter(
            torch.empty(
                (self.num_local_experts, rows, columns),
                dtype=config.params_dtype,
                device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
            )
        )
        # As Megatron's expert linears: no two ranks of a model replica hold the same part, so each
        # counts once in the gradient norm.
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
        weight.allreduce = False  # type: ignore[attr-defined]
        return weight

    def reset_parameters(self, *, seed: int, layer_number: int, init_scale: float | None) -> None:
        """Draw the weights; the same in every layout.

        Args:
            seed: Seed of the run.
            layer_number: 1-based number of the layer in the whole model.
            init_scale: ``--switch-init-scale``; None for Megatron's initialisation.
        """
        for index in range(self.num_local_experts):
            _init_expert_(
                self,
                index,
                self.weight1[index],
                self.weight2[index],
                seed=seed,
                layer_number=layer_number,
                init_scale=init_scale,
            )

    def forward(
        self,
        rows_RD: Tensor,
        tokens_per_expert_e: Tensor,
        gate_R: Tensor,
        *,
        key_R: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return the output of each row's expert, times its gate.

        Args:
            rows_RD: Rows ordered by expert, shape (R, D).
            tokens_per_expert_e: Rows of each local expert, int64, on the CPU.
            gate_R: Router probability of each row, float32.
            key_R: Random key of each row, int64; needed in training with expert dropout.

        Returns:
            Shape (R, D), a partial sum with expert-tensor parallelism; and None for the bias.
        """
        if not (self.training and self.expert_dropout):
            key_R = None
        else:
            assert key_R is not None, "expert dropout needs the tokens' keys"
        config = self.config
        plain_relu = config.activation_func is F.relu and not config.gated_linear_unit
        output_RD = feed_forward(
            rows_RD,
            gate_R,
            self.weight1,
            self.weight2,
            tokens_per_expert_e.tolist(),
            None if plain_relu and key_R is None else self._activate,
            key_R,
        )
        return output_RD, None

    def _activate(self, input_RH: Tensor, key_R: Tensor | None) -> Tensor:
        config = self.config
        if config.gated_linear_unit:
            glu_RF, linear_RF = torch.chunk(input_RH, 2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                glu_RF = glu_RF.clamp(max=limit)
                linear_RF = linear_RF.clamp(min=-limit, max=limit)
            hidden_RF = config.activation_func(glu_RF) * (linear_RF + config.glu_linear_offset)
        else:
            hidden_RF = config.activation_func(input_RH)
        if key_R is not None:
            # Columns are numbered over the whole hidden width, so shards draw what one rank would.
            first_column = self.tp_group.rank() * self.hidden_width
            hidden_RF = dropout(hidden_RF, key_R, self.expert_dropout, first_column=first_column)
        return cast(Tensor, hidden_RF)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed."""

    def get_extra_state(self) -> None:
        """Return None, for the empty entry that Megatron's linear layers have in checkpoints."""

    def set_extra_state(self, state: object) -> None:
        """Ignore the empty entry of a checkpoint."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Offset, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weights as Megatron's own experts store them.

        Args:
            prefix: Name of the module in the model, with a dot at its end.
            sharded_offsets: Dims in front (stacked layers).
            metadata: Options of Megatron's checkpoints; ``singleton_local_shards`` is read.
        """
        shards = ExpertShards(
            first_expert=self.ep_group.rank() * self.num_local_experts,
            num_local_experts=self.num_local_experts,
            num_experts=self.ep_group.size() * self.num_local_experts,
            tensor_rank=self.tp_group.rank(),
            tensor_size=self.tp_group.size(),
            data_rank=self.dp_group.rank(),
            gated=self.config.gated_linear_unit,
            layer_offsets=tuple(sharded_offsets),
            separate_keys=(metadata or {}).get("singleton_local_shards", False),
        )
        return shards.state_dict(prefix, self.weight1, self.weight2)


class TransformerEngineExperts(TEGroupedMLP):  # type: ignore[misc]
    """Transformer Engine's grouped linear layers, as Megatron's own specs build them."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        """Build Megatron's module without biases, and mark its parameters as experts'.

        Args:
            num_local_experts: Experts of this rank.
            config: Megatron's transformer configuration.
            pg_collection: Process groups.
            name: Name of the module in the model.
        """
        config = engine_config(config)
        spec = TESpecProvider().grouped_mlp_modules(True)
        super().__init__(
            num_local_experts,
            config,
            submodules=cast(Any, spec).keywords["submodules"],
            pg_collection=pg_collection,
            name=name,
        )
        for parameter in self.parameters():
            parameter.allreduce = False

    def reset_parameters(self, *, seed: int, layer_number: int, init_scale: float | None) -> None:
        """Draw the weights, as :meth:`GroupedExperts.reset_parameters` does."""
        for index in range(self.num_local_experts):
            _init_expert_(
                self,
                index,
                getattr(self.linear_fc1, f"weight{index}"),
                getattr(self.linear_fc2, f"weight{index}"),
                seed=seed,
                layer_number=layer_number,
                init_scale=init_scale,
            )


def engine_config(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of Transformer Engine's experts, which have no biases.

    Megatron's grouped experts fuse a bias with SwiGLU and the quick GEGLU only, and end in the
    first forward pass for any other activation that is to be fused, as the dense layers' GELU with
    biases is.

    Args:
        config: Configuration of the whole model, which is not changed.
    """
    config = copy.copy(config)  # not replace(): that would run the checks of the class again
    config.add_bias_linear = False
    fusible = config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu)
    config.bias_activation_fusion = bool(config.bias_activation_fusion and fusible)
    return config


def _init_expert_(
    experts: GroupedExperts | TransformerEngineExperts,
    index: int,
    weight1_FD: Tensor,
    weight2_DF: Tensor,
    *,
    seed: int,
    layer_number: int,
    init_scale: float | None,
) -> None:
    """Draw both matrices of one local expert, in place."""
    config = experts.config
    matrices: list[tuple[Literal["fc1", "fc2"], Tensor, Any]] = [
        ("fc1", weight1_FD, config.init_method),
        ("fc2", weight2_DF, config.output_layer_init_method),
    ]
    for matrix, weight, init_method in matrices:
        init_expert_weight_(
            weight,
            matrix=matrix,
            seed=seed,
            layer_number=layer_number,
            expert=experts.ep_group.rank() * experts.num_local_experts + index,
            scale=init_scale,
            init_method=init_method,
            shard=experts.tp_group.rank(),
            num_shards=experts.tp_group.size(),
            gated=config.gated_linear_unit,
        )
