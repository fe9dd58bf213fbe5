"""LayerNorm and RMSNorm for the local layer spec, with neither Transformer Engine nor Apex.

Megatron wraps the same two torch modules, but refuses them under sequence parallelism. All
they lack there is a mark: with sequence parallelism every tensor-parallel rank normalises its
own piece of the sequence, so the gradient of a norm's weight is a partial sum, and Megatron
adds up over the tensor-parallel group exactly those gradients whose parameter carries
``sequence_parallel = True``. The classes here set that mark; forward and backward are torch's,
and parameter names (``weight``, ``bias``) and start values are those of every other Megatron
norm, so a checkpoint moves between them.

Refused: ``layernorm_zero_centered_gamma`` and ``memory_efficient_layer_norm``, which change
what is stored or saved for backward and which torch's kernels do not have. ``persist_layer_norm``
only picks a faster Apex kernel of the same function, so without Apex it is met by torch's kernel.
"""

from typing import Any

from megatron.core.fusions import fused_layer_norm
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_switch.errors import ConfigError


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with the constructor and marks that Megatron's specs expect."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Build the norm.

        Args:
            config: Model settings; ``sequence_parallel`` decides the parameters' mark.
            hidden_size: Size of the last dim, the one that is normalised.
            eps: Added to the variance.

        Raises:
            ConfigError: If the settings ask for what torch's kernel cannot do.
        """
        check_norms(config)
        super().__init__(hidden_size, eps=eps)
        _mark_sequence_parallel(self, config)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with the constructor and marks that Megatron's specs expect."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Build the norm; arguments and errors as for :class:`LayerNorm`."""
        check_norms(config)
        super().__init__(hidden_size, eps=eps)
        _mark_sequence_parallel(self, config)


def local_norm(config: TransformerConfig) -> Any:
    """Return the norm class that a local layer spec should use for ``config.normalization``.

    Apex's fused LayerNorm is taken where its kernels import and ``persist_layer_norm`` asks
    for them. They are looked for by name: an importable ``apex`` proves nothing, because PyPI
    has an unrelated package of that name.

    Args:
        config: Model settings.

    Returns:
        A class that is called with ``config``, ``hidden_size`` and ``eps``.

    Raises:
        ConfigError: If ``normalization`` is neither LayerNorm nor RMSNorm.
    """
    if config.normalization == "RMSNorm":
        return RMSNorm
    if config.normalization != "LayerNorm":
        raise ConfigError(
            "Layers without Transformer Engine normalise with LayerNorm or RMSNorm, got "
            f"--normalization {config.normalization}."
        )
    if config.persist_layer_norm and fused_layer_norm.HAVE_FUSED_LAYER_NORM:
        return fused_layer_norm.FusedLayerNorm
    return LayerNorm


def check_norms(config: TransformerConfig) -> None:
    """Refuse what torch's norms cannot do.

    Args:
        config: Model settings.

    Raises:
        ConfigError: With the first such setting.
    """
    if config.layernorm_zero_centered_gamma:
        raise ConfigError(
            "torch's norms store the scale itself, not its distance from one, but "
            "--apply-layernorm-1p is set. Leave it off, or use --transformer-impl "
            "transformer_engine."
        )
    if config.memory_efficient_layer_norm:
        raise ConfigError(
            "torch's norms keep their input for backward, but memory_efficient_layer_norm is set "
            "in the model's configuration. Leave it off, or use --transformer-impl "
            "transformer_engine."
        )


def _mark_sequence_parallel(norm: nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        # The name that finalize_model_grads looks for; see the module's docstring.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
