"""A Megatron checkpoint as a conversion reads it: its arguments, and its weights by layer.

The arguments come from a file that a full disk, another program or an edit may have changed. What
a conversion takes from them has the type and the range that its flag has, or is refused.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_switch.architecture.field_names import FLOATS
from megatron_switch.architecture.model import described
from megatron_switch.checkpoint.formats.dist_metadata import NOT_WEIGHTS, read_common_state
from megatron_switch.checkpoint.formats.dist_reader import DistSource, LayeredSource
from megatron_switch.checkpoint.formats.tensor_source import TensorSource
from megatron_switch.checkpoint.load.files import FoundCheckpoint
from megatron_switch.checkpoint.load.norm_keys import NeutralNorms
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import KNOWN_FLAGS, shown_flag

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "untie_embeddings_and_output_weights",
    "tokenizer_type",
)
_REQUIRED_OF_A_T5 = ("decoder_num_layers", "switch_activation", "switch_eval_capacity_factor")
_MAY_BE_NONE = ("tokenizer_model", "switch_capacity", "switch_capacity_group")
_KINDS: Mapping[type, str] = {
    int: "num_layers decoder_num_layers padded_vocab_size make_vocab_size_divisible_by vocab_size "
    "seq_length decoder_seq_length switch_capacity switch_min_capacity",
    float: "rope_scaling_factor moe_expert_capacity_factor switch_eval_capacity_factor",
    bool: "untie_embeddings_and_output_weights group_query_attention use_rope_scaling swiglu "
    "quick_geglu squared_relu openai_gelu bias_gelu_fusion",
    str: "tokenizer_type tokenizer_model vocab_file merge_file metadata_path switch_arch "
    "switch_activation switch_capacity_group switch_capacity_rounding switch_drop_order",
}
"""Types of arguments that are no fields of the model's description."""


def stored_args(found: FoundCheckpoint) -> Namespace:
    """Return the arguments that a checkpoint stores.

    Raises:
        CheckpointError: It stores none, or what no run can have.
    """
    args = read_common_state(found.folder).get("args")
    if not isinstance(args, Namespace):
        raise CheckpointError(
            f"{found.folder} stores no arguments, so its model is not known. Load it in a run "
            "with the model's flags, and convert what that run saves."
        )
    problems = [*_problems(args)]
    if problems:
        raise CheckpointError(
            f"{found.folder} stores arguments that no run can have: {'; '.join(problems[:5])}. "
            "The checkpoint is damaged, or another program changed it. Copy it again."
        )
    return args


def _problems(args: Namespace) -> Iterator[str]:
    """Say of each argument that a conversion reads what is wrong with it."""
    kinds = {name: kind for kind, names in _KINDS.items() for name in names.split()}
    for each in described():
        kinds[each.name] = float if each.type in FLOATS else str
        if each.type is int or each.type is bool:
            kinds[each.name] = each.type
    is_t5 = getattr(args, "switch_arch", None) == "t5"
    required = _REQUIRED + (_REQUIRED_OF_A_T5 if is_t5 else ())
    present = _MAY_BE_NONE if is_t5 else _MAY_BE_NONE[:1]
    for name, kind in kinds.items():
        value = getattr(args, name, None)
        if isinstance(value, list) and len(value) == 1 and name == "moe_aux_loss_coeff":
            (value,) = value  # Megatron takes one for each kind of balancing loss
        limits = KNOWN_FLAGS[name].range if name in KNOWN_FLAGS else None
        if value is None:
            if name in required or (name in present and not hasattr(args, name)):
                yield f"{shown_flag(name)} is missing"
        elif not _is(value, kind) or (limits is not None and limits.problem(name, value)):
            yield f"{shown_flag(name)} {value!r:.40}"


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def open_weights(
    found: FoundCheckpoint, args: Namespace
) -> tuple[TensorSource, frozenset[str], DistSource]:
    """Open a Megatron checkpoint with one key for each layer's weights.

    Args:
        found: The checkpoint.
        args: Arguments that it stores; the depth of its stacks is read.

    Returns:
        The weights by layer, the keys that are no weights, and the files below.

    Raises:
        CheckpointError: The arguments ask for more layers or experts than all tensors could hold.
    """
    files = DistSource(found.folder)
    others = frozenset(key for key in files.tensors if key.startswith(NOT_WEIGHTS))
    _refuse_more_parts_than_elements(files, others, args)
    depths = {"decoder": args.num_layers}
    if getattr(args, "switch_arch", "gpt") == "t5":
        depths = {"encoder": args.num_layers, "decoder": args.decoder_num_layers}
    return NeutralNorms(LayeredSource(files, depths, ignored=others)), others, files


def _refuse_more_parts_than_elements(
    files: DistSource, others: frozenset[str], args: Namespace
) -> None:
    """Refuse, before any list is made, numbers that the checkpoint has no room for.

    A layer and an expert have at least as many elements as the model is wide.
    """
    shapes = [info.shape for key, info in files.tensors.items() if key not in others]
    elements = sum(math.prod(shape) for shape in shapes)
    decoder = getattr(args, "decoder_num_layers", None) or 0
    layers, experts = args.num_layers + decoder, getattr(args, "num_experts", None) or 0
    if max(layers, experts) * args.hidden_size > elements:
        raise CheckpointError(
            f"{files.folder} stores --num-layers {layers} and --num-experts {experts}, which need "
            f"more than the {elements:,} numbers that its tensors have. The checkpoint is damaged, "
            "or another program changed it. Copy it again."
        )
