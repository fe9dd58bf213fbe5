"""Which model a checkpoint holds, taken from the arguments stored in it.

A checkpoint stores the whole argument namespace of the run that wrote it. Of that, this module
takes what decides which function the model computes, and its tokenizer, so that a model can be
used knowing nothing but its folder. Layout, device, everything about speed, memory, training and
logging stays that of the command line, where an explicit flag also wins over what is stored.

Megatron's own ``--use-checkpoint-args`` takes a list that misses half of the model. Here the rule
errs the other way: *every* field of Megatron's ``TransformerConfig`` is taken unless it is named
below as a matter of speed or training. A field that comes with a newer Megatron is therefore never
forgotten in silence; at worst it asks loudly for something that is not there.
"""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.checkpoint.load.settings_agreement import FREE_SETTINGS
from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.data.tokenizer import FLAGS, flag_dest
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.training.arguments.parser import CommandLine

_NOT_THE_MODEL_PREFIXES = (
    "cuda_graph_",
    "fp4",
    "fp8",
    "inference_",
    "init_",
    "moe_deepep_",
    "moe_flex_",
    "moe_hybridep_",
    "moe_ncclep_",
    "moe_paged_stash",
    "recompute_",
)
_NOT_THE_MODEL = frozenset(
    {
        # where layers and tokens are
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "cp_comm_type",
        "moe_enable_deepep",
        "moe_pad_expert_input_to_capacity",
        "moe_permute_fusion_into_hybridep",
        "moe_token_dispatcher_type",
        "pipeline_model_parallel_layout",
        "symmetric_ar_type",
        # which kernels compute, in which precision they may differ
        "apply_rope_fusion",
        "attention_backend",
        "bias_dropout_fusion",
        "enable_cuda_graph",
        "external_cuda_graph",
        "first_last_layers_bf16",
        "flash_attention_version",
        "fused_residual_rmsnorm",
        "kitchen_attention_backend",
        "masked_softmax_fusion",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_dtype",
        "moe_router_fusion",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "transformer_impl",
        "use_fused_weighted_squared_relu",
        "use_grouped_gemm_for_dense_mlp",
        "use_kitchen_attention",
        "use_te_activation_func",
        "use_transformer_engine_op_fuser",
        # how training goes and what it remembers
        "activation_offload_fraction",
        "calculate_per_token_loss",
        "delay_offload_until_cuda_graph",
        "distribute_saved_activations",
        "fine_grained_activation_offloading",
        "moe_aux_loss_coeff",
        "moe_enable_routing_replay",
        "moe_input_jitter_eps",
        "moe_layer_recompute",
        "moe_router_force_biased",
        "moe_router_force_load_balancing",
        "moe_router_load_balancing_type",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
        "moe_token_drop_policy",
        "moe_z_loss_coeff",
        "offload_modules",
        # what is written where
        "config_logger_dir",
        "log_max_attention_logit",
        "moe_per_layer_logging",
        "test_mode",
    }
)
_ALSO_THE_MODEL = frozenset(
    {
        "add_position_embedding",
        "bf16",
        "decoder_num_layers",
        "decoder_seq_length",
        "fp16",
        "group_query_attention",
        "kv_lora_rank",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "mscale",
        "mscale_all_dim",
        "num_experts",
        "openai_gelu",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "quick_geglu",
        "relative_attention_max_distance",
        "relative_attention_num_buckets",
        "rope_scaling_factor",
        "rope_type",
        "rotary_base",
        "rotary_percent",
        "rotary_scaling_factor",
        "rotary_seq_len_interpolation_factor",
        "seq_length",
        "squared_relu",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "use_rope_scaling",
        "v_head_dim",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
        "yarn_original_max_position_embeddings",
    }
)


def model_attributes() -> frozenset[str]:
    """Return the attributes of Megatron's namespace that say which function a model computes."""
    parallel = {field.name for field in fields(ModelParallelConfig)}
    own = {field.name for field in fields(TransformerConfig)} - parallel - _NOT_THE_MODEL
    own = {name for name in own if not name.startswith(_NOT_THE_MODEL_PREFIXES)}
    switch = {field.name for field in fields(SwitchConfig)} - FREE_SETTINGS
    return frozenset(own | _ALSO_THE_MODEL | {FLAG_PREFIX + name for name in switch})


def tokenizer_attributes() -> frozenset[str]:
    """Return the attributes of Megatron's namespace that say which tokenizer is used."""
    return frozenset(flag_dest(flag) for flag in FLAGS)


def with_checkpoint_args(line: CommandLine) -> CommandLine:
    """Return the command line with the checkpoint's model, if ``--use-checkpoint-args`` asks so.

    Model, tokenizer, routing and its losses come from the checkpoint where no flag was given;
    Megatron itself takes half of the model, even over the command line.

    Args:
        line: The parsed command line; its namespace is changed.

    Raises:
        CheckpointError: ``--load`` names no complete checkpoint, or one without arguments.
        ConfigError: ``--load`` is missing.
    """
    args = line.args
    if not args.use_checkpoint_args:
        return line
    if args.load is None:
        raise ConfigError(
            "--use-checkpoint-args takes the model's flags from a checkpoint, but no checkpoint "
            "is given. Add --load, or leave --use-checkpoint-args out."
        )
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step)
    stored = read_common_state(found.folder).get("args")
    if stored is None:
        raise CheckpointError(
            f"{found.folder} stores no arguments that --use-checkpoint-args could take. Give the "
            "model's flags, or a JSON file of them to --switch-model."
        )
    for name in RECIPES["switch"].keys() - line.explicit:
        if hasattr(stored, name):
            setattr(args, name, getattr(stored, name))
    return with_stored_model(line, stored)


def with_stored_model(line: CommandLine, stored: Namespace) -> CommandLine:
    """Return a command line that describes the model of a checkpoint.

    Args:
        line: What the user said; its namespace is changed in place.
        stored: Arguments of the run that wrote the checkpoint, validated as Megatron stores them.

    Returns:
        The same namespace. What was taken counts as explicit, so that no default replaces it.
    """
    names = (model_attributes() | tokenizer_attributes()) - line.explicit
    taken = {name for name in names if hasattr(stored, name) and hasattr(line.args, name)}
    for name in taken:
        setattr(line.args, name, getattr(stored, name))
    return CommandLine(line.args, line.explicit | taken)
