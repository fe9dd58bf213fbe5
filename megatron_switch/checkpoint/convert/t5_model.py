"""What an encoder-decoder model computes, between Megatron's arguments and ``config.json``.

Hugging Face's Switch has an absolute capacity, counted in each sequence, the same in training and
afterwards. A Megatron run that counts otherwise is exported with the capacity that its evaluation
has for a sequence, and says so.

Which layers are sparse is read from the tensors where they are Megatron's, and from the steps of
the configuration where they are Hugging Face's: layer ``i`` is sparse where ``i % step == 1``, or
where the step is 1. Other patterns cannot be exported.

A tied head reads the hidden state times width^-0.5, an untied one reads it as it is, and
``transformers`` 5 keeps the two facts in two settings. In Megatron the first decides the second, so
a model that shares the weight and does not scale gets a head of its own with the same values.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_switch.checkpoint.convert.t5_names import EMBEDDING, HEAD, T5Shape
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.fields import Fields

SWITCH = "switch_transformers"
DENSE = "t5"
T5_TYPES = (SWITCH, DENSE)
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_GATED = "gated-gelu"
_JITTER = "moe-input-jitter-eps"
_LOSSES = {
    "moe-aux-loss-coeff": "router_aux_loss_coef",
    "moe-z-loss-coeff": "router_z_loss_coef",
    _JITTER: "router_jitter_noise",
}
"""Flags of Megatron's and the settings that say the same."""


@dataclass(frozen=True, kw_only=True)
class T5Model:
    """An encoder-decoder model: its tensors and what is computed with them."""

    shape: T5Shape
    epsilon: float = 1e-6
    max_distance: int = 128
    head: str = HEAD
    """Name of an untied head's tensor outside of Megatron."""
    capacity: int | None = None
    """Slots per expert and sequence; None where there are no experts."""
    dropout: float = 0.1
    losses: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's flags of losses and jitter."""
    notes: tuple[str, ...] = ()


def t5_from_config(
    config: Mapping[str, Any], where: str, keys: Collection[str], *, multiple: int
) -> T5Model:
    """Return the model that a ``config.json`` of Hugging Face's Switch or T5 describes.

    Args:
        config: Content of the file.
        where: The file, for messages.
        keys: Names of the tensors that come with it; the head's is looked for.
        multiple: Rows of the embedding become a multiple of this.

    Raises:
        CheckpointError: It describes what Megatron's Switch-T5 cannot compute.
    """

    fields = config_fields(config, where, str(config["model_type"]))
    switch = config["model_type"] == SWITCH
    if config.get("router_bias"):
        raise CheckpointError(
            f"{where}: router_bias is true, but a Switch router has no bias, and none is dropped."
        )
    vocab_size = fields.integer("vocab_size")
    depth = fields.integer("num_layers")
    tied, head = _head(fields, keys, switch=switch)
    experts = fields.integer("num_experts") if switch else 0
    depths = (depth, fields.integer("num_decoder_layers", depth))
    sparse = [
        _sparse(fields, stack, layers) if experts else ()
        for stack, layers in zip(("encoder", "decoder"), depths, strict=True)
    ]
    shape = T5Shape(
        num_encoder_layers=depths[0],
        num_decoder_layers=depths[1],
        hidden_size=fields.integer("d_model"),
        ffn_hidden_size=fields.integer("d_ff"),
        num_heads=fields.integer("num_heads"),
        head_channels=fields.integer("d_kv"),
        num_buckets=fields.integer("relative_attention_num_buckets"),
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // multiple) * multiple,
        gated=_is_gated(config, where),
        tied=tied,
        num_experts=experts,
        encoder_sparse=sparse[0],
        decoder_sparse=sparse[1],
    )
    losses = {
        flag: fields.number(name, least=0)
        for flag, name in _LOSSES.items()
        if fields.has(name) and (config[name] or flag != _JITTER)
    }
    return T5Model(
        shape=shape,
        epsilon=fields.number("layer_norm_epsilon", 1e-6, above=0),
        max_distance=fields.integer("relative_attention_max_distance", 128),
        head=head,
        capacity=fields.integer("expert_capacity") if experts else None,
        dropout=fields.number("dropout_rate", 0.1, least=0, below=1),
        losses=losses,
    )


