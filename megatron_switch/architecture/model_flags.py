"""The model as flags: named models, JSON files and command lines become a shape.

A model file is a JSON object of Megatron's and our flags without the leading dashes. The same files
serve ``--switch-model`` in training, the planner, the rehearsal and benchmarks, so that all of them
mean the same model. Only flags that decide sizes are understood here; others are left alone.

The padded vocabulary is that of :mod:`megatron_switch.models.vocabulary`.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from megatron_switch.architecture.parameters import GPTShape, T5Shape
from megatron_switch.errors import ConfigError
from megatron_switch.flags.train_flags import flag_names, suggestion
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.workload import Capacity
from megatron_switch.utils.fields import Fields

_FOLDER = Path(__file__).parent / "presets"
_ROWS_FACTOR = 8  # as in training: the vocabulary is padded to a multiple of 128 x 8

Flags = Mapping[str, object]
"""Flags by name without the leading dashes; a flag without a value is True."""


def model_names() -> list[str]:
    """Return the names of the models that come with this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def model_file(name: str) -> Path:
    """Return the JSON file of a named model, or ``name`` itself as a path."""
    return _FOLDER / f"{name}.json" if name in model_names() else Path(name)


def read_model(name: str) -> dict[str, object]:
    """Return the flags of a named model or of a JSON file.

    Raises:
        ConfigError: If there is neither, or the file is no JSON object of flags.
    """
    path = model_file(name)
    if not path.is_file():
        raise ConfigError(
            f"--model names a model or a JSON file of flags, and {name} is neither. Models are "
            f"{', '.join(model_names())}. The pretrain flags themselves can stand after --."
        )
    file = Fields.read(path, "model file")
    flags: dict[str, object] = {}
    for key, value in file.values.items():
        name = key.lstrip("-").replace("_", "-")
        if name not in flag_names():
            raise file.error(key, f"there is no flag --{name}.{suggestion(name)}")
        flags[name] = value
    return flags


def shape_of(flags: Flags, *, padded: bool = True) -> GPTShape:
    """Return the shape of the model that flags describe; a :class:`T5Shape` for ``t5``.

    Args:
        flags: The flags, with Megatron's defaults where absent.
        padded: Whether the vocabulary is padded as in training, or counted as it is.

    Raises:
        ConfigError: If a flag that decides the size is missing or no number.
    """
    values = FlagValues(flags)
    hidden = values.integer("hidden-size")
    experts = values.integer("num-experts", 0)
    layers = values.integer("num-layers")
    activation = values.text("switch-activation", "auto")
    gated = values.on("swiglu") or activation.startswith("gated")
    default_width = int(4 * hidden * 2 / 3 / 64) * 64 if values.on("swiglu") else 4 * hidden
    ffn = values.integer("ffn-hidden-size", default_width)
    sparse = _sparse(values, "moe-layer-freq", layers) if experts else ()
    common: dict[str, object] = {
        "hidden_size": hidden,
        "num_attention_heads": values.integer("num-attention-heads"),
        "kv_channels": values.integer("kv-channels", None),
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": values.integer("moe-ffn-hidden-size", None),
        "num_experts": experts,
        "padded_vocab_size": _vocabulary(values, padded),
        "tied_head": not values.on("untie-embeddings-and-output-weights"),
        "gated": gated,
    }
    if values.text("switch-arch", "gpt") == "t5":
        decoder = values.integer("decoder-num-layers", layers)
        name = "switch-decoder-layer-freq"
        own = sparse if decoder == layers else _sparse(FlagValues({}), name, decoder)
        if name in flags:
            own = _sparse(values, name, decoder)
        return T5Shape(
            num_layers=decoder,
            sparse_layers=own if experts else (),
            encoder_layers=layers,
            encoder_sparse_layers=sparse,
            **common,  # type: ignore[arg-type]
        )
    learned = values.text("position-embedding-type", "learned_absolute") == "learned_absolute"
    learned = learned and not values.on("use-rotary-position-embeddings")
    return GPTShape(
        num_layers=layers,
        sparse_layers=sparse,
        num_query_groups=(
            values.integer("num-query-groups", 1) if values.on("group-query-attention") else None
        ),
        learned_positions=values.integer("max-position-embeddings") if learned else 0,
        linear_bias=not values.on("disable-bias-linear"),
        qkv_bias=values.on("add-qkv-bias"),
        norm="RMSNorm" if values.text("normalization", "LayerNorm") == "RMSNorm" else "LayerNorm",
        qk_norm=values.on("qk-layernorm"),
        **common,  # type: ignore[arg-type]
    )


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


def _vocabulary(values: FlagValues, padded: bool) -> int:
    tokens = values.integer("vocab-size")
    if not padded:
        return tokens
    multiple = values.integer("make-vocab-size-divisible-by", 128) * _ROWS_FACTOR
    return -(-tokens // multiple) * multiple


def _sparse(values: FlagValues, name: str, num_layers: int) -> tuple[int, ...]:
    """Return the numbers, from 1, of the layers with experts: every second one by default."""
    if name not in values.values:
        return tuple(range(2, num_layers + 1, 2)) or (1,)
    given = values.values[name]
    pattern = given if isinstance(given, list) else _pattern(name, str(given))
    if pattern == 0:
        raise ConfigError(
            f"--{name} is a number N of at least 1, for experts in every Nth layer, or a pattern "
            "such as [0,1]*12, got 0."
        )
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
    if len(pattern) != num_layers or not all(str(entry) in ("0", "1") for entry in pattern):
        raise ConfigError(
            f"--{name} says of each layer with 1 or 0 whether it has experts, and has "
            f"{len(pattern)} entries for {num_layers} layers: {given}."
        )
    return tuple(number for number, entry in enumerate(pattern, 1) if str(entry) == "1")


def _pattern(name: str, text: str) -> "int | list[int]":
    """Return the value of a pattern such as ``([0]*3+[1])*2``, without running it as code."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"--{name} takes a whole number or a pattern such as [0,1]*12, got '{text}'."
        ) from None


def _value(node: ast.expr) -> "int | list[int]":
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > -1:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        lists = isinstance(left, list) + isinstance(right, list)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and lists == 1:
            return left * right  # type: ignore[operator]
    raise ValueError(ast.dump(node))
