"""``config.json`` of decoder-only models: read, and written for a model type that fits.

Most keys stand beside the fields of :class:`~megatron_switch.architecture.model.Architecture`.
"""

from dataclasses import Field
from typing import Any, get_args, get_type_hints

from megatron_switch.architecture.field_names import is_of_experts, read_field
from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import ROUTING, Architecture, described
from megatron_switch.checkpoint.convert.gpt_types import DROPLESS, GPT_TYPES, SWITCH_GPT, ModelType
from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import KNOWN_FLAGS
from megatron_switch.utils.fields import Fields

_POSITIONS = ("rope", "learned_absolute", "none")
_NORMS = ("RMSNorm", "LayerNorm")
_ACTIVATIONS = {True: ("silu", "quick_gelu"), False: ("gelu", "gelu_pytorch_tanh", "relu2")}
"""Nonlinearities that Megatron's flags can ask for, of units with a gate and without."""
_FULL = "full_attention"

_ABSENT = {
    "share_embeddings_and_output_weights": False,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "rotary_percent": 1.0,
    "hidden_dropout": 0.0,  # stock models have none
    "attention_dropout": 0.0,
    "switch_expert_dropout": 0.0,
    "moe_aux_loss_coeff": None,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
}
"""What the absence of a key means; keys that are in neither table must be there."""


def read_gpt_config(fields: Fields, *, multiple: int = 1) -> Architecture:
    """Return the model that a ``config.json`` describes.

    Args:
        fields: Its values; ``model_type`` is a key of :data:`GPT_TYPES`.
        multiple: Rows of the embedding become a multiple of this in Megatron.

    Raises:
        CheckpointError: It describes what Megatron's layers, or top-1 routing, cannot compute.
    """
    return _Reader(fields).model(multiple)


class _Reader:
    """Reads one configuration."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._type = GPT_TYPES[fields.text("model_type")]
        self._own = self._type.name == SWITCH_GPT

    def model(self, multiple: int) -> Architecture:
        self._refuse_what_differs()
        fields, own, experts = self._fields, self._own, self._num_experts()
        values = {
            each.name: self._value(each)
            for each in described("gpt")
            if each.name not in _READ_APART and (experts or not is_of_experts(each))
        }
        if not values.get("moe_input_jitter_eps"):  # no jitter is what Megatron calls none
            values.pop("moe_input_jitter_eps", None)
        heads, width = values["num_attention_heads"], values["hidden_size"]
        vocab_size, depth = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
        position = fields.choice("position_embedding_type", _POSITIONS, "rope") if own else "rope"
        base, factor = self._rotary() if position == "rope" else (10000.0, None)
        activations = _ACTIVATIONS[values["gated_linear_unit"]]
        values |= {
            "decoder": Stack(depth, self._sparse_layers(depth) if experts else ()),
            "num_query_groups": fields.divisor(
                "num_key_value_heads", heads, of=heads, what="heads"
            ),
            "kv_channels": fields.integer("head_dim", max(width // heads, 1)),
            "vocab_size": vocab_size,
            "padded_vocab_size": -(-vocab_size // multiple) * multiple,
            "normalization": fields.choice("normalization", _NORMS) if own else "RMSNorm",
            "activation_func": fields.choice("hidden_act", activations),
            "position_embedding_type": position,
            "rotary_base": base,
            "rope_scaling_factor": factor,
            "num_experts": experts,
            "moe_ffn_hidden_size": fields.integer("moe_intermediate_size") if experts else 0,
            "routing": self._routing(),
        }
        return Architecture(**values)

    def _value(self, each: Field[Any]) -> Any:
        """Return the value of a field; stock types do not read keys of our own."""
        name, key = each.name, each.metadata["gpt"]
        absent = _ABSENT | {
            # Qwen2-MoE has the biases unless its configuration says otherwise.
            "add_qkv_bias": self._type.name in ("qwen2", "qwen2_moe"),
            "qk_layernorm": self._type.qk_norm,
        }
        is_read = self._own or not each.metadata["own"]
        if is_read or (key == "qkv_bias" and self._type.name == "qwen2_moe"):
            return read_field(each, self._fields, key, absent)
        return absent[name]

    def _refuse_what_differs(self) -> None:
        fields = self._fields
        allowed: dict[str, tuple[Any, ...]] = {
            "pretraining_tp": (1, None),
            "quantization_config": (None,),
        }
        if not self._own:
            allowed |= {
                "hidden_act": ("silu",),
                "mlp_bias": (False, None),
                "attention_bias": (False, None),
                "use_sliding_window": (False, None),
                "clip_qkv": (None,),
                "partial_rotary_factor": (1.0, None),
            }
        if self._num_experts():
            allowed |= {"num_experts_per_tok": (1,), "shared_expert_intermediate_size": (0, None)}
            if not self._own:
                allowed["norm_topk_prob"] = (False,)
        wrong = [name for name, values in allowed.items() if not fields.one_of(name, values)]
        if fields.has("layer_types") and set(fields.texts("layer_types")) != {_FULL}:
            wrong.append("layer_types")
            allowed["layer_types"] = (f"{_FULL} for every layer",)
        if wrong:
            found = ", ".join(f"{name} {fields.values.get(name)}" for name in wrong)
            needed = ", ".join(f"{name} {allowed[name][0]}" for name in wrong)
            raise CheckpointError(
                f"{fields.source.name}: this {self._type.name} model cannot be computed by a "
                f"Switch GPT, which needs {needed}; found {found}."
            )

    def _num_experts(self) -> int:
        if self._type.experts is None:
            return 0
        names = ("num_experts", "num_local_experts")
        return next((n for name in names if (n := self._fields.integer(name, 0, least=0))), 0)

    def _sparse_layers(self, depth: int) -> tuple[int, ...]:
        fields = self._fields
        if self._own:
            return fields.indices("sparse_layers", depth)
        dense = fields.indices("mlp_only_layers", depth)
        step = fields.integer("decoder_sparse_step", 1)
        return tuple(i for i in range(depth) if i not in dense and (i + 1) % step == 0)

    def _rotary(self) -> tuple[float, float | None]:
        """Return the base and Llama 3.1's factor, from the keys of transformers 4 or 5."""
        old, new = map(self._fields.inner, ("rope_scaling", "rope_parameters"))
        entry = new if new.values else old
        bases = {each.number("rope_theta", None, above=0) for each in (self._fields, old, new)}
        kinds = [_without_base(each) for each in (old, new) if each.values]
        if len(bases - {None}) > 1 or (len(kinds) == 2 and kinds[0] != kinds[1]):
            raise self._fields.error(
                "rope_parameters",
                "rope_theta, rope_scaling and rope_parameters contradict each other, and "
                "transformers takes one or another, depending on its version. Keep one.",
            )
        base = next((float(base) for base in bases if base is not None), 10000.0)
        kind = entry.text("rope_type", None) or entry.text("type", "default")
        if kind == "default" and entry.one_of("partial_rotary_factor", (None, 1.0)):
            return base, None
        if kind == "llama3" and all(entry.one_of(key, (value,)) for key, value in _LLAMA3.items()):
            return base, entry.number("factor", above=0)
        raise CheckpointError(
            f"{self._fields.source.name}: positions are scaled as {kind} {entry.values}, but "
            "Megatron's GPT scales them only as Llama 3.1 does (low_freq_factor 1, "
            "high_freq_factor 4, original_max_position_embeddings 8192)."
        )

    def _routing(self) -> dict[str, Any]:
        if not self._own:
            return dict(DROPLESS)
        routing = self._fields.inner("routing")
        routing.only(ROUTING)
        return {name: _routing_value(routing, name) for name in ROUTING if routing.has(name)}


