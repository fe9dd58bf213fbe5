"""Which CUDA graphs a Switch layer can be part of.

A graph repeats what was captured: kernels with the values of host variables at that time, and no
read by the host in between. Read in Megatron-Core 0.19.2; no graph has been captured yet.
"""

from megatron.core.transformer import TransformerConfig

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError


def check_cuda_graphs(config: TransformerConfig, switch: SwitchConfig) -> None:
    """Refuse graphs that would end in their capture, or repeat what must change.

    Args:
        config: Megatron's configuration, with ``cuda_graph_impl`` other than "none".
        switch: Switch settings, with dispatch mode resolved.

    Raises:
        ConfigError: Noise or weights of losses would be those of one micro-batch, or a captured
            part of the layer cannot be captured.
    """
    noise = config.moe_input_jitter_eps or switch.expert_dropout
    if noise:
        raise ConfigError(
            "A captured CUDA graph would repeat the noise of one micro-batch in every step, and "
            f"--moe-input-jitter-eps is {config.moe_input_jitter_eps}, --switch-expert-dropout "
            f"{switch.expert_dropout}. Set both to 0, or leave --cuda-graph-impl "
            f"{config.cuda_graph_impl} out."
        )
    if config.calculate_per_token_loss:
        raise ConfigError(
            "A captured CUDA graph would weigh every micro-batch's router losses by the tokens of "
            "one. Leave --calculate-per-token-loss out, or --cuda-graph-impl "
            f"{config.cuda_graph_impl}."
        )
    _check_modules(config, switch)


def _check_modules(config: TransformerConfig, switch: SwitchConfig) -> None:
    modules = {module.name for module in config.cuda_graph_modules}
    parts = sorted(modules & {"moe_router", "moe_preprocess"})
    if parts:
        raise ConfigError(
            "A CUDA graph of a part of a layer calls parts of Megatron's own MoE layer, and a "
            f"Switch layer runs as a whole: got --cuda-graph-modules {' '.join(parts)}. Use "
            "--cuda-graph-modules attn, or moe with --switch-dispatch padded."
        )
    whole = config.cuda_graph_impl == "full_iteration" or not modules or "moe" in modules
    if whole and switch.dispatch == "packed":
        shown = f"--cuda-graph-modules {' '.join(sorted(modules))}" if modules else "whole layers"
        raise ConfigError(
            "Packed dispatch reads the number of rows on the host, which a CUDA graph cannot "
            f"capture: got --switch-dispatch packed and --cuda-graph-impl {config.cuda_graph_impl} "
            f"({shown}). Use --switch-dispatch padded, or capture attention alone with "
            "--cuda-graph-modules attn."
        )
