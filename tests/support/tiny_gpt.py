"""Tiny GPTs inside the emulation: the harness of this folder's tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.models.gpt import switch_gpt_layer_spec

VOCAB = 64
SEQ = 16
BATCH = 2

stock_moe = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=2)
"""Builder of Megatron's own MoE layer, in the place where SwitchMLP will stand."""

MOE: dict[str, Any] = {
    "num_moe_experts": 2,
    "moe_layer_freq": [0, 1],
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.0,
}


@contextmanager
def model_parallel(**sizes: int) -> Iterator[None]:
    """Enter the emulation on this rank and build Megatron's groups of these sizes."""
    with cuda_on_cpu():
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def tiny_config(**changes: Any) -> TransformerConfig:
    """Settings of a two-layer model without dropout."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(settings | changes))


def switch_spec(config: TransformerConfig, **stage: Any) -> TransformerBlockSubmodules:
    """The block under test, with Megatron's own MoE layer as the sparse MLP."""
    model_config = SimpleNamespace(transformer=config)
    return switch_gpt_layer_spec(model_config, switch_mlp_spec=stock_moe, **stage)


def stock_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The block that Megatron itself would build."""
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )


def build_gpt(config: TransformerConfig, spec: TransformerBlockSubmodules, **choices: Any) -> Any:
    """A GPT whose logits are gathered over the tensor-parallel ranks."""
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        parallel_output=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **({"position_embedding_type": "rope"} | choices),
    )


def tokens_BS() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(7))


def logits(model: Any, ids_BS: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    positions_BS = torch.arange(ids_BS.size(1)).expand_as(ids_BS)
    return model(ids_BS, positions_BS, attention_mask)
