"""Tiny Switch-T5s, and the way of Hugging Face's weights into them: the harness of T5's tests."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.activations import ACT2FN

from megatron_switch.config import SwitchConfig
from megatron_switch.models.t5 import SwitchT5Model
from megatron_switch.moe.switch_mlp import switch_mlp_spec

VOCAB = 96
ENCODER_PATTERN = [0, 1, 0, 1]
DECODER_PATTERN = [0, 1]
WIDTH, HEADS, CHANNELS, HIDDEN, EXPERTS = 20, 4, 8, 28, 4
"""Heads x channels differs from the width, as in Switch-C."""

gelu = functools.partial(F.gelu, approximate="tanh")


def t5_config(pattern: list[int], *, gated: bool = False, **changes: Any) -> TransformerConfig:
    """Settings of one stack, without dropout."""
    settings: dict[str, Any] = {
        "num_layers": len(pattern),
        "moe_layer_freq": pattern,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.0,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "kv_channels": CHANNELS,
        "ffn_hidden_size": HIDDEN,
        "moe_ffn_hidden_size": HIDDEN,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "activation_func": gelu if gated else F.relu,
        "gated_linear_unit": gated,
        "bias_activation_fusion": False,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(settings | changes))


def build_t5(
    switch: SwitchConfig, *, tied: bool = True, parallel_output: bool = False, **changes: Any
) -> SwitchT5Model:
    encoder, decoder = (t5_config(p, **changes) for p in (ENCODER_PATTERN, DECODER_PATTERN))
    return SwitchT5Model(
        encoder_config=encoder,
        decoder_config=decoder,
        encoder_mlp_spec=switch_mlp_spec(switch, seed=1),
        decoder_mlp_spec=switch_mlp_spec(switch, seed=1, layers_before=len(ENCODER_PATTERN)),
        vocab_size=VOCAB,
        max_sequence_length=64,
        tied_head=tied,
        parallel_output=parallel_output,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def hugging_face_model(
    *, tied: bool, gated: bool, capacity: int
) -> SwitchTransformersForConditionalGeneration:
    """A random model of the same sizes, with norms and biases that are not their start values."""
    config = SwitchTransformersConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=CHANNELS,
        d_ff=HIDDEN,
        num_heads=HEADS,
        num_layers=len(ENCODER_PATTERN),
        num_sparse_encoder_layers=sum(ENCODER_PATTERN),
        num_decoder_layers=len(DECODER_PATTERN),
        num_sparse_decoder_layers=sum(DECODER_PATTERN),
        num_experts=EXPERTS,
        expert_capacity=capacity,
        dense_act_fn="gelu_new" if gated else "relu",
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
        pad_token_id=0,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    model = SwitchTransformersForConditionalGeneration(config)
    if gated:  # which Hugging Face lacks: released XXL weights have it
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child).__name__ == "SwitchTransformersDenseActDense":
                    setattr(module, name, GatedFeedForward())
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):  # apart where the head is: one in T5's files
            stack.embed_tokens.weight.copy_(model.shared.weight)
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                parameter.normal_()
    return model.eval()


class GatedFeedForward(torch.nn.Module):
    """T5 1.1's feed-forward layer, in the place of the ungated one."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wi_1 = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wo = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(ACT2FN["gelu_new"](self.wi_0(x)) * self.wi_1(x))


def converted(weights: dict[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Hugging Face's weights under the names and in the shapes of our model on one rank."""
    ours = {"embedding.word_embeddings.weight": weights["shared.weight"]}
    if not tied:
        ours["output_layer.weight"] = weights["lm_head.weight"]
        ours["lm_head.output_layer.weight"] = weights["lm_head.weight"]
    for stack, pattern in (("encoder", ENCODER_PATTERN), ("decoder", DECODER_PATTERN)):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ours[f"{stack}_relative_pos_emb.relative_attention_bias.weight"] = weights[first]
        ours[f"{stack}.final_layernorm.weight"] = weights[f"{stack}.final_layer_norm.weight"]
        for layer, is_sparse in enumerate(pattern):
            theirs = f"{stack}.block.{layer}.layer"
            name = f"{stack}.layers.{layer}"
            last = 1 if stack == "encoder" else 2
            ours |= {
                f"{name}.{key}": value
                for key, value in _attention(weights, theirs, cross=last == 2).items()
            }
            ours[f"{name}.pre_mlp_layernorm.weight"] = weights[f"{theirs}.{last}.layer_norm.weight"]
            mlp = f"{theirs}.{last}.mlp"
            if not is_sparse:
                wi, wo = _feed_forward(weights, mlp)
                ours[f"{name}.mlp.linear_fc1.weight"] = wi
                ours[f"{name}.mlp.linear_fc2.weight"] = wo
                continue
            ours[f"{name}.mlp.router.weight"] = weights[f"{mlp}.router.classifier.weight"]
            pairs = [_feed_forward(weights, f"{mlp}.experts.expert_{e}") for e in range(EXPERTS)]
            ours[f"{name}.mlp.experts.weight1"] = torch.stack([wi for wi, _ in pairs])
            ours[f"{name}.mlp.experts.weight2"] = torch.stack([wo for _, wo in pairs])
    return ours


def _attention(weights: dict[str, Tensor], layer: str, *, cross: bool) -> dict[str, Tensor]:
    mine = f"{layer}.0.SelfAttention"
    ours = {
        "input_layernorm.weight": weights[f"{layer}.0.layer_norm.weight"],
        "self_attention.linear_qkv.weight": _by_head(weights, mine, "qkv"),
        "self_attention.linear_proj.weight": weights[f"{mine}.o.weight"],
    }
    if cross:
        other = f"{layer}.1.EncDecAttention"
        ours |= {
            "pre_cross_attn_layernorm.weight": weights[f"{layer}.1.layer_norm.weight"],
            "cross_attention.linear_q.weight": weights[f"{other}.q.weight"],
            "cross_attention.linear_kv.weight": _by_head(weights, other, "kv"),
            "cross_attention.linear_proj.weight": weights[f"{other}.o.weight"],
        }
    return ours


def _by_head(weights: dict[str, Tensor], attention: str, letters: str) -> Tensor:
    parts = [weights[f"{attention}.{x}.weight"].view(HEADS, CHANNELS, WIDTH) for x in letters]
    return torch.cat(parts, dim=1).reshape(-1, WIDTH)


def _feed_forward(weights: dict[str, Tensor], mlp: str) -> tuple[Tensor, Tensor]:
    if f"{mlp}.wi.weight" in weights:
        return weights[f"{mlp}.wi.weight"], weights[f"{mlp}.wo.weight"]
    halves = [weights[f"{mlp}.wi_{half}.weight"] for half in (0, 1)]
    return torch.cat(halves), weights[f"{mlp}.wo.weight"]


def copy_shards(model: SwitchT5Model, whole: dict[str, Tensor]) -> None:
    """Fill a model's parameters with this rank's parts of whole tensors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(model, name, parameter, whole[name]))


def shard(model: SwitchT5Model, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole weight or gradient."""
    groups = model.pg_collection
    tensor = groups.tp
    if ".experts." in name:
        whole = whole.chunk(groups.ep.size())[groups.ep.rank()]
        tensor = groups.expt_tp
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    halves = whole.chunk(parameter.partition_stride, dim=parameter.partition_dim)
    parts = [
        half.chunk(tensor.size(), dim=parameter.partition_dim)[tensor.rank()] for half in halves
    ]
    return torch.cat(parts, dim=parameter.partition_dim)
