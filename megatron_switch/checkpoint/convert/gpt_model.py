"""What a decoder-only model computes, in terms that belong to no program.

Between Megatron's arguments and a Hugging Face configuration stands one record; each side is read
into it and written from it. What the record cannot say is refused by name when it is read, because
a setting that is passed over makes another model without a word.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_switch.architecture.layer_pattern import stacks_of
from megatron_switch.checkpoint.convert.gpt_names import GptShape
from megatron_switch.errors import CheckpointError

ROUTING = (
    "moe_expert_capacity_factor",
    "switch_capacity",
    "switch_capacity_group",
    "switch_capacity_rounding",
    "switch_drop_order",
    "switch_eval_capacity_factor",
    "switch_min_capacity",
)
"""Attributes of Megatron's namespace that decide which tokens an expert computes."""

DROPLESS = {"moe_expert_capacity_factor": -1.0, "switch_eval_capacity_factor": -1.0}
"""Routing of a model that drops no token."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0, None),
    "heterogeneous_layers_config_path": (None,),
    "layernorm_zero_centered_gamma": (False, None),
    "moe_latent_size": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_num_groups": (None,),
    "moe_router_pre_softmax": (True, None),
    "moe_router_score_function": ("softmax", None),
    "moe_router_topk": (1, None),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_intermediate_size": (None, 0),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False, None),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False, None),
    "rope_type": (None, "rope"),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    "use_mup": (False, None),
    "window_size": (None,),
}
_ONLY_WITH_EXPERTS = "moe_"


@dataclass(frozen=True, kw_only=True)
class GptModel:
    """A decoder-only model: its tensors and what is computed with them."""

    shape: GptShape
    activation: str
    """Name in Hugging Face's table: silu, gelu, gelu_pytorch_tanh, relu2 or quick_gelu."""
    normalization: str
    """RMSNorm or LayerNorm."""
    epsilon: float
    position: str
    """rope, learned_absolute or none."""
    context: int
    """Positions of the longest sequence."""
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    llama3_factor: float | None = None
    """Factor of Llama 3.1's frequency scaling, where positions are so scaled."""
    routing: Mapping[str, Any] = field(default_factory=lambda: dict(DROPLESS))
    """Those of :data:`ROUTING` that are set."""

    @property
    def drops_tokens(self) -> bool:
        """Whether experts have a capacity, in training or in evaluation."""
        if not self.shape.num_experts:
            return False
        factors = [self.routing.get(name) for name in DROPLESS]
        return self.routing.get("switch_capacity") is not None or any(
            factor is not None and factor >= 0 for factor in factors
        )


def gpt_from_args(args: Namespace, *, vocab_size: int | None = None) -> GptModel:
    """Return the model that a checkpoint's stored arguments describe.

    Args:
        args: Megatron's namespace, as a run stores it.
        vocab_size: Rows of the embedding outside of Megatron; by default all of Megatron's.

    Raises:
        CheckpointError: The arguments describe what this record cannot say.
    """
    _refuse_unknown(args)
    experts = int(_of(args, "num_experts") or 0)
    groups = args.num_query_groups if _of(args, "group_query_attention") else None
    padded = int(args.padded_vocab_size)
    position = str(args.position_embedding_type)
    shape = GptShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_heads=args.num_attention_heads,
        num_groups=groups or args.num_attention_heads,
        head_channels=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=vocab_size or padded,
        padded_vocab_size=padded,
        positions=args.max_position_embeddings if position == "learned_absolute" else None,
        gated=bool(_of(args, "swiglu") or _of(args, "quick_geglu")),
        norm_bias=args.normalization == "LayerNorm",
        linear_bias=bool(args.add_bias_linear),
        qkv_bias=bool(_of(args, "add_qkv_bias")),
        qk_norm=bool(_of(args, "qk_layernorm")),
        tied=not args.untie_embeddings_and_output_weights,
        num_experts=experts,
        expert_hidden_size=int(_of(args, "moe_ffn_hidden_size") or args.ffn_hidden_size),
        sparse_layers=stacks_of(args)["decoder"].sparse_layers,
    )
    return GptModel(
        shape=shape,
        activation=_activation(args),
        normalization=args.normalization,
        epsilon=float(_of(args, "norm_epsilon") or _of(args, "layernorm_epsilon") or 1e-5),
        position=position,
        context=int(args.max_position_embeddings),
        rotary_base=float(_of(args, "rotary_base") or 10000.0),
        rotary_percent=float(_of(args, "rotary_percent") or 1.0),
        llama3_factor=args.rope_scaling_factor if _of(args, "use_rope_scaling") else None,
        routing={name: getattr(args, name) for name in ROUTING if hasattr(args, name)},
    )


