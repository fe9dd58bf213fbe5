"""``config.json`` of Hugging Face's Switch and T5: read, and written.

Hugging Face's Switch has an absolute capacity, counted in each sequence, the same in training and
afterwards. A Megatron run that counts otherwise is exported with the capacity that its evaluation
has for a sequence, and says so.

Which layers are sparse follows from steps: layer ``i`` is sparse where ``i % step == 1``, or where
the step is 1. Other patterns cannot be exported.

A tied head reads the hidden state times width^-0.5, an untied one reads it as it is, and
``transformers`` 5 keeps the two facts in two settings. In Megatron the first decides the second, so
a model that shares the weight and does not scale gets a head of its own with the same values.

Most keys stand beside the fields of :class:`~megatron_switch.architecture.model.Architecture`.
"""

from argparse import Namespace
from collections.abc import Collection
from typing import Any

from megatron_switch.architecture.field_names import is_of_experts, read_field
from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import T5_ARGUMENTS, Architecture, described
from megatron_switch.checkpoint.convert.t5_names import EMBEDDING, HEAD
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.fields import Fields

SWITCH = "switch_transformers"
DENSE = "t5"
T5_TYPES = (SWITCH, DENSE)
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_GATED, _GATED_FUNCTION = "gated-gelu", "gelu_new"
_ABSENT = {
    **T5_ARGUMENTS,
    "relative_attention_max_distance": 128,
    "hidden_dropout": 0.1,
    "moe_aux_loss_coeff": None,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
}
"""What the absence of a key means; all other keys must be there."""


def read_t5_config(
    fields: Fields, keys: Collection[str], *, multiple: int
) -> tuple[Architecture, str]:
    """Return the model that a ``config.json`` describes, and the name of its head's tensor.

    Args:
        fields: Values of the file.
        keys: Names of the tensors that come with it; the head's is looked for.
        multiple: Rows of the embedding become a multiple of this.

    Raises:
        CheckpointError: It describes what Megatron's Switch-T5 cannot compute.
    """
    switch = fields.text("model_type") == SWITCH
    _refuse_what_differs(fields)
    vocab_size, depth = fields.integer("vocab_size"), fields.integer("num_layers")
    depths = {"encoder": depth, "decoder": fields.integer("num_decoder_layers", depth)}
    tied, head = _head(fields, keys, switch=switch)
    gated = _is_gated(fields)
    values = {
        each.name: read_field(each, fields, each.metadata["t5"], _ABSENT)
        for each in described("t5")
        if each.name != "share_embeddings_and_output_weights"
        and (switch or not is_of_experts(each))
    }
    if not values.get("moe_input_jitter_eps"):  # no jitter is what Megatron calls none
        values.pop("moe_input_jitter_eps", None)
    # One rate for all: T5's dense layers have it inside too, where experts have their own.
    values |= dict.fromkeys(
        ("attention_dropout", "switch_expert_dropout"), values["hidden_dropout"]
    )
    if switch:
        values["routing"] = {
            "switch_capacity": fields.integer("expert_capacity"),
            "switch_capacity_group": "sequence",
        }
    values |= {
        name: Stack(layers, _sparse(fields, name, layers) if switch else ())
        for name, layers in depths.items()
    }
    model = Architecture(
        **{**T5_ARGUMENTS, **values},
        position_embedding_type="none",
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // multiple) * multiple,
        share_embeddings_and_output_weights=tied,
        gated_linear_unit=gated,
        activation_func="gelu_pytorch_tanh" if gated else "relu",
    )
    return model, head


