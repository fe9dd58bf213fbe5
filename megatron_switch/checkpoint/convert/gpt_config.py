"""``config.json`` of decoder-only models: read, and written for a model type that fits.

Stock model types of ``transformers`` are held to what they compute: unnormalised top-1 routing of a
gated unit, RMSNorm, rotary positions, no biases. Neither of the two with experts has a capacity, so
a model whose experts dropped tokens computes there what it would have without drops.

Most keys stand beside the fields of :class:`~megatron_switch.architecture.model.Architecture`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_switch.architecture.field_names import is_of_experts, read_field
from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import ROUTING, Architecture, described
from megatron_switch.checkpoint.convert.gpt_names import (
    QWEN2_EXPERTS,
    QWEN_EXPERTS,
    SWITCH_EXPERTS,
    ExpertNames,
)
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.errors import CheckpointError

SWITCH_GPT = "switch_gpt"
_POSITIONS = ("rope", "learned_absolute", "none")
_NORMS = ("RMSNorm", "LayerNorm")
_ACTIVATIONS = {True: ("silu", "quick_gelu"), False: ("gelu", "gelu_pytorch_tanh", "relu2")}
"""Nonlinearities that Megatron's flags can ask for, of units with a gate and without."""

_DROPLESS = {"moe_expert_capacity_factor": -1.0, "switch_eval_capacity_factor": -1.0}
"""Routing of a model that drops no token."""

_ABSENT = {
    "share_embeddings_and_output_weights": False,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "rotary_percent": 1.0,
}
"""What the absence of a key means; keys that are in neither table must be there."""


@dataclass(frozen=True)
class ModelType:
    """A decoder-only model type of Hugging Face, and what distinguishes it.

    Attributes:
        name: As ``model_type`` says it.
        head: Class that ``architectures`` names.
        experts: What the parts of a sparse layer are called; None in a dense type.
        qkv_bias: Whether query, key and value always have biases.
        qk_norm: Whether queries and keys always are normalised.
    """

    name: str
    head: str
    experts: ExpertNames | None
    qkv_bias: bool = False
    qk_norm: bool = False


GPT_TYPES = {
    each.name: each
    for each in (
        ModelType("llama", "LlamaForCausalLM", None),
        ModelType("qwen2", "Qwen2ForCausalLM", None, qkv_bias=True),
        ModelType("qwen3", "Qwen3ForCausalLM", None, qk_norm=True),
        ModelType("qwen2_moe", "Qwen2MoeForCausalLM", QWEN2_EXPERTS),
        ModelType("qwen3_moe", "Qwen3MoeForCausalLM", QWEN_EXPERTS, qk_norm=True),
        ModelType(SWITCH_GPT, "SwitchGptForCausalLM", SWITCH_EXPERTS),
    )
}


def read_gpt_config(config: Mapping[str, Any], where: str, *, multiple: int = 1) -> Architecture:
    """Return the model that a ``config.json`` describes.

    Args:
        config: Its content; ``model_type`` is a key of :data:`GPT_TYPES`.
        where: The file, for messages.
        multiple: Rows of the embedding become a multiple of this in Megatron.

    Raises:
        CheckpointError: It describes what Megatron's layers, or top-1 routing, cannot compute.
    """
    return _Reader(config, where).model(multiple)


class _Reader:
    """Reads one configuration."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where
        self._type = GPT_TYPES[config["model_type"]]
        self._own = self._type.name == SWITCH_GPT
        self._fields = config_fields(config, where, self._type.name)

    def model(self, multiple: int) -> Architecture:
        self._refuse_what_differs()
        fields = self._fields
        absent = _ABSENT | {
            # Qwen2-MoE has the biases unless its configuration says otherwise.
            "add_qkv_bias": self._type.name in ("qwen2", "qwen2_moe"),
            "qk_layernorm": self._type.qk_norm,
        }
        values = {
            each.name: read_field(each, fields, each.metadata["gpt"], absent)
            for each in described("gpt")
            if each.name not in _READ_APART and not is_of_experts(each)
        }
        heads, width = values["num_attention_heads"], values["hidden_size"]
        vocab_size, depth = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
        position = fields.choice("position_embedding_type", _POSITIONS, "rope")
        base, factor = self._rotary() if position == "rope" else (10000.0, None)
        experts = self._num_experts()
        values |= {
            "decoder": Stack(depth, self._sparse_layers(depth) if experts else ()),
            "num_query_groups": fields.divisor(
                "num_key_value_heads", heads, of=heads, what="heads"
            ),
            "kv_channels": fields.integer("head_dim", max(width // heads, 1)),
            "vocab_size": vocab_size,
            "padded_vocab_size": -(-vocab_size // multiple) * multiple,
            "normalization": fields.choice("normalization", _NORMS, "RMSNorm"),
            "activation_func": fields.choice(
                "hidden_act", _ACTIVATIONS[values["gated_linear_unit"]]
            ),
            "position_embedding_type": position,
            "rotary_base": base,
            "rope_scaling_factor": factor,
            "num_experts": experts,
            "moe_ffn_hidden_size": fields.integer("moe_intermediate_size") if experts else 0,
            "routing": self._routing(),
        }
        return Architecture(**values)

    def _refuse_what_differs(self) -> None:
        config = self._config
        allowed: dict[str, tuple[Any, ...]] = {"pretraining_tp": (1, None)}
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
        wrong = {
            name: config.get(name)
            for name, values in allowed.items()
            if config.get(name) not in values
        }
        if wrong:
            found = ", ".join(f"{name} {value}" for name, value in wrong.items())
            needed = ", ".join(f"{name} {allowed[name][0]}" for name in wrong)
            raise CheckpointError(
                f"{self._where}: this {self._type.name} model cannot be computed by a Switch GPT, "
                f"which needs {needed}; found {found}."
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
        new = self._config.get("rope_parameters")
        name = "rope_scaling" if new is None or new == {} else "rope_parameters"
        fields = self._fields.inner(name)
        entry = self._config.get(name) or {}
        base = self._fields.number("rope_theta", 10000.0, above=0)
        base = fields.number("rope_theta", base, above=0)
        kind = entry.get("rope_type") or entry.get("type") or "default"
        if kind == "default":
            return base, None
        known = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if kind == "llama3" and all(entry.get(name) == value for name, value in known.items()):
            return base, fields.number("factor", above=0)
        raise CheckpointError(
            f"{self._where}: positions are scaled as {kind} {entry}, but Megatron's GPT scales "
            "them only as Llama 3.1 does (low_freq_factor 1, high_freq_factor 4, "
            "original_max_position_embeddings 8192)."
        )

    def _routing(self) -> dict[str, Any]:
        if not self._own:
            return dict(_DROPLESS)
        self._fields.inner("routing")
        stored = self._config.get("routing") or {}
        return {name: stored[name] for name in ROUTING if name in stored}


_READ_APART = (
    "activation_func",
    "kv_channels",
    "normalization",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
)
"""Fields that take more than their key: a choice of words, or other fields' values."""


