"""The model whose memory the planner predicts here, and whose real steps are measured elsewhere."""

from typing import Any

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture

MODEL = Architecture(
    decoder=Stack(2, (1,)),
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=256,
    padded_vocab_size=1024,
    num_experts=8,
)
TRAINING: dict[str, Any] = {
    "seq_length": 128,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "precision": "fp32",
    "sharding": "replicated",
    "device": "cpu",
    "rotary": True,
    "fused_gate": False,
}