def _without_base(entry: Fields) -> dict[str, Any]:
    """Return how positions are scaled, under the key that both versions of transformers have."""
    values = {key: value for key, value in entry.values.items() if key != "rope_theta"}
    return {"rope_type": values.pop("type", "default"), **values}


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""How Megatron scales rotary frequencies, beside the factor."""


def _routing_value(routing: Fields, name: str) -> Any:
    """Return one of :data:`ROUTING`, of its flag's type and in its flag's range."""
    kind = get_type_hints(SwitchConfig).get(name.removeprefix(FLAG_PREFIX), float)
    if words := [word for word in get_args(kind) if isinstance(word, str)]:
        return routing.choice(name, words)
    value = routing.number(name) if kind is float else routing.integer(name, least=0)
    limits = KNOWN_FLAGS[name].range
    if limits is not None and limits.problem(name, value):
        raise routing.wrong(name, f"a finite number, {limits}")
    return value


_READ_APART = (
    "activation_func",
    "kv_channels",
    "moe_ffn_hidden_size",
    "normalization",
    "num_experts",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
)
"""Fields that take more than their key: a choice of words, or other fields' values."""


def write_gpt_config(model: Architecture, model_type: ModelType, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        model: Model to export, which fits the type.
        model_type: What :func:`choose_type` returned.
        dtype: Name of the weights' type, such as ``bfloat16``.
    """
    own = model_type.name == SWITCH_GPT
    config: dict[str, Any] = {
        "architectures": [model_type.head],
        "model_type": model_type.name,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 reads
        "num_hidden_layers": model.decoder.num_layers,
        "vocab_size": model.vocab_size,
        "use_cache": True,
    }
    for each in described("gpt"):
        if not is_of_experts(each) and (own or not each.metadata["own"]):
            config[each.metadata["gpt"]] = getattr(model, each.name)
    if model.position_embedding_type == "rope":
        rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
        if model.rope_scaling_factor is not None:
            rotary |= {
                "rope_type": "llama3",
                "factor": model.rope_scaling_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            config["rope_scaling"] = {k: v for k, v in rotary.items() if k != "rope_theta"}
        config["rope_parameters"] = rotary
    else:
        del config["rope_theta"]
    if model_type.name in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if model_type.name == "llama":
        config["mlp_bias"] = False
    return config | _experts_of(model, model_type) if model.num_experts else config


def _experts_of(model: Architecture, model_type: ModelType) -> dict[str, Any]:
    stack, own = model.decoder, model_type.name == SWITCH_GPT
    experts: dict[str, Any] = {"num_experts_per_tok": 1, "norm_topk_prob": False}
    for each in filter(is_of_experts, described("gpt")):
        value = getattr(model, each.name)
        if (own or not each.metadata["own"]) and value is not None:
            experts[each.metadata["gpt"]] = value
    if own:
        routing = {name: value for name, value in model.routing.items() if value is not None}
        return experts | {"sparse_layers": list(stack.sparse_layers), "routing": routing}
    if stack.sparse_layers == tuple(range(1, stack.num_layers, 2)):
        experts |= {"decoder_sparse_step": 2, "mlp_only_layers": []}
    else:
        dense = [layer for layer, is_sparse in enumerate(stack.layer_freq) if not is_sparse]
        experts |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if model_type.name == "qwen2_moe":
        experts |= {"shared_expert_intermediate_size": 0, "qkv_bias": model.add_qkv_bias}
    return experts
