"""``config.json`` of decoder-only models: read, and written for an architecture that fits.

Stock architectures of ``transformers`` are held to what they compute: unnormalised top-1 routing
of a gated unit, RMSNorm, rotary positions, no biases. Neither of the two with experts has a
capacity, so a model whose experts dropped tokens computes there what it would have without drops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_switch.checkpoint.convert.gpt_model import DROPLESS, ROUTING, GptModel
from megatron_switch.checkpoint.convert.gpt_names import (
    QWEN2_EXPERTS,
    QWEN_EXPERTS,
    SWITCH_EXPERTS,
    ExpertNames,
    GptShape,
)
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.errors import CheckpointError

SWITCH_GPT = "switch_gpt"
_POSITIONS = ("rope", "learned_absolute", "none")
_NORMS = ("RMSNorm", "LayerNorm")
_UNITS = {True: ("silu", "quick_gelu"), False: ("gelu", "gelu_pytorch_tanh", "relu2")}
"""Nonlinearities that Megatron's flags can ask for, of units with a gate and without."""


@dataclass(frozen=True)
class Layout:
    """A model type of Hugging Face's, and what tells it from the others."""

    model_type: str
    architecture: str
    experts: ExpertNames | None
    qkv_bias: bool = False
    qk_norm: bool = False


LAYOUTS = {
    layout.model_type: layout
    for layout in (
        Layout("llama", "LlamaForCausalLM", None),
        Layout("qwen2", "Qwen2ForCausalLM", None, qkv_bias=True),
        Layout("qwen3", "Qwen3ForCausalLM", None, qk_norm=True),
        Layout("qwen2_moe", "Qwen2MoeForCausalLM", QWEN2_EXPERTS),
        Layout("qwen3_moe", "Qwen3MoeForCausalLM", QWEN_EXPERTS, qk_norm=True),
        Layout(SWITCH_GPT, "SwitchGptForCausalLM", SWITCH_EXPERTS),
    )
}


