"""From Megatron's arguments to a model configuration that builds a Switch-T5."""

import copy
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from torch import Tensor

from megatron_switch.architecture.layer_pattern import Stack, stacks_of
from megatron_switch.config import SwitchConfig
from megatron_switch.models.t5 import SwitchT5Model
from megatron_switch.models.t5_layers import check_t5_supported
from megatron_switch.moe.switch_mlp import switch_mlp_spec


@dataclass(kw_only=True)
class T5ModelConfig(GPTModelConfig):  # type: ignore[misc]
    """Megatron's configuration of a model, with a second stack.

    What the two stacks share stands in ``transformer``, which is the decoder's.
    """

    builder: ClassVar[str] = "megatron_switch.training.loop.t5_builder.T5ModelBuilder"

    encoder: TransformerConfig | None = None
    """Settings of the encoder."""
    switch: SwitchConfig | None = None
    """Switch settings, resolved."""
    seed: int = 0
    """Seed of the sparse layers' initial weights."""
    num_buckets: int = 32
    """``--relative-attention-num-buckets``."""
    max_distance: int = 128
    """``--relative-attention-max-distance``."""


class T5ModelBuilder(GPTModelBuilder):  # type: ignore[misc]
    """Builds the model; wrapping it for training is Megatron's."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> SwitchT5Model:
        """Return the whole model: there is one pipeline stage."""
        config = self._model_config
        assert config.encoder is not None, "set by t5_model_config"
        assert config.switch is not None, "set by t5_model_config"
        model = SwitchT5Model(
            encoder_config=config.encoder,
            decoder_config=config.transformer,
            encoder_mlp_spec=switch_mlp_spec(config.switch, seed=config.seed),
            decoder_mlp_spec=switch_mlp_spec(
                config.switch, seed=config.seed, layers_before=config.encoder.num_layers
            ),
            vocab_size=config.vocab_size,
            max_sequence_length=config.seq_length,
            tied_head=config.share_embeddings_and_output_weights,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
            parallel_output=config.parallel_output,
            pg_collection=pg_collection,
        )
        return model


def t5_model_config(args: Namespace, switch: SwitchConfig) -> T5ModelConfig:
    """Return the configuration of a Switch-T5.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.

    Raises:
        ConfigError: Our layers cannot build this model.
        AssertionError, ValueError: Megatron refuses it.
    """
    configs = {name: _stack_config(args, switch, stack) for name, stack in stacks_of(args).items()}
    for config in configs.values():
        check_t5_supported(config)
    encoder, decoder = configs["encoder"], configs["decoder"]
    model: T5ModelConfig = gpt_config_from_args(args, decoder, model_config_cls=T5ModelConfig)
    model.encoder = encoder
    model.switch = switch
    model.seed = args.seed
    model.num_buckets = args.relative_attention_num_buckets
    model.max_distance = args.relative_attention_max_distance
    return model


def _stack_config(args: Namespace, switch: SwitchConfig, stack: Stack) -> TransformerConfig:
    """Return the settings of one stack."""
    args = copy.copy(args)
    args.num_layers, args.moe_layer_freq = stack.num_layers, stack.layer_freq
    config: Any = core_transformer_config_from_args(args)
    gated = switch.activation == "gated-gelu"
    config.activation_func = gelu_tanh if gated else F.relu
    config.gated_linear_unit = gated
    result: TransformerConfig = config
    return result


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, which T5 1.1 uses."""
    return F.gelu(x, approximate="tanh")
