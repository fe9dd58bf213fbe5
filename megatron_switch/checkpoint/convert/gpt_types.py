"""The decoder-only model types of Hugging Face, and which of them can compute a model.

Stock model types of ``transformers`` are held to what they compute: unnormalised top-1 routing of a
gated unit, RMSNorm, rotary positions, no biases. Neither of the two with experts has a capacity, so
a model whose experts dropped tokens computes there what it would have without drops.
"""

from dataclasses import dataclass

from megatron_switch.architecture.model import TRAINING_ONLY, Architecture, described
from megatron_switch.checkpoint.convert.gpt_names import (
    QWEN2_EXPERTS,
    QWEN_EXPERTS,
    SWITCH_EXPERTS,
    ExpertNames,
)
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import shown_flag

SWITCH_GPT = "switch_gpt"
DROPLESS = {"moe_expert_capacity_factor": -1.0, "switch_eval_capacity_factor": -1.0}
"""Routing of a model that drops no token."""

OF_TRAINING = tuple(
    each.name for each in described("gpt") if each.name in TRAINING_ONLY and each.metadata["own"]
)
"""Fields that change training alone, and for which stock types have no key."""


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
    if model_type.name == SWITCH_GPT:
        return ()
    notes: tuple[str, ...] = ()
    if _drops_tokens(model):
        notes += (
            f"{model_type.head} has no capacity: it computes every token's expert, where Megatron "
            "drops tokens that find their expert full. Outputs agree wherever nothing is dropped.",
        )
    lost = {
        shown_flag(name): value
        for name in OF_TRAINING
        if (value := getattr(model, name)) and (model.num_experts or name == "hidden_dropout")
    }
    if lost:
        notes += (
            f"{model_type.name} has no keys for settings of training, and the export does not keep "
            f"them: {', '.join(f'{flag} {value}' for flag, value in lost.items())}.",
        )
    return notes


def _drops_tokens(model: Architecture) -> bool:
    """Return whether experts have a capacity, in training or in evaluation."""
    factors = [model.routing.get(name) for name in DROPLESS]
    bounded = model.routing.get("switch_capacity") is not None
    bounded |= any(factor is not None and factor >= 0 for factor in factors)
    return bounded and bool(model.num_experts)
