"""The sections of a DeepSpeed configuration, one reader each: optimizer, precision, ZeRO, logging.

A reader gets the whole file and where flags and notes go. Values of a wrong kind are errors with
line and key; a key of a known section that has no equal is a note.
"""

from collections.abc import Callable
from typing import Any

from megatron_switch.migration.translation import Translation
from megatron_switch.utils.fields import Fields

_ADAMS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")


def _read_optimizer(file: Fields, found: Translation) -> None:
    inner = file.inner("optimizer")
    kind = inner.text("type")
    if kind not in _ADAMS:
        found.note("optimizer.type", f"{kind} has no equal; flags below are for Adam.")
    found.set("--optimizer", "adam")
    parameters = inner.inner("params")
    for key, flag in (("lr", "--lr"), ("eps", "--adam-eps"), ("weight_decay", "--weight-decay")):
        value = _number(parameters, key)
        if value is not None:
            found.set(flag, value)
    if "weight_decay" not in parameters.values:
        found.set("--weight-decay", 0.0)
    if "betas" in parameters.values:
        betas = parameters.values["betas"]
        if not isinstance(betas, list) or [type(b) in (int, float) for b in betas] != [True, True]:
            raise parameters.error("betas", f"expected two numbers, found {betas}.")
        found.set("--adam-beta1", float(betas[0]))
        found.set("--adam-beta2", float(betas[1]))
    else:
        found.set("--adam-beta2", 0.999)
    known = {"lr", "eps", "weight_decay", "betas", "torch_adam", "adam_w_mode", "bias_correction"}
    for key in sorted(parameters.values.keys() - known):
        found.note(f"optimizer.params.{key}", "Has no equal.")
    if parameters.values.get("adam_w_mode") is False:
        found.note("optimizer.params.adam_w_mode", "Megatron decays weights, never gradients.")


def _read_scheduler(file: Fields, found: Translation) -> None:
    inner = file.inner("scheduler")
    kind = inner.text("type")
    styles = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in styles:
        found.note("scheduler.type", f"{kind} has no equal; see --lr-decay-style.")
        return
    found.set("--lr-decay-style", styles[kind])
    parameters = inner.inner("params")
    pairs = {
        "warmup_max_lr": "--lr",
        "warmup_min_lr": "--lr-warmup-init",
        "warmup_num_steps": "--lr-warmup-iters",
        "total_num_steps": "--lr-decay-iters",
    }
    for key in parameters.values:
        if key in pairs:
            number = _number(parameters, key)
            if number is not None:
                if number < 0:
                    raise parameters.error(key, f"must be at least 0, found {number:g}.")
                found.set(pairs[key], int(number) if "steps" in key else number)
        else:
            found.note(f"scheduler.params.{key}", "Has no equal.")


def _read_fp16(file: Fields, found: Translation) -> None:
    inner = file.inner("fp16")
    if not _is_on(inner, found, "fp16"):
        return
    found.set("--fp16")
    scale = _number(inner, "loss_scale") or 0.0
    if scale:
        found.set("--loss-scale", scale)
    else:
        power = _number(inner, "initial_scale_power")
        found.set("--initial-loss-scale", 2 ** int(16 if power is None else power))
        found.set("--loss-scale-window", int(_number(inner, "loss_scale_window") or 1000))
        found.set("--hysteresis", int(_number(inner, "hysteresis") or 2))
        found.set("--min-loss-scale", _number(inner, "min_loss_scale") or 1.0)
    for key in ("auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"):
        if inner.values.get(key):
            found.note(f"fp16.{key}", "Has no equal; weights have fp32 masters.")


def _read_bf16(file: Fields, found: Translation) -> None:
    if _is_on(file.inner("bf16"), found, "bf16"):
        found.set("--bf16")


def _read_zero(file: Fields, found: Translation) -> None:
    inner = file.inner("zero_optimization")
    stage = inner.integer("stage", 0, least=0)
    if stage > 3:
        raise inner.error("stage", f"ZeRO has stages 0 to 3, found {stage}.")
    if stage >= 1:
        found.set("--use-distributed-optimizer")
    on_host = _read_offload(inner, found)
    if stage >= 2 and on_host:
        found.note(
            "zero_optimization.stage",
            f"Stage {stage} is not translated: Megatron-FSDP, which cuts gradients and weights, "
            "does not work with --optimizer-cpu-offload. The distributed optimizer (stage 1) does.",
        )
    elif stage == 2:
        _set_fsdp(found, "optim_grads")
        found.note(
            "zero_optimization.stage",
            "Stage 2 is Megatron-FSDP's optim_grads. The distributed optimizer alone (stage 1) "
            "reduce-scatters gradients too and only keeps their whole buffer: try it first.",
        )
    elif stage == 3:
        _set_fsdp(found, "optim_grads_params")
        found.note(
            "zero_optimization.stage",
            "Stage 3 is Megatron-FSDP's optim_grads_params. With experts, expert parallelism and "
            "the distributed optimizer need far less communication: see 'megatron-switch plan'.",
        )
    if stage and inner.flag("overlap_comm", stage == 3):
        found.set("--overlap-grad-reduce")
        found.set("--overlap-param-gather")
    if "reduce_bucket_size" in inner.values and stage in (1, 2):
        size = _number(inner, "reduce_bucket_size")
        if size is not None:
            found.set("--ddp-bucket-size", int(size))
    for key in sorted(inner.values.keys() - _ZERO_KNOWN):
        found.note(f"zero_optimization.{key}", "Has no equal; Megatron sizes its buckets itself.")


