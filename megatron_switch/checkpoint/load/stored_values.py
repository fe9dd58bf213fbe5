"""Arguments that a checkpoint stores, checked before another checkpoint is made of it.

They come from a file that a full disk, another program or an edit may have changed. What describes
the model, its tokenizer and its layout has the type and the range of its flag, or is refused.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_switch.architecture.field_names import FLOATS
from megatron_switch.architecture.model import described
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import KNOWN_FLAGS, shown_flag

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "untie_embeddings_and_output_weights",
    "seq_length",
    "micro_batch_size",
)
_REQUIRED_OF_A_T5 = ("decoder_num_layers", "switch_activation", "switch_eval_capacity_factor")
_MAY_BE_NONE = ("tokenizer_type", "tokenizer_model")
_MAY_BE_NONE_IN_A_T5 = ("switch_capacity", "switch_capacity_group")
_KINDS: Mapping[type, str] = {
    int: "num_layers decoder_num_layers padded_vocab_size make_vocab_size_divisible_by vocab_size "
    "seq_length decoder_seq_length switch_capacity switch_min_capacity micro_batch_size "
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size context_parallel_size",
    float: "rope_scaling_factor moe_expert_capacity_factor switch_eval_capacity_factor",
    bool: "untie_embeddings_and_output_weights group_query_attention use_rope_scaling swiglu "
    "quick_geglu squared_relu openai_gelu bias_gelu_fusion",
    str: "tokenizer_type tokenizer_model vocab_file merge_file metadata_path switch_arch "
    "switch_activation switch_capacity_group switch_capacity_rounding switch_drop_order "
    "switch_init_scale",
}
"""Types of arguments that are no fields of the model's description."""


def check_stored(args: Namespace, folder: Path) -> None:
    """Raise unless a run can have the arguments.

    Args:
        args: What the checkpoint stores.
        folder: Its folder, for messages.

    Raises:
        CheckpointError: Naming the first that are missing or wrong.
    """
    problems = [*_problems(args)]
    if problems:
        raise CheckpointError(
            f"{folder} stores arguments that no run can have: {'; '.join(problems[:5])}. The "
            "checkpoint is damaged, or another program changed it. Copy it again."
        )


def _problems(args: Namespace) -> Iterator[str]:
    """Say of each argument what is wrong with it."""
    kinds = {name: kind for kind, names in _KINDS.items() for name in names.split()}
    for each in described():
        kinds[each.name] = float if each.type in FLOATS else str
        if each.type is int or each.type is bool:
            kinds[each.name] = each.type
    is_t5 = getattr(args, "switch_arch", None) == "t5"
    required = _REQUIRED + (_REQUIRED_OF_A_T5 if is_t5 else ())
    present = _MAY_BE_NONE + (_MAY_BE_NONE_IN_A_T5 if is_t5 else ())
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
