"""A plan as flags of ``megatron-switch train``: layout, batch, dispatch, optimizer, recompute."""

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import FLAGS
from megatron_switch.layout.workload import Training

PLANNED_FLAGS = frozenset(
    {
        *(flag.removeprefix("--") for flag in FLAGS.values()),
        "num-layers-per-virtual-pipeline-stage",
        "sequence-parallel",
        "micro-batch-size",
        "global-batch-size",
        "switch-dispatch",
        "moe-pad-expert-input-to-capacity",
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "use-megatron-fsdp",
        "data-parallel-sharding-strategy",
        "ckpt-format",
        "megatron-fsdp-main-grads-dtype",
        "optimizer-cpu-offload",
        "optimizer-offload-fraction",
        "use-precision-aware-optimizer",
        "recompute-granularity",
        "recompute-modules",
        "recompute-method",
        "recompute-num-layers",
        "bf16",
        "fp16",
    }
)
"""Names of the flags that a plan decides."""


def plan_flags(layout: Layout, training: Training) -> list[str]:
    """Return the words of a command line; the model's flags are not among them."""
    words = _layout_words(layout)
    words += ["--sequence-parallel"] if training.sequence_parallel and layout.tp > 1 else []
    words += ["--micro-batch-size", str(training.micro_batch_size)]
    words += ["--global-batch-size", str(training.global_batch_size)]
    words += [] if training.precision == "fp32" else [f"--{training.precision}"]
    words += ["--switch-dispatch", training.dispatch]
    return [*words, *_optimizer_words(training), *_recompute_words(training)]


def _layout_words(layout: Layout) -> list[str]:
    words = []
    for name, flag in FLAGS.items():
        if name not in ("cp", "vp") or getattr(layout, name) > 1:
            words += [flag, str(getattr(layout, name))]
    return words


def _optimizer_words(training: Training) -> list[str]:
    if training.sharding == "replicated":
        return []
    words = ["--use-distributed-optimizer"]
    if training.sharding == "fully_sharded":
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
        words += ["--ckpt-format", "fsdp_dtensor"]
        if training.width == 2 and training.fp32_gradients:
            words += ["--megatron-fsdp-main-grads-dtype", "fp32"]
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    if training.offload_optimizer:
        words += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0"]
        words += ["--use-precision-aware-optimizer"]
    return words


def _recompute_words(training: Training) -> list[str]:
    if training.recompute == "none":
        return []
    if training.recompute == "selective":
        modules = list(training.recompute_modules)
        return ["--recompute-granularity", "selective", "--recompute-modules", *modules]
    chunk = str(training.recompute_layers)
    return [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        chunk,
    ]
