"""What a run says of itself before the first step: model, semantics, layout, device.

Every value is the one in force, after defaults, recipes and checkpoints have had their say.
"""

from argparse import Namespace
from itertools import pairwise

from megatron_switch.architecture.parameters import (
    GPTShape,
    T5Shape,
    active_parameters,
    stage_parameters,
    total_parameters,
)
from megatron_switch.config import SwitchConfig
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import start_up_text
from megatron_switch.utils.units import count_text


def banner(
    args: Namespace,
    switch: SwitchConfig,
    layout: Layout,
    *,
    sparse_layers: tuple[int, ...],
    device: str,
    ranks_per_node: int,
    set_here: tuple[str, ...],
    log_text: str,
) -> str:
    """Return the start-up text.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.
        layout: The rank grid.
        sparse_layers: 1-based numbers of the layers with experts.
        device: ``cuda`` or ``cpu``.
        ranks_per_node: Ranks on each host.
        set_here: Flags that were set because of device and installed packages.
        log_text: Where everything else is printed.
    """
    parts = [_model(args, layout, sparse_layers)]
    if sparse_layers:
        parts.append(_semantics(args, switch))
    parts.append(_precision(args, sparse_layers))
    parts.append(_device(args, device))
    if set_here:
        parts.append(f"set to suit {' '.join(set_here)}")
    parts.append(f"log         {log_text}")
    table = start_up_text(
        layout,
        num_experts=args.num_experts,
        ranks_per_node=min(ranks_per_node, args.world_size),
        nodes_per_leaf=switch.nodes_per_leaf,
    )
    return "\n".join(parts) + f"\n\n{table}\n"


def _model(args: Namespace, layout: Layout, sparse_layers: tuple[int, ...]) -> str:
    shape = gpt_shape(args, sparse_layers)
    layers = _stack(args.num_layers, sparse_layers)
    if isinstance(shape, T5Shape):
        layers = (
            f"t5, encoder of {_stack(shape.encoder_layers, shape.encoder_sparse_layers)}, decoder "
            f"of {_stack(shape.num_layers, shape.sparse_layers)}"
        )
    experts = f", {args.num_experts} experts" if sparse_layers else ""
    return (
        f"model       {layers}, width {args.hidden_size}{experts}\n"
        f"parameters  {count_text(total_parameters(shape).total)} in all, "
        f"{count_text(active_parameters(shape))} active for a token"
        f"{_on_a_rank(args, shape, layout)}"
    )


def _stack(num_layers: int, sparse_layers: tuple[int, ...]) -> str:
    kinds = f"all {num_layers} dense"
    if sparse_layers:
        dense = [n for n in range(1, num_layers + 1) if n not in sparse_layers]
        kinds = f"sparse {_ranges(sparse_layers)}; dense {_ranges(tuple(dense)) or 'none'}"
    return f"{num_layers} layers ({kinds})"


def _on_a_rank(args: Namespace, shape: GPTShape, layout: Layout) -> str:
    if has_uneven_stages(args):  # Megatron places the layers later; the log has its count
        return ""
    counts = [stage_parameters(shape, layout, stage).total for stage in range(layout.pp)]
    least, most = count_text(min(counts)), count_text(max(counts))
    return f", {least if least == most else f'{least} to {most}'} on a rank"


def has_uneven_stages(args: Namespace) -> bool:
    """Return whether flags place different numbers of layers on pipeline stages."""
    return bool(
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
        or args.pipeline_model_parallel_layout is not None
    )


def _semantics(args: Namespace, switch: SwitchConfig) -> str:
    if switch.capacity is not None:
        capacity = f"{switch.capacity} slots an expert"
    else:
        capacity = (
            f"factor {_factor(args.moe_expert_capacity_factor)} training, "
            f"{_factor(switch.eval_capacity_factor)} evaluation, {switch.capacity_rounding}, at "
            f"least {switch.min_capacity}"
        )
    aux, z_loss = args.moe_aux_loss_coeff, args.moe_z_loss_coeff or 0.0
    jitter = args.moe_input_jitter_eps or 0.0
    return (
        f"routing     top-1, recipe {switch.recipe}; capacity {capacity}, counted over each "
        f"{switch.capacity_group}; {switch.drop_order.replace('_', ' ')}; {switch.dispatch} "
        "dispatch\n"
        f"losses      load balancing x {_one(aux)}, router z-loss x {z_loss} (logged raw: balanced "
        f"= 1.0); jitter {jitter}; expert dropout {switch.expert_dropout}"
    )


def _precision(args: Namespace, sparse_layers: tuple[int, ...]) -> str:
    model = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    gradients = "fp32" if args.accumulate_allreduce_grads_in_fp32 or model == "fp32" else model
    parts = f"experts and dense layers {model}" if sparse_layers else f"layers {model}"
    router = ", router fp32" if sparse_layers else ""
    return f"precision   {parts}{router}, gradients summed in {gradients}"


def _device(args: Namespace, device: str) -> str:
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    local = args.transformer_impl == "local"
    modules = "plain torch (no Transformer Engine)" if local else "Transformer Engine"
    return f"device      {device}, {ranks}, modules of {modules}"


def gpt_shape(args: Namespace, sparse_layers: tuple[int, ...]) -> GPTShape:
    """Return what decides the number of parameters, from validated arguments."""
    if args.switch_arch == "t5":
        return _t5_shape(args, sparse_layers)
    learned = args.position_embedding_type == "learned_absolute"
    return GPTShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size if sparse_layers else None,
        num_experts=args.num_experts or 0,
        sparse_layers=sparse_layers,
        padded_vocab_size=args.padded_vocab_size,
        tied_head=not args.untie_embeddings_and_output_weights,
        learned_positions=args.max_position_embeddings if learned else 0,
        gated=args.swiglu,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm=args.normalization,
        qk_norm=args.qk_layernorm,
    )


def _t5_shape(args: Namespace, sparse_layers: tuple[int, ...]) -> T5Shape:
    depth = args.num_layers  # the encoder's, whose layers are numbered first
    return T5Shape(
        num_layers=args.decoder_num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size if sparse_layers else None,
        num_experts=args.num_experts or 0,
        sparse_layers=tuple(number - depth for number in sparse_layers if number > depth),
        padded_vocab_size=args.padded_vocab_size,
        tied_head=not args.untie_embeddings_and_output_weights,
        gated=args.switch_activation == "gated-gelu",
        encoder_layers=depth,
        encoder_sparse_layers=tuple(number for number in sparse_layers if number <= depth),
        relative_buckets=args.relative_attention_num_buckets,
    )


def _factor(factor: float | None) -> str:
    return "none (dropless)" if factor is None or factor < 0 else str(factor)


def _one(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers as ``1, 3, 5`` or, where every second one is meant, ``2, 4, ..., 24``."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))
