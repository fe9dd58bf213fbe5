"""The run of some pretrain flags as ``megatron-switch train`` would start it: nothing is chosen.

Where the planner searches, a flag that is absent means "decide"; in a training it means a default:
one stage, one tensor rank, micro-batches of one sequence, fp32, optimizer state on every copy.
"""

from dataclasses import replace
from typing import Literal

from megatron_switch.errors import ConfigError
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.validation import validate_layout, virtual_stages
from megatron_switch.layout.workload import Dispatch, Recompute, Sharding, Training
from megatron_switch.planner.request import PlanRequest


def given_run(
    request: PlanRequest, values: FlagValues, *, global_batch_size: int | None = None
) -> tuple[Layout, Training]:
    """Return the layout and everything else of the run.

    Args:
        request: Model and cluster.
        values: The flags, the model's included.
        global_batch_size: Instead of theirs.

    Raises:
        ConfigError: A flag's value cannot be used.
        LayoutError: The sizes are no legal layout.
    """
    sizes = Sizes.of_flags(request.world_size, values)
    chunk = values.integer("num-layers-per-virtual-pipeline-stage", None)
    if chunk is not None:
        layers = request.model.decoder.num_layers
        sizes = sizes.changed(vp=virtual_stages(layers, sizes.pp, chunk))
    micro_batch = values.integer("micro-batch-size", 1)
    batch_size = values.integer("global-batch-size", micro_batch * sizes.dp)
    if global_batch_size is not None:
        batch_size = global_batch_size
    training = replace(
        request.training,
        micro_batch_size=micro_batch,
        global_batch_size=batch_size,
        precision=_precision(values),
        sequence_parallel=values.on("sequence-parallel") and sizes.tp > 1,
        dispatch=_dispatch(values, request),
        sharding=_sharding(values),
        offload_optimizer=values.on("optimizer-cpu-offload"),
        recompute=_recompute(values),
        recompute_modules=_words(values, "recompute-modules", ["core_attn"]),
        recompute_layers=values.integer("recompute-num-layers", 1),
    )
    constraints = replace(
        request.constraints,
        sequence_parallel=training.sequence_parallel,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
    )
    return validate_layout(sizes, constraints), training


def _precision(values: FlagValues) -> Literal["bf16", "fp16", "fp32"]:
    return "fp16" if values.on("fp16") else "bf16" if values.on("bf16") else "fp32"


def _dispatch(values: FlagValues, request: PlanRequest) -> Dispatch:
    mode = values.text("switch-dispatch", "auto")
    if mode == "auto" and not values.on("moe-pad-expert-input-to-capacity"):
        capacity = request.training.capacity
        dropless = capacity.slots is None and capacity.factor < 0
        return "packed" if capacity.group == "ep" or dropless else "padded"
    return "packed" if mode == "packed" else "padded"


def _sharding(values: FlagValues) -> Sharding:
    if values.on("use-megatron-fsdp"):
        return "fully_sharded"
    return "distributed" if values.on("use-distributed-optimizer") else "replicated"


def _recompute(values: FlagValues) -> Recompute:
    if values.on("recompute-activations"):
        return "selective"
    granularity = values.text("recompute-granularity", "none")
    if granularity not in ("none", "selective", "full"):
        raise ConfigError(f"--recompute-granularity is selective or full, got {granularity}.")
    return granularity  # type: ignore[return-value]


def _words(values: FlagValues, name: str, default: list[str]) -> tuple[str, ...]:
    given = values.values.get(name, default)
    return tuple(map(str, given)) if isinstance(given, list) else (str(given),)