_ZERO_KNOWN = {
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "offload_optimizer",
    "offload_param",
    "contiguous_gradients",
    "reduce_scatter",
}


def _set_fsdp(found: Translation, strategy: str) -> None:
    found.set("--use-megatron-fsdp")
    found.set("--data-parallel-sharding-strategy", strategy)
    found.set("--ckpt-format", "fsdp_dtensor")


def _read_offload(zero: Fields, found: Translation) -> bool:
    """Translate what goes to the host; return whether the optimizer does."""
    on_host = False
    for key in ("offload_optimizer", "offload_param"):
        if key not in zero.values:
            continue
        inner = zero.inner(key)
        device = inner.text("device", "cpu")
        if device == "none":
            continue
        if key == "offload_param" or device != "cpu":
            found.note(
                f"zero_optimization.{key}",
                f"Offload to {device} has no equal: only optimizer state goes to the host "
                "(--optimizer-cpu-offload). Spread weights with --expert-model-parallel-size.",
            )
            continue
        found.set("--optimizer-cpu-offload")
        found.set("--optimizer-offload-fraction", _number(inner, "ratio") or 1.0)
        found.set("--use-precision-aware-optimizer")
        on_host = True
    return on_host


def _read_clipping(file: Fields, found: Translation) -> None:
    value = _number(file, "gradient_clipping")
    found.set("--clip-grad", 0.0 if value is None else value)


def _read_recompute(file: Fields, found: Translation) -> None:
    inner = file.inner("activation_checkpointing")
    found.set("--recompute-granularity", "full")
    found.set("--recompute-method", "uniform")
    found.set("--recompute-num-layers", 1)
    found.note(
        "activation_checkpointing",
        "DeepSpeed's section says how, and the model's code where; here every layer. Of experts "
        "alone: --recompute-granularity selective --recompute-modules moe.",
    )
    if inner.values.get("partition_activations"):
        found.set("--distribute-saved-activations")
    for key in sorted(inner.values.keys() - {"partition_activations"}):
        if inner.values[key]:
            found.note(f"activation_checkpointing.{key}", "Has no equal.")


def _read_log_interval(file: Fields, found: Translation) -> None:
    found.set("--log-interval", optional_count(file, "steps_per_print") or 10)


def _read_timers(file: Fields, found: Translation) -> None:
    if file.flag("wall_clock_breakdown"):
        found.set("--timing-log-level", 2)


def _read_tensorboard(file: Fields, found: Translation) -> None:
    inner = file.inner("tensorboard")
    if _is_on(inner, found, "tensorboard"):
        found.set("--tensorboard-dir", inner.text("output_path", "tensorboard") or "tensorboard")


def _read_wandb(file: Fields, found: Translation) -> None:
    inner = file.inner("wandb")
    if _is_on(inner, found, "wandb"):
        found.set("--wandb-project", inner.text("project", "megatron-switch"))


def _read_profiler(file: Fields, found: Translation) -> None:
    if _is_on(file.inner("flops_profiler"), found, "flops_profiler"):
        found.set("--log-throughput")


def _read_data_types(file: Fields, found: Translation) -> None:
    kind = file.inner("data_types").text("grad_accum_dtype", "fp32")
    if kind == "bf16":
        found.set("--grad-reduce-in-bf16")
    elif kind not in ("fp32", "auto"):
        found.note("data_types.grad_accum_dtype", f"{kind} has no equal; gradients sum in fp32.")


def _read_tensor_parallel(file: Fields, found: Translation) -> None:
    found.set(
        "--tensor-model-parallel-size",
        optional_count(file.inner("tensor_parallel"), "autotp_size") or 1,
    )


SECTIONS: dict[str, Callable[[Fields, Translation], None]] = {
    "optimizer": _read_optimizer,
    "scheduler": _read_scheduler,
    "fp16": _read_fp16,
    "bf16": _read_bf16,
    "bfloat16": lambda file, found: _read_bf16(_renamed(file, "bfloat16", "bf16"), found),
    "zero_optimization": _read_zero,
    "gradient_clipping": _read_clipping,
    "activation_checkpointing": _read_recompute,
    "steps_per_print": _read_log_interval,
    "wall_clock_breakdown": _read_timers,
    "tensorboard": _read_tensorboard,
    "wandb": _read_wandb,
    "flops_profiler": _read_profiler,
    "data_types": _read_data_types,
    "tensor_parallel": _read_tensor_parallel,
}
"""Readers by the name of the section, or of a value at the top of the file."""


def _renamed(file: Fields, old: str, new: str) -> Fields:
    return Fields({new: file.values[old]}, file.source)


def _is_on(inner: Fields, found: Translation, name: str) -> bool:
    value: Any = inner.values.get("enabled", False)
    if value == "auto":
        found.note(
            f"{name}.enabled", "'auto' is filled in by Hugging Face's Trainer; taken as off."
        )
        return False
    return inner.flag("enabled", False)


def _number(file: Fields, key: str) -> float | None:
    """Return a number, None where it is absent or ``auto``.

    Raises:
        ConfigError: If it is neither.
    """
    if key not in file.values or file.values[key] == "auto":
        return None
    return file.number(key)


def optional_count(file: Fields, key: str) -> int | None:
    """Return a whole number above 0, None where it is absent or ``auto``.

    Raises:
        ConfigError: If it is neither.
    """
    if key not in file.values or file.values[key] == "auto":
        return None
    return file.integer(key)
