"""From Megatron's arguments to a model configuration that builds a Switch GPT."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from megatron.core.transformer import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.models.gpt import check_supported, switch_gpt_layer_spec
from megatron_switch.moe.switch_mlp import switch_mlp_spec
from megatron_switch.training.arguments.refusals import explain_refusal
from megatron_switch.training.loop.t5_builder import t5_model_config


def model_config(args: Namespace, switch: SwitchConfig) -> Any:
    """Return Megatron's configuration of the model, with Switch layers where a pattern says so.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.

    Raises:
        ConfigError: Megatron or our layers cannot build this model.
    """
    try:
        if args.switch_arch == "t5":
            return t5_model_config(args, switch)
        transformer: TransformerConfig = core_transformer_config_from_args(args)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses this model: {explain_refusal(error)}") from error
    check_supported(transformer)
    config = gpt_config_from_args(args, transformer)
    config.rope_scaling_factor = args.rope_scaling_factor  # which Megatron 0.19.2 does not pass on
    config.transformer_layer_spec = partial(
        switch_gpt_layer_spec, switch_mlp_spec=switch_mlp_spec(switch, seed=args.seed)
    )
    return config


def resolve_dispatch(
    args: Namespace, switch: SwitchConfig, device: Literal["cuda", "cpu"]
) -> SwitchConfig:
    """Return the settings with ``dispatch`` decided.

    Packed costs a host synchronisation and sends less: right where the host is the device, where a
    capacity group spans micro-batches, and where no capacity bounds the slots. Padded has static
    shapes.

    Raises:
        ConfigError: ``padded`` is asked for where slots are not bounded by one micro-batch.
    """
    if args.moe_pad_expert_input_to_capacity and switch.dispatch == "auto":
        switch = replace(switch, dispatch="padded")
    factors = (args.moe_expert_capacity_factor, switch.eval_capacity_factor)
    dropless = switch.capacity is None and any(f is None or f < 0 for f in factors)
    spans = switch.capacity_group == "ep"
    if switch.dispatch == "auto":
        packed = device == "cpu" or spans or dropless
        return replace(switch, dispatch="packed" if packed else "padded")
    if switch.dispatch == "padded" and dropless and args.num_experts:
        raise ConfigError(
            "Padded dispatch makes room for every slot, so it needs a capacity: got "
            f"--moe-expert-capacity-factor {factors[0]} and --switch-eval-capacity-factor "
            f"{factors[1]}, where negative means no token is dropped. Use --switch-dispatch "
            "packed, or positive factors."
        )
    if switch.dispatch == "padded" and spans and args.num_experts:
        raise ConfigError(
            "--switch-capacity-group ep counts slots over micro-batches of several ranks, which "
            "padded dispatch cannot hold in buffers of one. Use --switch-dispatch packed."
        )
    return switch
