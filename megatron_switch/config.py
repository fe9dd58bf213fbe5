"""Every ``--switch-*`` flag: its name, type, default, help and traits, in one place.

A field here is a flag there: ``eval_capacity_factor`` is ``--switch-eval-capacity-factor``, and the
string below a field is its help. What else is known of a flag (its range, what it needs, whether it
may change on resume) stands beside its default; see :mod:`megatron_switch.flags.traits`. All else
that knows flags by name is derived from here: parser, checks, comparison with a checkpoint, and
``docs/flags.md``. Values stay plain (str, int, float, None), because
Megatron stores the whole argument namespace in its checkpoints and reads it back with
``weights_only=True``.

What Megatron already has keeps Megatron's flag, and only its default changes; see
:mod:`megatron_switch.training.arguments.parser`. Annotations are evaluated here (no
``from __future__ import annotations``), because Megatron's flag factory reads the types.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_switch.errors import ConfigError
from megatron_switch.flags.traits import (
    BELOW_ONE,
    CAPACITY_FACTOR,
    COUNT,
    COUNT_OR_ZERO,
    Range,
    Traits,
    check_ranges,
    flag,
    traits_of,
)

FLAG_PREFIX = "switch_"
"""What an attribute of Megatron's argument namespace starts with when it is ours."""