def write_t5_config(model: Architecture, capacity: int | None, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        model: Model to export.
        capacity: Slots per expert and sequence; None where there are no experts.
        dtype: Name of the weights' type, such as ``bfloat16``.

    Raises:
        CheckpointError: Its sparse layers are no pattern that the format has, or its experts are
            not as wide as dense layers.
    """
    assert model.encoder is not None, "a T5 has one"
    switch, gated = bool(model.num_experts), model.gated_linear_unit
    config: dict[str, Any] = {
        "architectures": [
            "SwitchTransformersForConditionalGeneration" if switch else "T5ForConditionalGeneration"
        ],
        "model_type": SWITCH if switch else DENSE,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 reads
        "num_layers": model.encoder.num_layers,
        "num_decoder_layers": model.decoder.num_layers,
        "vocab_size": model.vocab_size,
        "feed_forward_proj": _GATED if gated else "relu",
        "dense_act_fn": _GATED_FUNCTION if gated else "relu",
        "is_gated_act": gated,
        "is_encoder_decoder": True,
        "use_cache": True,
        **_TOKENS,
    }
    for each in described("t5"):
        if switch or not is_of_experts(each):
            value = getattr(model, each.name)
            config[each.metadata["t5"]] = 0.0 if value is None else value
    if not switch:
        return config
    if model.moe_ffn_hidden_size != model.ffn_hidden_size:
        raise CheckpointError(
            f"Experts of --moe-ffn-hidden-size {model.moe_ffn_hidden_size} beside dense layers of "
            f"--ffn-hidden-size {model.ffn_hidden_size} cannot be written: Hugging Face's Switch "
            "has one d_ff."
        )
    for name, stack in model.stacks.items():
        config[f"{name}_sparse_step"] = _step(stack, name)
        config[f"num_sparse_{name}_layers"] = len(stack.sparse_layers)
    return config | {"expert_capacity": capacity, "router_bias": False, "router_dtype": "float32"}


def sequence_capacity(args: Namespace) -> tuple[int, tuple[str, ...]]:
    """Return the slots per expert and sequence, and what is to be known about the number.

    Args:
        args: Arguments of a run, as its checkpoint stores them.
    """
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


def _head(fields: Fields, keys: Collection[str], *, switch: bool) -> tuple[bool, str]:
    """Return whether Megatron's head is tied, and the name of the head's tensor."""
    tied = fields.flag("tie_word_embeddings", True)
    scaled = tied if switch else fields.flag("scale_decoder_outputs", tied)
    return scaled, HEAD if HEAD in keys or scaled else EMBEDDING


def _is_gated(fields: Fields) -> bool:
    """Return whether units are gated; refuse what is neither T5's first form nor its second."""
    given = fields.text("feed_forward_proj", None) or fields.text("dense_act_fn", None) or "relu"
    gated = given in (_GATED, _GATED_FUNCTION)
    if not gated and given != "relu":
        raise fields.error(
            "feed_forward_proj",
            f"the nonlinearity is {given}, but a Switch-T5 has relu or {_GATED}.",
        )
    # transformers takes one of the keys or the other, depending on its version and on the model.
    functions = (_GATED_FUNCTION, _GATED) if gated else ("relu",)
    fields.choice("dense_act_fn", functions, functions[0])
    if fields.flag("is_gated_act", gated) is not gated:
        raise fields.error("is_gated_act", f"it contradicts the nonlinearity, which is {given}.")
    return gated


def _refuse_what_differs(fields: Fields) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "router_bias": (False, None),
        "router_dtype": ("float32", None),
        "router_type": ("tokens_masked", None),
        "tie_encoder_decoder": (False, None),
        "quantization_config": (None,),
    }
    wrong = [name for name, values in allowed.items() if not fields.one_of(name, values)]
    if wrong:
        found = ", ".join(f"{name} {fields.values[name]}" for name in wrong)
        needed = ", ".join(f"{name} {allowed[name][0]}" for name in wrong)
        raise CheckpointError(
            f"{fields.source.name}: this model cannot be computed by a Switch-T5, which needs "
            f"{needed}; found {found}."
        )


def _sparse(fields: Fields, name: str, depth: int) -> tuple[int, ...]:
    """Return the sparse layers of a stack, as ``transformers`` finds them."""
    count = fields.integer(f"num_sparse_{name}_layers", 3, least=0)
    step = depth // count if count else depth
    return _every(fields.integer(f"{name}_sparse_step", step, least=0), depth)


def _every(step: int, depth: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(depth) if step == 1 or (step and layer % step == 1))


def _step(stack: Stack, name: str) -> int:
    for step in range(1, stack.num_layers + 1):
        if _every(step, stack.num_layers) == stack.sparse_layers:
            return step
    raise CheckpointError(
        f"The {name}'s layers {list(stack.sparse_layers)} of {stack.num_layers} have experts, "
        "which Hugging Face's Switch cannot say: it makes every layer sparse, or layers 1, "
        "1 + step, 1 + 2 step, ..."
    )
