"""A model as flags: named models, JSON files and the argv of a command line.

A model file is a JSON object of Megatron's and our flags without the leading dashes. The same files
serve ``--switch-model`` in training, the planner, the rehearsal and benchmarks, so that all of them
mean the same model.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_switch.architecture.field_names import flag_of, read_field
from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import T5_ARGUMENTS, Architecture, described
from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_key, flags_of_argv
from megatron_switch.flags.train_flags import flag_names, suggestion
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.workload import Capacity
from megatron_switch.utils.fields import Fields

_FOLDER = Path(__file__).parent / "presets"

Flags = Mapping[str, object]
"""Flags by name without the leading dashes; a flag without a value is True."""


def model_names() -> list[str]:
    """Return the names of the models that come with this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def model_file(name: str) -> Path:
    """Return the JSON file of a named model, or ``name`` itself as a path."""
    return _FOLDER / f"{name}.json" if name in model_names() else Path(name)


def read_model(name: str, *, flag: str = "--model") -> dict[str, object]:
    """Return the flags of a named model or of a JSON file.

    Args:
        name: The model, or the file.
        flag: What names it, for messages.

    Raises:
        ConfigError: If there is neither, or the file is no JSON object of flags.
    """
    path = model_file(name)
    if not path.is_file():
        raise ConfigError(
            f"{flag} names a model or a JSON file of flags, and {name} is neither. Models are "
            f"{', '.join(model_names())}."
        )
    file = Fields.read(path, "model file")
    flags: dict[str, object] = {}
    for key, value in file.values.items():
        name = flag_key(key)
        if name not in flag_names():
            raise file.error(key, f"there is no flag --{name}.{suggestion(name)}")
        flags[name] = value
    return flags


def flags_with_model(argv: Sequence[str]) -> dict[str, object]:
    """Return the flags of a command line and, behind them, of the model of ``--switch-model``.

    Raises:
        ConfigError: There is no such model.
    """
    given = flags_of_argv(argv)
    if "switch-model" not in given:
        return given
    return {**read_model(str(given["switch-model"]), flag="--switch-model"), **given}


def model_from_flags(flags: Flags, *, padded: bool = True) -> Architecture:
    """Return the model that flags describe, with Megatron's defaults where they say nothing.

    Args:
        flags: Flags of ``megatron-switch train``; those that describe no model are left alone.
        padded: Whether the vocabulary is padded as in training, or counted as it is.

    Raises:
        ConfigError: If a flag that decides the size is missing or no number.
    """
    values = FlagValues(flags)
    is_t5 = values.text("switch-arch", "gpt") == "t5"
    depth, rows = values.integer("num-layers"), values.integer("vocab-size")
    if padded:
        multiple = values.integer("make-vocab-size-divisible-by", 128)
        rows = padded_vocab_size(rows, make_divisible_by=multiple)
    args = Namespace(
        switch_arch="t5" if is_t5 else "gpt",
        switch_activation=values.text("switch-activation", "auto"),
        num_layers=depth,
        decoder_num_layers=values.integer("decoder-num-layers", depth),
        hidden_size=values.integer("hidden-size"),
        num_attention_heads=values.integer("num-attention-heads"),
        padded_vocab_size=rows,
        moe_layer_freq=flags.get("moe-layer-freq", Stack.switch(depth).layer_freq),
        switch_decoder_layer_freq=flags.get("switch-decoder-layer-freq"),
        add_bias_linear=not values.on("disable-bias-linear"),
        bias_gelu_fusion=not values.on("no-bias-gelu-fusion"),
        position_embedding_type="none" if is_t5 else "learned_absolute",
        rope_scaling_factor=values.number("rope-scaling-factor", 8.0),
    )
    for name in _SWITCHES:
        setattr(args, name, values.on(flag_key(name)))
    for name, value in T5_ARGUMENTS.items() if is_t5 else ():
        setattr(args, name, value)
    for each in described():
        flag = flag_of(each)
        if flag in flags and not each.metadata["off"]:
            setattr(args, each.name, read_field(each, values, flag, {each.name: None}))
    if values.on("use-rotary-position-embeddings"):
        args.position_embedding_type = "rope"
    if args.position_embedding_type == "learned_absolute":
        values.integer("max-position-embeddings")
    return Architecture.from_args(args)


_SWITCHES = (
    "group_query_attention",
    "openai_gelu",
    "quick_geglu",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
)
"""Flags without a value that :meth:`Architecture.from_args` reads, beside those of its fields."""


def capacity_of(flags: Flags) -> Capacity:
    """Return the slots of an expert, as the flags say.

    Raises:
        ConfigError: If a value cannot be used.
    """
    values = FlagValues(flags)
    group = values.text("switch-capacity-group", "microbatch")
    rounding = values.text("switch-capacity-rounding", "floor")
    if group not in ("microbatch", "sequence", "ep"):
        raise ConfigError(f"--switch-capacity-group is microbatch, sequence or ep, got {group}.")
    if rounding not in ("floor", "round", "ceil"):
        raise ConfigError(f"--switch-capacity-rounding is floor, round or ceil, got {rounding}.")
    least = values.values.get("switch-min-capacity", 4)
    return Capacity(
        factor=values.number("moe-expert-capacity-factor", 1.25),
        slots=values.integer("switch-capacity", None),
        least=int(str(least)) if str(least).isdigit() else 4,
        rounding=rounding,  # type: ignore[arg-type]
        group=group,  # type: ignore[arg-type]
    )