@dataclass(frozen=True, kw_only=True)
class SwitchConfig:
    """Switch Transformer settings that Megatron-Core has no flag for."""

    arch: Literal["gpt", "t5"] = flag("gpt", on_resume="model")
    """Decoder-only model, or T5's encoder and decoder with experts in both."""

    recipe: Literal["switch", "mesh", "flaxformer", "hf", "st-moe", "megatron"] = flag(
        "switch", on_resume="free"
    )
    """Sets capacity factors, rounding, least capacity, capacity group, drop order, jitter, losses
    and initialisation together, as the named system has them. An explicit flag wins."""

    capacity: int | None = flag(
        None, range=COUNT, needs=("experts", "limit"), on_resume="overridable"
    )
    """Slots per expert and capacity group, as an absolute number (Hugging Face's expert_capacity),
    in training and evaluation alike, instead of a capacity factor."""

    drop_order: Literal["first_come", "probability"] = flag(
        "first_come", needs=("experts", "limit", "drops"), on_resume="overridable"
    )
    """Who keeps a slot when an expert is full: the earlier token, or the token with the higher
    router probability. With probability a decoder is no longer causal."""

    init_scale: str = flag("0.1", needs=("experts",), on_resume="overridable")
    """Scale s of the truncated normal sqrt(s / global fan-in) that starts router and experts, or
    'megatron' to keep Megatron's own initialisation."""

    eval_capacity_factor: float = flag(
        2.0, range=CAPACITY_FACTOR, needs=("experts", "limit", "factor"), on_resume="overridable"
    )
    """Capacity factor while evaluating; --moe-expert-capacity-factor is the one while training.
    Negative: no token is dropped."""

    min_capacity: int = flag(
        4,
        range=COUNT_OR_ZERO,
        needs=("experts", "limit", "factor", "drops"),
        on_resume="overridable",
    )
    """Least number of slots per expert and capacity group."""

    capacity_rounding: Literal["floor", "round", "ceil"] = flag(
        "floor", needs=("experts", "limit", "factor", "drops"), on_resume="overridable"
    )
    """How tokens * factor / experts becomes a whole number of slots: floor (Mesh-TensorFlow), round
    (Flaxformer, halves to even), ceil (Megatron-Core, DeepSpeed)."""

    capacity_group: Literal["microbatch", "sequence", "ep"] = flag(
        "microbatch", needs=("experts", "limit"), on_resume="overridable"
    )
    """Tokens over which capacity is counted: one micro-batch over all its tensor- and
    context-parallel shards; one sequence over its shards; or all micro-batches of the
    expert-parallel group, in data-parallel rank order (packed dispatch only)."""

    dispatch: Literal["auto", "packed", "padded"] = flag(
        "auto", needs=("experts",), on_resume="free"
    )
    """How tokens travel to experts. packed: only kept tokens. padded: every slot, static shapes, no
    host synchronisation. auto: packed on CPU and for capacity group ep, else padded."""

    expert_dropout: float = flag(0.0, range=BELOW_ONE, needs=("experts",), on_resume="overridable")
    """Dropout probability on the hidden activation inside experts, in training."""

    overlap_chunks: int = flag(1, range=COUNT, needs=("experts",), on_resume="free")
    """Number of pieces into which the exchange is split so that it overlaps with expert compute."""

    activation: Literal["auto", "relu", "gated-gelu"] = flag(
        "auto", needs=("t5",), on_resume="model"
    )
    """Nonlinearity of T5's dense layers and experts: relu as in T5 and the released Switch-Base and
    -Large, gated-gelu (tanh approximation) as in T5 1.1 and Switch-XXL. auto: relu. A gpt takes it
    from Megatron's flags (--swiglu, --squared-relu, ...)."""

    decoder_layer_freq: str | None = flag(None, needs=("t5", "experts"), on_resume="model")
    """Which decoder layers of a t5 have experts, in the form of --moe-layer-freq, which is for the
    encoder. Default: as the encoder where both are equally deep, else layers 1, 3, 5, ..."""

    span_density: float = flag(
        0.15,
        range=Range(above=0, below=1, why="T5 uses 0.15."),
        needs=("t5", "spans"),
        on_resume="free",
    )
    """Share of tokens that span corruption replaces; for --switch-arch t5 on prepared text."""

    span_length: float = flag(
        3.0, range=Range(at_least=1, why="T5 uses 3.0."), needs=("t5", "spans"), on_resume="free"
    )
    """Mean length of a replaced span in tokens."""

    device: Literal["auto", "cuda", "cpu"] = flag("auto", on_resume="free")
    """Where to train. auto takes the CPU only where no GPU is present or promised and the job is
    one host."""

    nodes_per_leaf: int | None = flag(None, range=COUNT, on_resume="free")
    """Nodes under one leaf switch of the network. The rank table then lists
    over how many leaves each kind of group is spread."""

    run_dir: str | None = flag(None, on_resume="free")
    """One folder for checkpoints, TensorBoard, metrics, log, rank table, run.json and resume.sh."""

    keep_checkpoints: int | None = flag(None, range=COUNT, needs=("save",), on_resume="free")
    """Newest checkpoints to keep; older ones are deleted after each save, except at multiples of
    --save-retain-interval. Default: all, or 1 with --save-retain-interval."""

    metrics_file: str | None = flag(None, on_resume="free")
    """JSON-lines file of training metrics. Default: metrics.jsonl in --switch-run-dir."""

    metrics_interval: int = flag(10, range=COUNT, needs=("metrics",), on_resume="free")
    """Iterations between the metrics records that carry per-layer and per-expert arrays."""

    nonfinite: Literal["raise", "skip", "ignore"] = flag(
        "raise", needs=("experts",), on_resume="free"
    )
    """When router logits are infinite or NaN. raise: end training and name layer and rank. skip:
    leave the step out, as an overflow of fp16 is. ignore: leave it to Megatron, which looks for NaN
    in gradients."""

    override_checkpoint: bool = flag(False, needs=("experts",), on_resume="free")
    """Continue from a checkpoint although its Switch settings differ from this run's; the flags of
    this run win."""

    model: str | None = flag(None, on_resume="free")
    """Named model (switch-base-128, switch-large-128, switch-xxl-128, switch-c-2048,
    gpt-1.6t-128), or a JSON file of flags without the leading dashes that describe one; an explicit
    flag wins."""

    def __post_init__(self) -> None:
        """Check each value on its own; combinations are checked where all flags are known."""
        values = {FLAG_PREFIX + name: value for name, value in vars(self).items()}
        check_ranges(switch_traits(), values)
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


def switch_traits() -> dict[str, Traits]:
    """Return the traits of every ``--switch-*`` flag, by attribute of Megatron's namespace."""
    return {FLAG_PREFIX + field.name: traits_of(field) for field in fields(SwitchConfig)}
