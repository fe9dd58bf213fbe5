"""Every ``--switch-*`` flag: its name, help, default and checks.

A field here is a flag there: ``eval_capacity_factor`` is ``--switch-eval-capacity-factor``,
and the string below a field is its help. Values stay plain (str, int, float, None), because
Megatron stores the whole argument namespace in its checkpoints and reads it back with
``weights_only=True``.

What Megatron already has keeps Megatron's flag, and only its default changes; see
:mod:`megatron_switch.training.arguments.parser`. Annotations are evaluated here (no
``from __future__ import annotations``), because Megatron's flag factory reads the types.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name

FLAG_PREFIX = "switch_"
"""What an attribute of Megatron's argument namespace starts with when it is ours."""


@dataclass(frozen=True, kw_only=True)
class SwitchConfig:
    """Switch Transformer settings that Megatron-Core has no flag for."""

    arch: Literal["gpt", "t5"] = "gpt"
    """Decoder-only model, or T5's encoder and decoder with experts in both."""

    recipe: Literal["switch", "mesh", "flaxformer", "hf", "st-moe", "megatron"] = "switch"
    """Sets capacity factors, rounding, least capacity, capacity group, drop order, jitter, losses
    and initialisation together, as the named system has them. An explicit flag wins."""

    capacity: int | None = None
    """Slots per expert and capacity group, as an absolute number (Hugging Face's expert_capacity),
    in training and evaluation alike, instead of a capacity factor."""

    drop_order: Literal["first_come", "probability"] = "first_come"
    """Who keeps a slot when an expert is full: the earlier token, or the token with the higher
    router probability. With probability a decoder is no longer causal."""

    init_scale: str = "0.1"
    """Scale s of the truncated normal sqrt(s / global fan-in) that starts router and experts, or
    'megatron' to keep Megatron's own initialisation."""

    eval_capacity_factor: float = 2.0
    """Capacity factor while evaluating; --moe-expert-capacity-factor is the one while training.
    Negative: no token is dropped."""

    min_capacity: int = 4
    """Least number of slots per expert and capacity group."""

    capacity_rounding: Literal["floor", "round", "ceil"] = "floor"
    """How tokens * factor / experts becomes a whole number of slots: floor (Mesh-TensorFlow), round
    (Flaxformer, halves to even), ceil (Megatron-Core, DeepSpeed)."""

    capacity_group: Literal["microbatch", "sequence", "ep"] = "microbatch"
    """Tokens over which capacity is counted: one micro-batch over all its tensor- and
    context-parallel shards; one sequence over its shards; or all micro-batches of the
    expert-parallel group, in data-parallel rank order (packed dispatch only)."""

    dispatch: Literal["auto", "packed", "padded"] = "auto"
    """How tokens travel to experts. packed: only kept tokens. padded: every slot, static shapes, no
    host synchronisation. auto: packed on CPU and for capacity group ep, else padded."""

    expert_dropout: float = 0.0
    """Dropout probability on the hidden activation inside experts, in training."""

    overlap_chunks: int = 1
    """Number of pieces into which the exchange is split so that it overlaps with expert compute."""

    activation: Literal["auto", "relu", "gated-gelu"] = "auto"
    """Nonlinearity of T5's dense layers and experts: relu as in T5 and the released Switch-Base and
    -Large, gated-gelu (tanh approximation) as in T5 1.1 and Switch-XXL. auto: relu. A gpt takes it
    from Megatron's flags (--swiglu, --squared-relu, ...)."""

    decoder_layer_freq: str | None = None
    """Which decoder layers of a t5 have experts, in the form of --moe-layer-freq, which says it of
    the encoder. Default: as the encoder where both are equally deep, else layers 1, 3, 5, ..."""

    span_density: float = 0.15
    """Share of tokens that span corruption replaces, in (0, 1); for --switch-arch t5 on prepared
    text."""

    span_length: float = 3.0
    """Mean length of a replaced span in tokens, at least 1."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train. auto takes the CPU only where no GPU is present or promised and the job is
    one host."""

    nodes_per_leaf: int | None = None
    """Nodes under one leaf switch of the network. The rank table then says of each kind of group
    over how many leaves it is spread."""

    run_dir: str | None = None
    """One folder for checkpoints, TensorBoard, metrics, log, rank table, run.json and resume.sh."""

    metrics_file: str | None = None
    """JSON-lines file of training metrics. Default: metrics.jsonl in --switch-run-dir."""

    metrics_interval: int = 10
    """Iterations between the metrics records that carry per-layer and per-expert arrays."""

    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """When router logits are infinite or NaN. raise: end training and name layer and rank. skip:
    leave the step out, as an overflow of fp16 is. ignore: leave it to Megatron, which looks for NaN
    in gradients."""

    override_checkpoint: bool = False
    """Continue from a checkpoint although its Switch settings differ from this run's; the flags of
    this run win."""

    model: str | None = None
    """Named model (switch-base-128, switch-large-128, switch-xxl-128, switch-c-2048,
    gpt-1.6t-128), or a JSON file of flags without the leading dashes that describe one; an explicit
    flag wins."""

    def __post_init__(self) -> None:
        """Check each value on its own; combinations are checked where all flags are known."""
        _at_least("capacity", self.capacity, 1)
        _at_least("min_capacity", self.min_capacity, 0)
        _at_least("overlap_chunks", self.overlap_chunks, 1)
        _at_least("metrics_interval", self.metrics_interval, 1)
        _at_least("nodes_per_leaf", self.nodes_per_leaf, 1)
        if self.eval_capacity_factor == 0:
            raise ConfigError(
                "A capacity factor of 0 would drop every token, got --switch-eval-capacity-factor "
                "0. Give a positive factor, or a negative one to drop no token."
            )
        if not 0.0 <= self.expert_dropout < 1.0:
            raise ConfigError(
                f"A dropout probability is at least 0 and below 1, got --switch-expert-dropout "
                f"{self.expert_dropout}."
            )
        if not 0.0 < self.span_density < 1.0:
            raise ConfigError(
                "Span corruption replaces a share of the tokens between 0 and 1, got "
                f"--switch-span-density {self.span_density}. T5 uses 0.15."
            )
        if not self.span_length >= 1.0:
            raise ConfigError(
                f"A span has at least one token, got --switch-span-length {self.span_length}. T5 "
                "uses 3.0."
            )
        self.init_scale_value()

    def init_scale_value(self) -> float | None:
        """Return ``init_scale`` as a number, or None where Megatron's initialisation stays.

        Raises:
            ConfigError: If it is neither a positive number nor the word ``megatron``.
        """
        if self.init_scale == "megatron":
            return None
        try:
            scale = float(self.init_scale)
        except ValueError:
            scale = -1.0
        if not scale > 0.0:
            raise ConfigError(
                "--switch-init-scale takes a positive number or the word 'megatron', got "
                f"{self.init_scale!r}."
            )
        return scale

    @classmethod
    def from_args(cls, args: Any) -> "SwitchConfig":
        """Return the settings held by a Megatron argument namespace.

        Args:
            args: Namespace with one ``switch_<field>`` attribute for each field.
        """
        return cls(**{field.name: getattr(args, FLAG_PREFIX + field.name) for field in fields(cls)})


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag_name(FLAG_PREFIX + name)} must be at least {least}, got {value}.")
