"""A plan as flags of ``megatron-switch train``: layout, batch, dispatch, optimizer, recompute."""

from megatron_switch.flags.argv import argv_of
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import FLAGS
from megatron_switch.layout.workload import Training


def plan_flags(layout: Layout, training: Training) -> list[str]:
    """Return a plan as argv; the model's flags are not among them."""
    return argv_of(_flags(layout, training))


def _flags(layout: Layout, training: Training) -> dict[str, object]:
    """Return every flag that a plan decides, with None or False where it is not given."""
    sizes = {name: getattr(layout, name) for name in FLAGS}
    return {
        **{
            flag.removeprefix("--"): None
            if name in ("cp", "vp") and sizes[name] == 1
            else sizes[name]
            for name, flag in FLAGS.items()
        },
        "sequence-parallel": training.sequence_parallel and layout.tp > 1,
        "micro-batch-size": training.micro_batch_size,
        "global-batch-size": training.global_batch_size,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "switch-dispatch": training.dispatch,
        **_optimizer_flags(training),
        **_recompute_flags(training),
    }


def _optimizer_flags(training: Training) -> dict[str, object]:
    is_cut = training.sharding != "replicated"
    fsdp = training.sharding == "fully_sharded"
    offload = is_cut and training.offload_optimizer
    main_gradients = fsdp and training.width == 2 and training.fp32_gradients
    return {
        "use-distributed-optimizer": is_cut,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": "optim_grads_params" if fsdp else None,
        "ckpt-format": "fsdp_dtensor" if fsdp else None,
        "megatron-fsdp-main-grads-dtype": "fp32" if main_gradients else None,
        "overlap-grad-reduce": is_cut,
        "overlap-param-gather": is_cut,
        "optimizer-cpu-offload": offload,
        "optimizer-offload-fraction": 1.0 if offload else None,
        "use-precision-aware-optimizer": offload,
    }


def _recompute_flags(training: Training) -> dict[str, object]:
    selective, full = training.recompute == "selective", training.recompute == "full"
    return {
        "recompute-granularity": training.recompute if selective or full else None,
        "recompute-modules": list(training.recompute_modules) if selective else None,
        "recompute-method": "uniform" if full else None,
        "recompute-num-layers": training.recompute_layers if full else None,
    }


PLANNED_FLAGS = frozenset(_flags(Layout(1), Training(seq_length=1))) | {
    # two flags that say what some of the others say
    "num-layers-per-virtual-pipeline-stage",
    "moe-pad-expert-input-to-capacity",
}
"""Names of the flags that a plan decides."""
