"""One model, described once: what training, planner, converter and launcher know of it.

Every fact has one name, which is Megatron's. A field says what other formats call it, so that
most of them need one line here and none elsewhere::

    layernorm_epsilon: float = field(
        default=1e-5,
        metadata=known_as(gpt="rms_norm_eps", t5="layer_norm_epsilon", flag="norm-epsilon"),
    )

is read from Megatron's arguments (:meth:`Architecture.from_args`) and from flags
(:mod:`megatron_switch.architecture.model_flags`), written as a flag
(:meth:`Architecture.to_flags`), and read from and written to the ``config.json`` of a decoder-only
model and of a T5 (:mod:`megatron_switch.checkpoint.convert`). What takes more than a name -
positions, activation, grouped queries, layers - is spelt out in these functions.

What a field decides beyond that is elsewhere: parameters in
:mod:`megatron_switch.architecture.parameters`, names of tensors in the converter.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self

from megatron_switch.architecture.field_names import (
    FLOATS,
    Family,
    flag_of,
    is_of_experts,
    known_as,
)
from megatron_switch.architecture.layer_pattern import Stack, stacks_of
from megatron_switch.flags.argv import attribute_of, flag_key
from megatron_switch.layout.model_rules import LayoutConstraints

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

TRAINING_ONLY = (
    "attention_dropout",
    "hidden_dropout",
    "switch_expert_dropout",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
)
"""Fields that do not change what a trained model computes."""

T5_ARGUMENTS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
}
"""Arguments that are another default in a T5, or what a T5 is."""

_ALSO_OF_A_T5 = (
    *T5_ARGUMENTS,
    "attention_dropout",
    "moe_ffn_hidden_size",
    "position_embedding_type",
    "switch_expert_dropout",
)
"""Fields that a T5 has although its ``config.json`` has no key for them."""

_GATED_GELU = "gated-gelu"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only model (GPT) or an encoder-decoder (T5), dense or with experts.

    A size of 0 is filled in with what Megatron takes where its flag is not given.
    """

    decoder: Stack
    encoder: Stack | None = None
    """None in a GPT."""
    hidden_size: int = field(metadata=known_as("hidden_size", "d_model"))
    num_attention_heads: int = field(metadata=known_as("num_attention_heads", "num_heads"))
    """Query heads."""
    num_query_groups: int = field(default=0, metadata=known_as("num_key_value_heads"))
    """Key-value heads."""
    kv_channels: int = field(default=0, metadata=known_as("head_dim", "d_kv"))
    """Width of a head."""
    ffn_hidden_size: int = field(default=0, metadata=known_as("intermediate_size", "d_ff"))
    """Hidden width of a dense layer."""
    num_experts: int = field(default=0, metadata=known_as("num_experts", "num_experts"))
    """Experts of a sparse layer; 0 in a dense model."""
    moe_ffn_hidden_size: int = field(default=0, metadata=known_as("moe_intermediate_size"))
    """Hidden width of an expert."""
    padded_vocab_size: int = 0
    """Rows of the embedding; 0 before a tokenizer has been read."""
    vocab_size: int = 0
    """Rows of the embedding outside of Megatron, where none are padding."""
    share_embeddings_and_output_weights: bool = field(
        default=True,
        metadata=known_as(
            "tie_word_embeddings", "tie_word_embeddings", off="untie-embeddings-and-output-weights"
        ),
    )
    """Whether the head is the embedding."""
    gated_linear_unit: bool = field(default=False, metadata=known_as("gated", own=True))
    """Whether feed-forward layers are gated (SwiGLU, GEGLU)."""
    activation_func: str = field(default="gelu", metadata=known_as("hidden_act"))
    """By the name in Hugging Face's table: relu, relu2, silu, gelu, gelu_pytorch_tanh,
    quick_gelu."""
    add_bias_linear: bool = field(
        default=False, metadata=known_as("mlp_bias", off="disable-bias-linear", own=True)
    )
    """Whether linear layers of attention and dense layers have a bias."""
    add_qkv_bias: bool = field(default=False, metadata=known_as("qkv_bias", own=True))
    """Whether the projection to query, key and value has one in any case."""
    normalization: Literal["RMSNorm", "LayerNorm"] = field(
        default="LayerNorm", metadata=known_as("normalization", own=True)
    )
    """LayerNorm has a weight and a bias, RMSNorm a weight."""
    layernorm_epsilon: float = field(
        default=1e-5,
        metadata=known_as("rms_norm_eps", "layer_norm_epsilon", flag="norm-epsilon", above=0),
    )
    qk_layernorm: bool = field(default=False, metadata=known_as("qk_norm", own=True))
    """Whether queries and keys are normalised."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = field(
        default="rope", metadata=known_as("position_embedding_type", own=True)
    )
    max_position_embeddings: int = field(default=0, metadata=known_as("max_position_embeddings"))
    """Positions of the longest sequence."""
    rotary_base: float = field(default=10000.0, metadata=known_as("rope_theta", above=0))
    rotary_percent: float = field(
        default=1.0, metadata=known_as("partial_rotary_factor", own=True, above=0)
    )
    rope_scaling_factor: float | None = None
    """Factor of Llama 3.1's frequency scaling; None where positions are not scaled."""
    relative_attention_num_buckets: int = field(
        default=32, metadata=known_as(t5="relative_attention_num_buckets")
    )
    """Rows of a stack's table of position biases, in a T5."""
    relative_attention_max_distance: int = field(
        default=128, metadata=known_as(t5="relative_attention_max_distance")
    )
    hidden_dropout: float = field(
        default=0.1, metadata=known_as("hidden_dropout", "dropout_rate", own=True)
    )
    """Dropout where a layer's output joins the residual connection; a T5 has it elsewhere too."""
    attention_dropout: float = field(default=0.1, metadata=known_as("attention_dropout"))
    """Dropout of attention's probabilities."""
    switch_expert_dropout: float = field(default=0.0, metadata=known_as("expert_dropout", own=True))
    """Dropout on the hidden activation inside experts."""
    moe_aux_loss_coeff: float | None = field(
        default=None, metadata=known_as("router_aux_loss_coef", "router_aux_loss_coef")
    )
    moe_z_loss_coeff: float | None = field(
        default=None, metadata=known_as("router_z_loss_coef", "router_z_loss_coef", own=True)
    )
    moe_input_jitter_eps: float | None = field(
        default=None, metadata=known_as("router_jitter_noise", "router_jitter_noise", own=True)
    )
    routing: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Those of :data:`ROUTING` that are set; a Switch model's defaults where there are none."""

    def __post_init__(self) -> None:
        """Fill in sizes that were not given."""
        # With --swiglu Megatron keeps the parameters of a unit without a gate: 2/3 of the width.
        is_swiglu = self.gated_linear_unit and self.activation_func == "silu"
        width = int(4 * self.hidden_size * 2 / 3 / 64) * 64 if is_swiglu else 4 * self.hidden_size
        for name, default in (
            ("num_query_groups", self.num_attention_heads),
            ("kv_channels", self.hidden_size // self.num_attention_heads),
            ("ffn_hidden_size", width),
            ("moe_ffn_hidden_size", self.ffn_hidden_size or width),
            ("vocab_size", self.padded_vocab_size),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)

    @property
    def family(self) -> Family:
        """Decoder-only or encoder-decoder."""
        return "gpt" if self.encoder is None else "t5"

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by Megatron's name, in the order in which their layers are numbered."""
        encoder = {} if self.encoder is None else {"encoder": self.encoder}
        return encoder | {"decoder": self.decoder}

    @property
    def sparse_layer_numbers(self) -> tuple[int, ...]:
        """Megatron's ``layer_number`` of each layer with experts."""
        numbers: list[int] = []
        layers_before = 0
        for stack in self.stacks.values():
            numbers += [layers_before + layer + 1 for layer in stack.sparse_layers]
            layers_before += stack.num_layers
        return tuple(numbers)

    @property
    def query_projection_size(self) -> int:
        """Width of the queries of all heads."""
        return self.kv_channels * self.num_attention_heads

    @property
    def kv_projection_size(self) -> int:
        """Width of the keys, or of the values, of all heads."""
        return self.kv_channels * self.num_query_groups

    @property
    def fc1_parts(self) -> int:
        """Matrices in the first linear layer of a feed-forward unit: two where it has a gate."""
        return 2 if self.gated_linear_unit else 1

    @property
    def vocabulary_matrices(self) -> int:
        """Embedding and head, or the one that is both."""
        return 1 if self.share_embeddings_and_output_weights else 2

    @property
    def learned_positions(self) -> int:
        """Rows of the table of learned positions; 0 without one."""
        learned = self.position_embedding_type == "learned_absolute"
        return self.max_position_embeddings if learned else 0

    @property
    def constraints(self) -> LayoutConstraints:
        """What parallel sizes have to divide; sequence and batch are for the caller to add."""
        return LayoutConstraints(
            num_experts=self.num_experts or None,
            num_layers=self.decoder.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            add_bias_linear=self.add_bias_linear,
            padded_vocab_size=self.padded_vocab_size or None,
            one_stage=self.encoder is not None,
            whole_sequences=self.encoder is not None,
        )

    @classmethod
    def from_args(cls, args: Namespace, *, vocab_size: int | None = None) -> Self:
        """Return the model that Megatron's arguments describe.

        Settings without a field are ignored here; the converter refuses them.

        Args:
            args: The namespace of a run, or the one that a checkpoint stores. What it lacks, or has
                as None, is Megatron's default.
            vocab_size: Rows of the embedding outside of Megatron; None for all.

        Raises:
            ConfigError: A pattern of sparse layers is none, or not one of its layers.
        """
        values: dict[str, Any] = {}
        family: Family = "t5" if getattr(args, "switch_arch", "gpt") == "t5" else "gpt"
        for each in described():
            if not each.metadata[family] and (family == "gpt" or each.name not in _ALSO_OF_A_T5):
                continue
            value = getattr(args, each.name, None)
            if value is None:  # an older Megatron calls some by their flag
                value = getattr(args, attribute_of(flag_of(each)), None)
            if isinstance(value, list):  # a coefficient that Megatron takes one of for each kind
                value = value[0]
            if value is not None:
                values[each.name] = float(value) if each.type in FLOATS else value
        groups = getattr(args, "num_query_groups", None) or 1
        scaled = getattr(args, "use_rope_scaling", False)
        values |= {
            "num_query_groups": groups if getattr(args, "group_query_attention", False) else 0,
            "rope_scaling_factor": args.rope_scaling_factor if scaled else None,
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "padded_vocab_size": getattr(args, "padded_vocab_size", None) or 0,
            "vocab_size": vocab_size or 0,
            "routing": {name: getattr(args, name) for name in ROUTING if hasattr(args, name)},
        }
        return cls(**{**values, **_activation_of(args), **stacks_of(args)})

    def to_flags(self, *, lengths: tuple[int, int] = (512, 128)) -> dict[str, Any]:
        """Return the flags that describe the model, without dashes; True stands alone.

        Args:
            lengths: Positions of encoder and decoder of a T5, in which no tensor depends on them.
        """
        first = self.encoder or self.decoder
        flags: dict[str, Any] = {"num-layers": first.num_layers}
        for each in described(self.family):
            value = getattr(self, each.name)
            if each.metadata["off"]:
                flags[each.metadata["off"]] = not value
            elif self.num_experts or not is_of_experts(each):
                flags[flag_of(each)] = value
        for name in ("activation-func", "gated-linear-unit", "num-query-groups"):
            flags.pop(name, None)  # no flags, or not by themselves
        flags |= self._gpt_flags() if self.encoder is None else self._t5_flags(lengths)
        if self.num_experts:
            flags["moe-layer-freq"] = first.layer_freq
            if self.encoder is not None:
                flags["switch-decoder-layer-freq"] = self.decoder.layer_freq
            flags |= {flag_key(name): value for name, value in self.routing.items()}
        return {
            name: str(value).replace(" ", "") if isinstance(value, list) else value
            for name, value in flags.items()
            if value is not None and value is not False
        }

    def _gpt_flags(self) -> dict[str, Any]:
        groups, scale = self.num_query_groups, self.rope_scaling_factor
        is_rotary, base = self.position_embedding_type == "rope", self.rotary_base
        return {
            "seq-length": self.max_position_embeddings,
            "rotary-base": (int(base) if base.is_integer() else base) if is_rotary else None,
            "rotary-percent": self.rotary_percent if self.rotary_percent != 1 else None,
            "group-query-attention": groups != self.num_attention_heads,
            "num-query-groups": groups if groups != self.num_attention_heads else None,
            "use-rope-scaling": scale is not None,
            "rope-scaling-factor": scale,
            "swiglu": self.activation_func == "silu",
            "quick-geglu": self.activation_func == "quick_gelu",
            "squared-relu": self.activation_func == "relu2",
            "openai-gelu": self.activation_func == "gelu_pytorch_tanh",
            "no-bias-gelu-fusion": self.activation_func == "gelu",  # the kernel approximates it
        }

    def _t5_flags(self, lengths: tuple[int, int]) -> dict[str, Any]:
        return {
            "switch-arch": "t5",
            "switch-activation": _GATED_GELU if self.gated_linear_unit else "relu",
            "seq-length": lengths[0],
            "decoder-seq-length": lengths[1],
            "decoder-num-layers": self.decoder.num_layers,
            "attention-dropout": self.attention_dropout,
            "switch-expert-dropout": self.switch_expert_dropout if self.num_experts else None,
        }


def described(family: Family | None = None) -> Iterator[Field[Any]]:
    """Yield the fields that other formats know; with a family, those that it has a key for."""
    for each in fields(Architecture):
        if each.metadata and (family is None or each.metadata[family]):
            yield each


def _activation_of(args: Namespace) -> dict[str, Any]:
    """Return the activation, by Hugging Face's name, and whether it has a gate."""
    if getattr(args, "switch_arch", "gpt") == "t5":  # where "auto" is ReLU
        gated = args.switch_activation == _GATED_GELU
        name = "gelu_pytorch_tanh" if gated else "relu"
    else:
        names = {"swiglu": "silu", "quick_geglu": "quick_gelu", "squared_relu": "relu2"}
        given = next((flag for flag in names if getattr(args, flag, False)), None)
        gated = given in ("swiglu", "quick_geglu")
        # The fused kernel of a GELU with its bias approximates with tanh.
        fused = getattr(args, "bias_gelu_fusion", False) and args.add_bias_linear
        tanh = fused or getattr(args, "openai_gelu", False)
        name = names[given] if given else "gelu_pytorch_tanh" if tanh else "gelu"
    return {"gated_linear_unit": gated, "activation_func": name}
