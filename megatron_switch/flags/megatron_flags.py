"""What this program knows of Megatron's own flags: one row each, in one table.

Every flag of the pinned Megatron that speaks of experts, routers or routing stands here, with what
is done with it (:data:`megatron_switch.flags.traits.FlagKind`). ``docs/flags.md`` is printed from
the table, :mod:`megatron_switch.flags.known_flags` checks the command line against it, and a test
compares it with Megatron's real parser, so that a flag which a newer Megatron brings cannot be
ignored silently.

All other flags of Megatron are honoured. They have a row if their range is checked, or where a
checkpoint's value matters more, or less, than that of a field of ``TransformerConfig``.
"""

from typing import Any

from megatron_switch.flags.traits import (
    BELOW_ONE,
    CAPACITY_FACTOR,
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    FlagKind,
    MegatronFlag,
)


def _honoured(reason: str, *accepted: object, **traits: Any) -> MegatronFlag:
    return _mixture("honoured", reason, accepted, **traits)


def _fixed(value: object, reason: str, **traits: Any) -> MegatronFlag:
    return _mixture("fixed", reason, (value,), **traits)


def _refused(default: object, reason: str, *same: object, **traits: Any) -> MegatronFlag:
    return _mixture("refused", reason, (default, *same), **traits)


def _harmless(reason: str) -> MegatronFlag:
    return _mixture("harmless", reason, ())


def _mixture(
    kind: FlagKind, reason: str, accepted: tuple[object, ...], **traits: Any
) -> MegatronFlag:
    """Return the row of a flag for mixtures of experts."""
    stored = traits.get("on_resume") == "model"
    defaults = {"needs": ("experts",), "stored": stored}
    return MegatronFlag(kind=kind, reason=reason, accepted=accepted, **{**defaults, **traits})


def _each(names: str, **traits: Any) -> dict[str, MegatronFlag]:
    """Return the same row for each of several other flags."""
    return dict.fromkeys(names.split(), MegatronFlag(**traits))


_SHARED = "Switch layers have no shared expert; see --moe-shared-expert-intermediate-size."
_FLEX = "Tunes Megatron's flex dispatcher; Switch has its own, see --switch-dispatch."
_BIAS = "Read only with a router bias, which Switch does not have."
_STASH = "Read only with --moe-paged-stash, which is refused."
_ENGINE = "Read by Megatron's inference engine only; `megatron-switch generate` has its own loop."
_OVERLAP = (
    "Splits Megatron's own layer. To overlap exchange and compute use --switch-overlap-chunks."
)
_PADDING = "Transformer Engine's experts pad their own rows where a format needs it."
_OWN_WEIGHTS = "Every expert keeps weights of its own, so that checkpoints move."
_DISPATCHER = "Switch has its own dispatcher; its modes are those of --switch-dispatch."
_ALL_EXPERTS = "Every token chooses among all experts."
_TRACE = "Read together with --moe-routing-trace-path."

