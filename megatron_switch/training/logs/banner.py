"""The start-up text of a run: model, parameters, routing, precision, device and layout.

Every value is the one in force, after defaults, recipe and checkpoint were applied.
"""

from argparse import Namespace
from itertools import pairwise

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import (
    active_parameters,
    stage_parameters,
    total_parameters,
)
from megatron_switch.config import SwitchConfig
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import start_up_text
from megatron_switch.moe.experts import engine_has
from megatron_switch.utils.units import count_text


def banner(
    args: Namespace,
    switch: SwitchConfig,
    layout: Layout,
    *,
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
        device: ``cuda`` or ``cpu``.
        ranks_per_node: Ranks on each host.
        set_here: Flags that were set because of device and installed packages.
        log_text: Where everything else is printed.
    """
    model = Architecture.from_args(args)
    has_experts = bool(model.sparse_layer_numbers)
    parts = [_model(args, model, layout)]
    if has_experts:
        parts.append(_semantics(args, switch))
    parts.append(_precision(args, has_experts=has_experts))
    parts.append(_device(args, switch, device))
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


def _model(args: Namespace, model: Architecture, layout: Layout) -> str:
    layers = _layers(model.decoder)
    if model.encoder is not None:
        layers = f"t5, encoder of {_layers(model.encoder)}, decoder of {layers}"
    experts = f", {model.num_experts} experts" if model.sparse_layer_numbers else ""
    return (
        f"model       {layers}, width {model.hidden_size}{experts}\n"
        f"parameters  {count_text(total_parameters(model).total)} in all, "
        f"{count_text(active_parameters(model))} active for a token"
        f"{_on_a_rank(args, model, layout)}"
    )


def _layers(stack: Stack) -> str:
    """Return the kinds of a stack's layers, counted from 1 as Megatron's logs do."""
    kinds = f"all {stack.num_layers} dense"
    if stack.sparse_layers:
        numbers: dict[int, list[int]] = {0: [], 1: []}
        for number, has_experts in enumerate(stack.layer_freq, start=1):
            numbers[has_experts].append(number)
        kinds = f"sparse {_ranges(numbers[1])}; dense {_ranges(numbers[0]) or 'none'}"
    return f"{stack.num_layers} layers ({kinds})"


def _on_a_rank(args: Namespace, model: Architecture, layout: Layout) -> str:
    if has_uneven_stages(args):  # Megatron places the layers later; the log has its count
        return ""
    counts = [stage_parameters(model, layout, stage).total for stage in range(layout.pp)]
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


def _precision(args: Namespace, *, has_experts: bool) -> str:
    model = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    gradients = "fp32" if args.accumulate_allreduce_grads_in_fp32 or model == "fp32" else model
    parts = f"experts and dense layers {model}" if has_experts else f"layers {model}"
    router = ", router fp32" if has_experts else ""
    return f"precision   {parts}{router}, gradients summed in {gradients}"


def _device(args: Namespace, switch: SwitchConfig, device: str) -> str:
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    local = args.transformer_impl == "local"
    modules = "plain torch (no Transformer Engine)" if local else "Transformer Engine"
    if args.num_experts and not local and not engine_has(args.transformer_impl, switch):
        modules += ", experts of plain torch (--switch-expert-dropout)"
    return f"device      {device}, {ranks}, modules of {modules}"


def _factor(factor: float | None) -> str:
    return "none (dropless)" if factor is None or factor < 0 else str(factor)


def _one(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


def _ranges(numbers: list[int]) -> str:
    """Write numbers as ``1, 3, 5`` or, where every second one is meant, ``2, 4, ..., 24``."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))