def choose_type(model: Architecture, wanted: str = "auto") -> tuple[ModelType, tuple[str, ...]]:
    """Return the model type to export to, and what the user should know about the choice.

    Args:
        model: Model to export.
        wanted: A key of :data:`GPT_TYPES`, or ``auto`` for a stock type where one fits.

    Raises:
        CheckpointError: The wanted type cannot compute the model; every reason is listed.
    """
    stock = _stock_type(model)
    if wanted == "auto":
        reasons = _misfits(model, stock)
        if not reasons:
            return stock, _notes(model, stock)
        note = (
            f"No stock architecture computes this model: {'; '.join(reasons)}. It is written in "
            f"this project's own layout, {SWITCH_GPT}."
        )
        return GPT_TYPES[SWITCH_GPT], (note,)
    model_type = GPT_TYPES[wanted]
    reasons = _misfits(model, model_type)
    if reasons:
        raise CheckpointError(
            f"--architecture {wanted} cannot compute this model: {'; '.join(reasons)}. Use "
            f"--architecture {SWITCH_GPT}, which can hold every Switch GPT."
        )
    return model_type, _notes(model, model_type)


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
    stack = model.decoder
    experts: dict[str, Any] = {
        "num_experts": model.num_experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": False,
    }
    if model_type.name == SWITCH_GPT:
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


def _stock_type(model: Architecture) -> ModelType:
    """Return the stock type that comes nearest."""
    if model.num_experts:
        return GPT_TYPES["qwen3_moe" if model.qk_layernorm else "qwen2_moe"]
    dense = "qwen2" if model.add_qkv_bias else "llama"
    return GPT_TYPES["qwen3" if model.qk_layernorm else dense]


def _misfits(model: Architecture, model_type: ModelType) -> list[str]:
    """Say why a type cannot compute a model; nothing where it can."""
    if model_type.name == SWITCH_GPT:
        return []
    takes_either_bias = model_type.name == "qwen2_moe"
    gated, position = model.gated_linear_unit, model.position_embedding_type
    checks = {
        "it normalises with LayerNorm": model.normalization != "RMSNorm",
        f"its positions are {position}, not rotary": position != "rope",
        "only a part of each head is rotated": model.rotary_percent != 1.0,
        f"its units are {model.activation_func}{' gated' * gated}, not gated silu": (
            not gated or model.activation_func != "silu"
        ),
        "its linear layers have biases": model.add_bias_linear,
        "its queries and keys are normalised": model.qk_layernorm and not model_type.qk_norm,
        "its queries and keys are not normalised": not model.qk_layernorm and model_type.qk_norm,
        "its query, key and value projections have biases": (
            model.add_qkv_bias and not (model_type.qkv_bias or takes_either_bias)
        ),
        "its query, key and value projections have no biases": (
            not model.add_qkv_bias and model_type.qkv_bias
        ),
        "it has experts": bool(model.num_experts) and model_type.experts is None,
        "it has no experts": not model.num_experts and model_type.experts is not None,
    }
    return [reason for reason, applies in checks.items() if applies]


def _notes(model: Architecture, model_type: ModelType) -> tuple[str, ...]:
    if not _drops_tokens(model) or model_type.name == SWITCH_GPT:
        return ()
    return (
        f"{model_type.head} has no capacity: it computes every token's expert, where Megatron "
        "drops tokens that find their expert full. Outputs agree wherever nothing is dropped.",
    )


def _drops_tokens(model: Architecture) -> bool:
    """Return whether experts have a capacity, in training or in evaluation."""
    factors = [model.routing.get(name) for name in _DROPLESS]
    bounded = model.routing.get("switch_capacity") is not None
    bounded |= any(factor is not None and factor >= 0 for factor in factors)
    return bounded and bool(model.num_experts)