def read_gpt_config(config: Mapping[str, Any], where: str, *, multiple: int = 1) -> GptModel:
    """Return the model that a ``config.json`` describes.

    Args:
        config: Its content; ``model_type`` is a key of :data:`LAYOUTS`.
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
        self._layout = LAYOUTS[config["model_type"]]
        self._own = self._layout.model_type == SWITCH_GPT
        self._fields = config_fields(config, where, self._layout.model_type)

    def model(self, multiple: int) -> GptModel:
        self._refuse_what_differs()
        fields = self._fields
        position = "rope"
        normalization = "RMSNorm"
        if self._own:
            position = fields.choice("position_embedding_type", _POSITIONS, position)
            normalization = fields.choice("normalization", _NORMS, normalization)
        gated = fields.flag("gated", True) if self._own else True
        context = fields.integer("max_position_embeddings")
        base, factor = self._rotary() if position == "rope" else (10000.0, None)
        vocab_size = fields.integer("vocab_size")
        experts = self._num_experts()
        heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        shape = GptShape(
            num_layers=fields.integer("num_hidden_layers"),
            hidden_size=width,
            ffn_hidden_size=fields.integer("intermediate_size"),
            num_heads=heads,
            num_groups=fields.divisor("num_key_value_heads", heads, of=heads, what="heads"),
            head_channels=fields.integer("head_dim", max(width // heads, 1)),
            vocab_size=vocab_size,
            padded_vocab_size=-(-vocab_size // multiple) * multiple,
            positions=context if position == "learned_absolute" else None,
            gated=gated,
            norm_bias=normalization == "LayerNorm",
            linear_bias=fields.flag("mlp_bias", False),
            qkv_bias=self._qkv_bias(),
            qk_norm=fields.flag("qk_norm", self._layout.qk_norm),
            tied=fields.flag("tie_word_embeddings", False),
            num_experts=experts,
            expert_hidden_size=fields.integer("moe_intermediate_size") if experts else 0,
            sparse_layers=self._sparse_layers() if experts else (),
        )
        return GptModel(
            shape=shape,
            activation=fields.choice("hidden_act", _UNITS[gated]),
            normalization=normalization,
            epsilon=fields.number("rms_norm_eps", above=0),
            position=position,
            context=context,
            rotary_base=base,
            rotary_percent=fields.number("partial_rotary_factor", 1.0, above=0),
            llama3_factor=factor,
            routing=self._routing(),
        )

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
            allowed |= {
                "num_experts_per_tok": (1,),
                "shared_expert_intermediate_size": (0, None),
            }
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
                f"{self._where}: this {self._layout.model_type} model cannot be computed by a "
                f"Switch GPT, which needs {needed}; found {found}."
            )

    def _num_experts(self) -> int:
        if self._layout.experts is None:
            return 0
        names = ("num_experts", "num_local_experts")
        return next((n for name in names if (n := self._fields.integer(name, 0, least=0))), 0)

    def _qkv_bias(self) -> bool:
        default = {"qwen2": True, "qwen2_moe": True}.get(self._layout.model_type, False)
        return self._fields.flag("qkv_bias", default)

    def _sparse_layers(self) -> tuple[int, ...]:
        fields = self._fields
        depth = fields.integer("num_hidden_layers")
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
            return dict(DROPLESS)
        self._fields.inner("routing")
        stored = self._config.get("routing") or {}
        return {name: stored[name] for name in ROUTING if name in stored}


def choose_layout(model: GptModel, wanted: str = "auto") -> tuple[Layout, tuple[str, ...]]:
    """Return the layout to export to, and what the user should know about the choice.

    Args:
        model: Model to export.
        wanted: A key of :data:`LAYOUTS`, or ``auto`` for a stock architecture where one fits.

    Raises:
        CheckpointError: The wanted architecture cannot compute the model; every reason is listed.
    """
    stock = _stock_layout(model)
    if wanted == "auto":
        reasons = _misfits(model, stock)
        if not reasons:
            return stock, _notes(model, stock)
        note = (
            f"No stock architecture computes this model: {'; '.join(reasons)}. It is written in "
            f"this project's own layout, {SWITCH_GPT}."
        )
        return LAYOUTS[SWITCH_GPT], (note,)
    layout = LAYOUTS[wanted]
    reasons = _misfits(model, layout)
    if reasons:
        raise CheckpointError(
            f"--architecture {wanted} cannot compute this model: {'; '.join(reasons)}. Use "
            f"--architecture {SWITCH_GPT}, which can hold every Switch GPT."
        )
    return layout, _notes(model, layout)


def write_gpt_config(model: GptModel, layout: Layout, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        model: Model to export, which fits the layout.
        layout: What :func:`choose_layout` returned.
        dtype: Name of the weights' type, such as ``bfloat16``.
    """
    shape = model.shape
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 reads
        "hidden_act": model.activation,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.head_channels,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.epsilon,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
    }
    if model.position == "rope":
        rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
        if model.llama3_factor is not None:
            rotary |= {
                "rope_type": "llama3",
                "factor": model.llama3_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            config["rope_scaling"] = {k: v for k, v in rotary.items() if k != "rope_theta"}
        config |= {"rope_parameters": rotary, "rope_theta": model.rotary_base}
    if layout.model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if layout.model_type == "llama":
        config["mlp_bias"] = False
    if shape.num_experts:
        config |= _experts_of(model, layout)
    if layout.model_type == SWITCH_GPT:
        config |= {
            "gated": shape.gated,
            "mlp_bias": shape.linear_bias,
            "normalization": model.normalization,
            "partial_rotary_factor": model.rotary_percent,
            "position_embedding_type": model.position,
            "qk_norm": shape.qk_norm,
            "qkv_bias": shape.qkv_bias,
        }
    return config


def _experts_of(model: GptModel, layout: Layout) -> dict[str, Any]:
    shape = model.shape
    experts: dict[str, Any] = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": shape.expert_hidden_size,
        "norm_topk_prob": False,
    }
    if layout.model_type == SWITCH_GPT:
        routing = {name: value for name, value in model.routing.items() if value is not None}
        return experts | {"sparse_layers": list(shape.sparse_layers), "routing": routing}
    if shape.sparse_layers == tuple(range(1, shape.num_layers, 2)):
        experts |= {"decoder_sparse_step": 2, "mlp_only_layers": []}
    else:
        dense = [layer for layer in range(shape.num_layers) if layer not in shape.sparse_layers]
        experts |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if layout.model_type == "qwen2_moe":
        experts |= {"shared_expert_intermediate_size": 0, "qkv_bias": shape.qkv_bias}
    return experts


def _stock_layout(model: GptModel) -> Layout:
    """Return the stock layout that comes nearest."""
    shape = model.shape
    if shape.num_experts:
        return LAYOUTS["qwen3_moe" if shape.qk_norm else "qwen2_moe"]
    return LAYOUTS["qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"]


def _misfits(model: GptModel, layout: Layout) -> list[str]:
    """Say why a layout cannot compute a model; nothing where it can."""
    if layout.model_type == SWITCH_GPT:
        return []
    shape = model.shape
    takes_either_bias = layout.model_type == "qwen2_moe"
    checks = {
        "it normalises with LayerNorm": model.normalization != "RMSNorm",
        f"its positions are {model.position}, not rotary": model.position != "rope",
        "only a part of each head is rotated": model.rotary_percent != 1.0,
        f"its units are {model.activation}{' gated' * shape.gated}, not gated silu": (
            not shape.gated or model.activation != "silu"
        ),
        "its linear layers have biases": shape.linear_bias,
        "its queries and keys are normalised": shape.qk_norm and not layout.qk_norm,
        "its queries and keys are not normalised": not shape.qk_norm and layout.qk_norm,
        "its query, key and value projections have biases": (
            shape.qkv_bias and not (layout.qkv_bias or takes_either_bias)
        ),
        "its query, key and value projections have no biases": (
            not shape.qkv_bias and layout.qkv_bias
        ),
        "it has experts": bool(shape.num_experts) and layout.experts is None,
        "it has no experts": not shape.num_experts and layout.experts is not None,
    }
    return [reason for reason, applies in checks.items() if applies]


def _notes(model: GptModel, layout: Layout) -> tuple[str, ...]:
    if not model.drops_tokens or layout.model_type == SWITCH_GPT:
        return ()
    return (
        f"{layout.architecture} has no capacity: it computes every token's expert, where Megatron "
        "drops tokens that find their expert full. Outputs agree wherever nothing is dropped.",
    )