MEGATRON_FLAGS: dict[str, MegatronFlag] = {
    # The model
    "num_experts": _honoured(
        "Experts per Switch layer; without it the model is dense.",
        range=COUNT_OR_ZERO,
        needs=(),
        on_resume="model",
        identity=True,
    ),
    "moe_layer_freq": _honoured(
        "Which layers are Switch layers. The default makes every second one a Switch layer, "
        "beginning with the second.",
        on_resume="model",
    ),
    "moe_ffn_hidden_size": _honoured(
        "Hidden size of an expert; --ffn-hidden-size by default.", range=COUNT, on_resume="model"
    ),
    "moe_shared_expert_intermediate_size": _refused(
        None,
        "A Switch layer has no expert that sees every token. Give dense layers with "
        "--moe-layer-freq instead.",
        on_resume="model",
    ),
    "moe_shared_expert_gate": _harmless(_SHARED),
    "moe_shared_expert_overlap": _harmless(_SHARED),
    "moe_shared_expert_glu_interleave_size": _harmless(_SHARED),
    "use_grouped_gemm_for_shared_expert": _harmless(_SHARED),
    "moe_latent_size": _refused(
        None, "Experts work at the model's width (--hidden-size).", on_resume="model"
    ),
    "moe_mlp_glu_interleave_size": _refused(
        None,
        "Expert weights keep gate and linear half apart, so that checkpoints move.",
        on_resume="model",
    ),
    "moe_use_upcycling": _refused(
        False, "The conversion of Megatron-Core 0.19.2 stops before it has loaded the dense model."
    ),
    "moe_upcycling_granularity": _harmless("Read only with --moe-use-upcycling."),
    # The router
    "moe_router_topk": _fixed(1, "Switch sends every token to one expert.", on_resume="model"),
    "moe_router_pre_softmax": _fixed(
        True,
        "The gate is the chosen expert's probability among all experts.",
        on_resume="overridable",
        stored=True,
    ),
    "moe_router_score_function": _fixed("softmax", "The gate is a probability.", on_resume="model"),
    "moe_router_dtype": _fixed(
        "fp32", "Logits, softmax and argmax are float32 whatever the model's precision."
    ),
    "moe_router_topk_scaling_factor": _refused(
        None, "The gate is the probability, unscaled.", on_resume="model"
    ),
    "moe_router_num_groups": _refused(None, _ALL_EXPERTS, on_resume="model"),
    "moe_router_group_topk": _refused(None, _ALL_EXPERTS, on_resume="model"),
    "moe_router_enable_expert_bias": _refused(
        False, "The router has no bias; balance comes from --moe-aux-loss-coeff.", on_resume="model"
    ),
    "moe_router_bias_update_rate": _harmless(_BIAS),
    "moe_router_quantile_balancing_ema": _harmless(_BIAS),
    "moe_router_load_balancing_type": _honoured(
        "aux_loss is Switch's balancing loss, over each micro-batch, or over each sequence with "
        "--switch-capacity-group sequence; none trains without it.",
        "aux_loss",
        "none",
    ),
    "moe_aux_loss_coeff": _honoured(
        "One value, 0.01 by default; the raw loss is logged too.",
        range=NOT_NEGATIVE,
        on_resume="overridable",
    ),
    "moe_z_loss_coeff": _honoured(
        "0 by default; the raw z-loss is logged all the same.",
        range=NOT_NEGATIVE,
        on_resume="overridable",
    ),
    "moe_input_jitter_eps": _honoured(
        "Multiplies the router's float32 input, in training only; the noise depends on the "
        "token's position, not on the layout.",
        range=BELOW_ONE,
        on_resume="overridable",
    ),
    "moe_router_force_load_balancing": _honoured(
        "Random logits instead of the router's, for benchmarks."
    ),
    "moe_router_force_biased": _refused(
        None, "For a balanced benchmark use --moe-router-force-load-balancing."
    ),
    "moe_router_fusion": _harmless("Fuses Megatron's top-k routing, which Switch does not run."),
    "moe_enable_routing_replay": _refused(
        False, "Tokens are routed anew in every pass; nothing is replayed."
    ),
    "moe_router_padding_for_quantization": _refused(False, _PADDING),
    "moe_router_padding_for_fp8": _refused(False, _PADDING),
    # Capacity
    "moe_expert_capacity_factor": _honoured(
        "Capacity factor while training, 1.25 by default; negative drops no token. Evaluation has "
        "--switch-eval-capacity-factor.",
        range=CAPACITY_FACTOR,
        needs=("experts", "factor"),
        on_resume="overridable",
        stored=True,
    ),
    "moe_pad_expert_input_to_capacity": _honoured("Means --switch-dispatch padded."),
    "moe_token_drop_policy": _fixed(
        "position",
        "--switch-drop-order decides who keeps a slot: first_come is Megatron's position, "
        "probability its probs.",
    ),
    "moe_expert_rank_capacity_factor": _refused(
        None,
        "Capacity is counted per expert: --moe-expert-capacity-factor.",
        on_resume="overridable",
        stored=True,
    ),
    "moe_pad_experts_for_cuda_graph_inference": _harmless(_ENGINE),
    # Dispatch and experts
    "moe_token_dispatcher_type": _fixed("alltoall", _DISPATCHER),
    "moe_enable_deepep": _refused(False, _DISPATCHER),
    "moe_flex_dispatcher_backend": _harmless(_FLEX),
    "moe_flex_dispatcher_num_sms": _harmless(_FLEX),
    "moe_deepep_num_sms": _harmless(_FLEX),
    "moe_hybridep_num_sms": _harmless(_FLEX),
    "moe_hybridep_num_sms_preprocessing": _harmless(_FLEX),
    "moe_hybridep_num_blocks_permute": _harmless(_FLEX),
    "moe_hybridep_num_blocks_unpermute": _harmless(_FLEX),
    "moe_hybridep_pad_uneven_dispatch_inputs": _harmless(_FLEX),
    "moe_permute_fusion_into_hybridep": _harmless(_FLEX),
    "moe_ncclep_static_shape": _harmless(_FLEX),
    "moe_ncclep_zero_copy": _harmless(_FLEX),
    "moe_permute_fusion": _harmless(
        "Fuses Megatron's permutation of a token map, which Switch does not build."
    ),
    "moe_grouped_gemm": _honoured(
        "On with Transformer Engine's experts; ours are always grouped, and do not read it."
    ),
    "moe_single_grouped_weight": _refused(False, _OWN_WEIGHTS),
    "moe_single_grouped_bias": _refused(False, _OWN_WEIGHTS),
    "moe_apply_probs_on_input": _refused(
        False, "The gate multiplies the expert's hidden activation.", on_resume="model"
    ),
    "moe_layer_recompute": _honoured(
        "The old name of --recompute-granularity selective --recompute-modules moe."
    ),
    "moe_paged_stash": _refused(
        False, "For less memory use --recompute-granularity selective --recompute-modules moe."
    ),
    "moe_paged_stash_page_size": _harmless(_STASH),
    "moe_paged_stash_buffer_size_factor_cuda": _harmless(_STASH),
    "moe_paged_stash_buffer_size_factor_cpu": _harmless(_STASH),
    "overlap_moe_expert_parallel_comm": _refused(False, _OVERLAP),
    "overlap_dispatch_backward_with_experts_wgrad": _refused(False, _OVERLAP),
    # Layout
    "expert_model_parallel_size": _honoured(
        "Ranks over which the experts are spread.", needs=(), on_resume="buffers"
    ),
    "expert_tensor_parallel_size": _honoured(
        "Ranks that share each expert; --tensor-model-parallel-size by default.",
        needs=(),
        on_resume="buffers",
    ),
    "expert_tensor_parallel_num_weight_shards": _refused(
        None, "An expert is cut into --expert-tensor-parallel-size pieces and no further."
    ),
    # Logging
    "moe_per_layer_logging": _honoured("Per-layer values in TensorBoard and W&B."),
    "save_tokens_per_expert_interval": _honoured(
        "Tokens per local expert and micro-batch, as JSON lines under --save."
    ),
    "moe_routing_trace_path": _honoured(
        "Every token's expert, as JSON lines; rows are batch-major (all of sequence 0 first)."
    ),
    "moe_routing_trace_max_training_iters": _honoured(_TRACE),
    "moe_routing_trace_capture_logits": _honoured(_TRACE),
    "moe_routing_trace_capture_hidden_states": _honoured(_TRACE),
    "moe_routing_trace_dump_weights": _honoured(_TRACE),
    # Megatron's inference engine and reinforcement learning
    "inference_moe_disable_fused_quant_kernels": _harmless(_ENGINE),
    "inference_moe_token_dispatcher_type": _harmless(_ENGINE),
    "inference_dynamic_batching_prefix_caching_routing_alpha": _harmless(_ENGINE),
    "rl_inference_expert_model_parallel_size": _harmless(_ENGINE),
    "rl_inference_expert_tensor_model_parallel_size": _harmless(_ENGINE),
    # Not of the family by name
    "mtp_num_layers": _refused(
        None,
        "Megatron builds its own expert layers for multi-token prediction.",
        0,
        needs=(),
        on_resume="model",
    ),
    # The rest of the model
    **_each(
        "num_layers hidden_size ffn_hidden_size num_attention_heads",
        range=COUNT,
        on_resume="model",
        identity=True,
    ),
    **_each(
        "decoder_num_layers kv_channels max_position_embeddings", range=COUNT, on_resume="model"
    ),
    **_each("num_query_groups", range=COUNT, needs=("grouped queries",), on_resume="model"),
    **_each("activation_func_clamp_value glu_linear_offset", needs=("gated",), on_resume="model"),
    **_each("rope_scaling_factor", needs=("rope scaling",), on_resume="model"),
    **_each("seq_length", range=COUNT, identity=True, stored=True),
    **_each("decoder_seq_length make_vocab_size_divisible_by", range=COUNT, stored=True),
    **_each("padded_vocab_size", on_resume="model", stored=False),
    **_each(
        "relative_attention_num_buckets relative_attention_max_distance",
        range=COUNT,
        on_resume="model",
    ),
    **_each(
        "position_embedding_type rotary_interleaved normalization qk_layernorm swiglu squared_relu "
        "add_qkv_bias untie_embeddings_and_output_weights",
        on_resume="model",
    ),
    **_each("add_position_embedding", on_resume="model", shown="--no-position-embedding"),
    **_each("rotary_base", range=POSITIVE, on_resume="model"),
    **_each("rotary_percent", range=SHARE, on_resume="model"),
    **_each(
        "add_bias_linear",
        on_resume="model",
        shown="add_bias_linear (off with --disable-bias-linear)",
    ),
    **_each("layernorm_zero_centered_gamma", on_resume="model", shown="--apply-layernorm-1p"),
    **_each("hidden_dropout attention_dropout", range=BELOW_ONE),
    # Of two, the activation and the groups that follow from them are compared.
    **_each("group_query_attention openai_gelu quick_geglu bf16 fp16", stored=True),
    **_each(
        "rope_type use_rope_scaling "
        "rotary_scaling_factor rotary_seq_len_interpolation_factor yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int yarn_original_max_position_embeddings mscale "
        "mscale_all_dim q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
        on_resume="model",
    ),
    # Data
    **_each("seed", range=COUNT, identity=True),
    **_each(
        "data_path train_data_path valid_data_path test_data_path data_args_path "
        "per_split_data_args_path split mock_data tokenizer_type tokenizer_model",
        identity=True,
    ),
    **_each("vocab_size", range=COUNT),
    # Training
    **_each(
        "micro_batch_size global_batch_size train_iters train_samples eval_interval log_interval "
        "tensorboard_log_interval exit_interval distributed_timeout_minutes",
        range=COUNT,
    ),
    **_each("save_interval save_retain_interval", range=COUNT, needs=("save",)),
    **_each(
        "eval_iters lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples num_workers",
        range=COUNT_OR_ZERO,
    ),
    **_each(
        "lr min_lr lr_warmup_init weight_decay start_weight_decay end_weight_decay clip_grad",
        range=NOT_NEGATIVE,
    ),
    **_each("lr_warmup_fraction", range=SHARE),
    **_each("optimizer sgd_momentum", on_resume="optimizer"),
    **_each("adam_beta1 adam_beta2", range=BELOW_ONE, on_resume="optimizer"),
    **_each("adam_eps", range=POSITIVE, on_resume="optimizer"),
    **_each("init_method_std", range=NOT_NEGATIVE, stored=False),
    **_each("embedding_init_method_std", stored=False),
    # How a model is trained or in which precision it computes: taken from a checkpoint that is
    # opened, and free to change where training continues.
    **_each(
        "apply_query_key_layer_scaling attention_softmax_in_fp32 dsa_indexer_k_norm_fp32 "
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss fp32_residual_connection "
        "mamba_training_ssm_states_dtype mtp_loss_scaling_factor num_layers_at_end_in_bf16 "
        "num_layers_at_start_in_bf16 qk_clip qk_clip_alpha qk_clip_threshold"
    ),
    **_each("recompute_num_layers", range=COUNT, stored=False),
    **_each(
        "activation_offload_fraction calculate_per_token_loss delay_offload_until_cuda_graph "
        "distribute_saved_activations fine_grained_activation_offloading offload_modules "
        "recompute_granularity recompute_method recompute_modules init_model_with_meta_device",
        stored=False,
    ),
    # Where layers and tokens are
    **_each("tensor_model_parallel_size pipeline_model_parallel_size", on_resume="buffers"),
    **_each(
        "virtual_pipeline_model_parallel_size",
        on_resume="buffers",
        shown="--num-virtual-stages-per-pipeline-rank",
    ),
    **_each(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cp_comm_type "
        "pipeline_model_parallel_layout symmetric_ar_type",
        stored=False,
    ),
    # Which kernels compute, and in which precision they may
    **_each("transformer_impl", on_resume="buffers", stored=False),
    **_each(
        "apply_rope_fusion attention_backend bias_dropout_fusion enable_cuda_graph "
        "external_cuda_graph first_last_layers_bf16 flash_attention_version "
        "fused_residual_rmsnorm kitchen_attention_backend masked_softmax_fusion "
        "use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_kitchen_attention "
        "use_te_activation_func use_transformer_engine_op_fuser cuda_graph_impl "
        "cuda_graph_modules cuda_graph_warmup_steps fp4_quantizer_factory fp4_recipe "
        "fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_output_proj "
        "fp8_quantizer_factory fp8_recipe fp8_wgrad batch_invariant_mode "
        "clone_scatter_output_in_embedding delta_offload_bytes_across_pp_ranks "
        "disable_bf16_reduced_precision_matmul dsa_kernel_backend "
        "fine_grained_offloading_max_inflight_offloads flash_decode high_priority_a2a_comm_stream "
        "min_offloaded_tensor_size mlp_chunks_for_prefill mlp_chunks_for_training "
        "nccl_all_reduce_for_prefill use_mamba_mem_eff_path",
        stored=False,
    ),
    **_each("fp4", stored=False, shown="--fp4-format"),
    **_each("fp8", stored=False, shown="--fp8-format"),
    # What is written, and Megatron's inference engine
    **_each(
        "config_logger_dir log_max_attention_logit test_mode inference_cuda_graph_scope "
        "inference_disable_triton_nvls_kernels inference_fuse_tp_communication "
        "inference_grouped_gemm_backend inference_rng_tracker",
        stored=False,
    ),
}
"""Rows by attribute of Megatron's namespace. What has none may change on resume, unless Megatron's
``TransformerConfig`` has it: then another value is another model."""