def gpt_flags(model: GptModel) -> dict[str, Any]:
    """Return the flags of Megatron that describe a model, without dashes; True stands alone."""
    shape = model.shape
    flags: dict[str, Any] = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "num-attention-heads": shape.num_heads,
        "kv-channels": shape.head_channels,
        "seq-length": model.context,
        "max-position-embeddings": model.context,
        "normalization": model.normalization,
        "norm-epsilon": model.epsilon,
        "position-embedding-type": model.position,
    }
    if shape.num_groups != shape.num_heads:
        flags |= {"group-query-attention": True, "num-query-groups": shape.num_groups}
    if model.position == "rope":
        base = model.rotary_base
        flags["rotary-base"] = int(base) if base == int(base) else base
        if model.rotary_percent != 1.0:
            flags["rotary-percent"] = model.rotary_percent
    if model.llama3_factor is not None:
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": model.llama3_factor}
    switches = {
        "swiglu": shape.gated and model.activation == "silu",
        "quick-geglu": shape.gated and model.activation == "quick_gelu",
        "squared-relu": model.activation == "relu2",
        "openai-gelu": model.activation == "gelu_pytorch_tanh",
        "no-bias-gelu-fusion": model.activation == "gelu",  # the fused kernel approximates
        "disable-bias-linear": not shape.linear_bias,
        "add-qkv-bias": shape.qkv_bias,
        "qk-layernorm": shape.qk_norm,
        "untie-embeddings-and-output-weights": not shape.tied,
    }
    flags |= {name: True for name, is_set in switches.items() if is_set}
    if shape.num_experts:
        pattern = [int(layer in shape.sparse_layers) for layer in range(shape.num_layers)]
        flags |= {
            "num-experts": shape.num_experts,
            "moe-ffn-hidden-size": shape.expert_hidden_size,
            "moe-layer-freq": str(pattern).replace(" ", ""),
        }
        flags |= {
            name.replace("_", "-"): value
            for name, value in model.routing.items()
            if value is not None
        }
    return flags


def _activation(args: Namespace) -> str:
    if _of(args, "swiglu"):
        return "silu"
    if _of(args, "quick_geglu"):
        return "quick_gelu"
    if _of(args, "squared_relu"):
        return "relu2"
    fused = _of(args, "bias_gelu_fusion") and args.add_bias_linear  # approximates with tanh
    return "gelu_pytorch_tanh" if fused or _of(args, "openai_gelu") else "gelu"


def _refuse_unknown(args: Namespace) -> None:
    wrong = {
        name: getattr(args, name)
        for name, allowed in _NEUTRAL.items()
        if hasattr(args, name)
        and getattr(args, name) not in allowed
        and (_of(args, "num_experts") or not name.startswith(_ONLY_WITH_EXPERTS))
    }
    if args.position_embedding_type not in ("rope", "learned_absolute", "none"):
        wrong["position_embedding_type"] = args.position_embedding_type
    if wrong:
        found = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in wrong.items())
        raise CheckpointError(
            f"The checkpoint's model has parts that no conversion knows: {found}. Only models "
            "without them can be converted."
        )


def _of(args: Namespace, name: str) -> Any:
    return getattr(args, name, None)
