"""Small models of ``transformers`` with random weights, saved where a test wants them."""

from pathlib import Path
from typing import Any

import torch
import transformers

GPT: dict[str, Any] = {
    "vocab_size": 99,  # needs padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
}
T5: dict[str, Any] = {  # heads x channels is not the width, and the stacks are not equally deep
    "vocab_size": 99,
    "d_model": 20,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 28,
    "num_layers": 4,
    "num_decoder_layers": 2,
}


def config(model_type: str, **changes: Any) -> Any:
    """Return the configuration of a model."""
    return _CONFIGS[model_type](**changes)[0]


def build(model_type: str, **changes: Any) -> torch.nn.Module:
    """Return a model whose weights, norms and tables included, are random and not small."""
    settings, head = _CONFIGS[model_type](**changes)
    torch.manual_seed(0)
    model = head(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
        if hasattr(model, "encoder"):  # an untied T5 of transformers 5 has three embeddings
            for stack in (model.encoder, model.decoder):
                stack.embed_tokens.weight.copy_(model.shared.weight)
    return model


def save(folder: Path, model_type: str, **changes: Any) -> torch.nn.Module:
    """Build a model, save it and return it."""
    shards = {k: changes.pop(k) for k in ("max_shard_size",) if k in changes}
    model = build(model_type, **changes)
    model.save_pretrained(folder, **shards)
    return model


_CONFIGS = {
    "llama": lambda **kw: (
        transformers.LlamaConfig(**{**GPT, **kw}),
        transformers.LlamaForCausalLM,
    ),
    "qwen2": lambda **kw: (
        transformers.Qwen2Config(**{**GPT, **kw}),
        transformers.Qwen2ForCausalLM,
    ),
    "qwen3": lambda **kw: (
        transformers.Qwen3Config(**{**GPT, "head_dim": 12, **kw}),
        transformers.Qwen3ForCausalLM,
    ),
    "qwen2_moe": lambda **kw: (
        transformers.Qwen2MoeConfig(
            **{**GPT, **EXPERTS, "shared_expert_intermediate_size": 0, "qkv_bias": False, **kw},
        ),
        transformers.Qwen2MoeForCausalLM,
    ),
    "qwen3_moe": lambda **kw: (
        transformers.Qwen3MoeConfig(**{**GPT, **EXPERTS, "head_dim": 12, **kw}),
        transformers.Qwen3MoeForCausalLM,
    ),
    "switch_transformers": lambda **kw: (
        transformers.SwitchTransformersConfig(
            **{
                **T5,
                "num_experts": 6,
                "expert_capacity": 3,
                "num_sparse_encoder_layers": 2,
                "num_sparse_decoder_layers": 1,
                **kw,
            },
        ),
        transformers.SwitchTransformersForConditionalGeneration,
    ),
    "t5": lambda **kw: (
        transformers.T5Config(**{**T5, **kw}),
        transformers.T5ForConditionalGeneration,
    ),
}