def t5_from_args(args: Namespace, keys: Collection[str], *, vocab_size: int | None) -> T5Model:
    """Return the model that a checkpoint's stored arguments and tensors describe.

    Args:
        args: Megatron's namespace, as a run of ``--switch-arch t5`` stores it.
        keys: Keys of the checkpoint's weights, by layer.
        vocab_size: Rows of the embedding outside of Megatron; None for all.
    """
    padded = int(args.padded_vocab_size)
    encoder, decoder = (
        tuple(
            layer for layer in range(depth) if f"{stack}.layers.{layer}.mlp.router.weight" in keys
        )
        for stack, depth in (("encoder", args.num_layers), ("decoder", args.decoder_num_layers))
    )
    experts = int(getattr(args, "num_experts", None) or 0)
    shape = T5Shape(
        num_encoder_layers=args.num_layers,
        num_decoder_layers=args.decoder_num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_heads=args.num_attention_heads,
        head_channels=args.kv_channels or args.hidden_size // args.num_attention_heads,
        num_buckets=args.relative_attention_num_buckets,
        vocab_size=vocab_size or padded,
        padded_vocab_size=padded,
        gated=args.switch_activation == _GATED,
        tied=not args.untie_embeddings_and_output_weights,
        num_experts=experts,
        encoder_sparse=encoder,
        decoder_sparse=decoder,
    )
    width = getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size
    if experts and width != args.ffn_hidden_size:
        raise CheckpointError(
            f"Experts of --moe-ffn-hidden-size {width} beside dense layers of --ffn-hidden-size "
            f"{args.ffn_hidden_size} cannot be written: Hugging Face's Switch has one d_ff."
        )
    capacity, notes = _capacity(args) if experts else (None, ())
    return T5Model(
        shape=shape,
        epsilon=float(args.layernorm_epsilon),
        max_distance=int(args.relative_attention_max_distance),
        capacity=capacity,
        dropout=float(args.hidden_dropout),
        losses={
            "moe-aux-loss-coeff": args.moe_aux_loss_coeff,
            "moe-z-loss-coeff": args.moe_z_loss_coeff or 0.0,
            "moe-input-jitter-eps": args.moe_input_jitter_eps,
        },
        notes=notes,
    )


def t5_flags(model: T5Model, *, lengths: tuple[int, int] = (512, 128)) -> dict[str, Any]:
    """Return the flags of Megatron that describe a model, without dashes; True stands alone.

    Args:
        model: The model.
        lengths: Positions of encoder and decoder. No tensor depends on them.
    """
    shape = model.shape
    flags: dict[str, Any] = {
        "switch-arch": "t5",
        "switch-activation": _GATED if shape.gated else "relu",
        "num-layers": shape.num_encoder_layers,
        "decoder-num-layers": shape.num_decoder_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "num-attention-heads": shape.num_heads,
        "kv-channels": shape.head_channels,
        "seq-length": lengths[0],
        "decoder-seq-length": lengths[1],
        "norm-epsilon": model.epsilon,
        "relative-attention-num-buckets": shape.num_buckets,
        "relative-attention-max-distance": model.max_distance,
        "hidden-dropout": model.dropout,
        "attention-dropout": model.dropout,
        "untie-embeddings-and-output-weights": not shape.tied,
    }
    if shape.num_experts:
        patterns = {
            "moe-layer-freq": (shape.encoder_sparse, shape.num_encoder_layers),
            "switch-decoder-layer-freq": (shape.decoder_sparse, shape.num_decoder_layers),
        }
        flags |= {
            name: str([int(layer in sparse) for layer in range(depth)]).replace(" ", "")
            for name, (sparse, depth) in patterns.items()
        }
        flags |= {
            "num-experts": shape.num_experts,
            "switch-capacity": model.capacity,
            "switch-capacity-group": None if model.capacity is None else "sequence",
            "switch-expert-dropout": model.dropout,
            **model.losses,
        }
    return {name: value for name, value in flags.items() if value is not False}


def t5_config(model: T5Model, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        model: Model to export.
        dtype: Name of the weights' type, such as ``bfloat16``.

    Raises:
        CheckpointError: Its sparse layers are no pattern that the format has.
    """
    shape = model.shape
    switch = bool(shape.num_experts)
    act = {"dense_act_fn": "gelu_new" if shape.gated else "relu"}
    config: dict[str, Any] = {
        "architectures": [
            "SwitchTransformersForConditionalGeneration" if switch else "T5ForConditionalGeneration"
        ],
        "model_type": SWITCH if switch else DENSE,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 reads
        "d_model": shape.hidden_size,
        "d_kv": shape.head_channels,
        "d_ff": shape.ffn_hidden_size,
        "num_heads": shape.num_heads,
        "num_layers": shape.num_encoder_layers,
        "num_decoder_layers": shape.num_decoder_layers,
        "relative_attention_num_buckets": shape.num_buckets,
        "relative_attention_max_distance": model.max_distance,
        "dropout_rate": model.dropout,
        "layer_norm_epsilon": model.epsilon,
        "feed_forward_proj": _GATED if shape.gated else "relu",
        "is_gated_act": shape.gated,
        "is_encoder_decoder": True,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab_size,
        "use_cache": True,
        **act,
        **_TOKENS,
    }
    if not switch:
        return config
    steps = {
        stack: _step(shape.sparse(stack), shape.layers(stack), stack)
        for stack in ("encoder", "decoder")
    }
    return config | {
        "num_experts": shape.num_experts,
        "expert_capacity": model.capacity,
        "encoder_sparse_step": steps["encoder"],
        "decoder_sparse_step": steps["decoder"],
        "num_sparse_encoder_layers": len(shape.encoder_sparse),
        "num_sparse_decoder_layers": len(shape.decoder_sparse),
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": model.losses["moe-input-jitter-eps"] or 0.0,
        "router_aux_loss_coef": model.losses["moe-aux-loss-coeff"],
        "router_z_loss_coef": model.losses["moe-z-loss-coeff"],
    }


def _head(fields: Fields, keys: Collection[str], *, switch: bool) -> tuple[bool, str]:
    """Return whether Megatron's head is tied, and the name of the head's tensor."""
    tied = fields.flag("tie_word_embeddings", True)
    scaled = tied if switch else fields.flag("scale_decoder_outputs", tied)
    return scaled, HEAD if HEAD in keys or scaled else EMBEDDING


def _is_gated(config: Mapping[str, Any], where: str) -> bool:
    """Return whether units are gated; refuse what is neither T5's first form nor its second."""
    projection = str(config.get("feed_forward_proj") or config.get("dense_act_fn") or "relu")
    if projection in (_GATED, "gelu_new"):
        return True
    if projection != "relu":
        raise CheckpointError(
            f"{where}: the nonlinearity is {projection}, but a Switch-T5 has relu or {_GATED}."
        )
    return False


def _sparse(fields: Fields, stack: str, depth: int) -> tuple[int, ...]:
    """Return the sparse layers of a stack, as ``transformers`` finds them."""
    count = fields.integer(f"num_sparse_{stack}_layers", 3, least=0)
    step = depth // count if count else depth
    return _every(fields.integer(f"{stack}_sparse_step", step, least=0), depth)


def _every(step: int, depth: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(depth) if step == 1 or (step and layer % step == 1))


def _step(sparse: tuple[int, ...], depth: int, stack: str) -> int:
    for step in range(1, depth + 1):
        if _every(step, depth) == sparse:
            return step
    raise CheckpointError(
        f"The {stack}'s layers {list(sparse)} of {depth} have experts, which Hugging Face's Switch "
        "cannot say: it makes every layer sparse, or layers 1, 1 + step, 1 + 2 step, ..."
    )


def _capacity(args: Namespace) -> tuple[int, tuple[str, ...]]:
    """Return the slots per expert and sequence, and what is to be known about the number."""
    if args.switch_capacity is not None and args.switch_capacity_group == "sequence":
        return int(args.switch_capacity), ()
    length = max(args.seq_length, args.decoder_seq_length)
    if args.switch_capacity is not None:
        slots = int(args.switch_capacity)
    elif args.switch_eval_capacity_factor < 0:
        slots = length
    else:
        share = int(length * args.switch_eval_capacity_factor / args.num_experts)
        slots = min(length, max(share, args.switch_min_capacity))
    return slots, (
        f"Hugging Face's Switch counts capacity in each sequence: expert_capacity {slots} is what "
        f"evaluation has for a sequence of {length} tokens.",
    )
