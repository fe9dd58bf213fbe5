"""A DeepSpeed configuration file as flags of ``megatron-switch train``.

Every key of the file ends as a flag or as a note; none is skipped. A key that this page does
not know is a note too, because DeepSpeed has many and gets more. Values of a wrong kind, settings
that contradict one another and batch sizes that do not multiply are errors, with line and key.

DeepSpeed's defaults where they differ from Megatron's are written out: no gradient clipping, and
Adam's decoupled weight decay of 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.errors import ConfigError
from megatron_switch.migration.deepspeed_sections import SECTIONS, optional_count
from megatron_switch.migration.translation import Translation
from megatron_switch.utils.fields import Fields

_NO_EQUAL: Mapping[str, str] = {
    "amp": "Apex's automatic precision; Megatron keeps fp32 masters itself. Use --bf16.",
    "autotuning": "Try 'megatron-switch plan', which compares all layouts without running any.",
    "elasticity": "A job has a fixed number of ranks; checkpoints load at another one.",
    "compression_training": "There is no compression.",
    "curriculum_learning": "Use --step-batch-size-schedule for the batch; lengths are fixed.",
    "data_efficiency": "There is no curriculum or token dropping outside of expert capacity.",
    "progressive_layer_drop": "Every layer runs in every step.",
    "sparse_attention": "Attention is dense; see --window-size for a sliding window.",
    "sparse_gradients": "Gradients of embeddings are dense.",
    "eigenvalue": "There is no eigenvalue estimate.",
    "aio": "Nothing is offloaded to disk.",
    "csv_monitor": "--switch-metrics-file writes JSON lines.",
    "comet": "TensorBoard, Weights & Biases and JSON lines are supported.",
    "prescale_gradients": "Megatron scales gradients before the reduction in any case.",
    "gradient_predivide_factor": "Megatron divides by the number of replicas.",
    "communication_data_type": "Gradients are reduced in fp32; --grad-reduce-in-bf16 changes it.",
    "disable_allgather": "The all-gather cannot be left out.",
    "dump_state": "Arguments stand in run.json of --switch-run-dir.",
    "zero_allow_untested_optimizer": "Adam is what is tested.",
    "zero_force_ds_cpu_optimizer": "--optimizer-cpu-offload uses torch's Adam on the host.",
    "memory_breakdown": "'megatron-switch plan --explain' shows memory by part.",
    "checkpoint": "--ckpt-format and --async-save decide how checkpoints are written.",
    "quantize_training": "There is no quantised training; --fp8-format needs Transformer Engine.",
    "hybrid_engine": "Reinforcement learning is not part of this.",
    "comms_logger": "'megatron-switch plan --explain' predicts bytes of every collective.",
    "sequence_parallel_size": "Ulysses; long sequences are cut with --context-parallel-size.",
    "seed": "Use --seed.",
}


@dataclass(frozen=True)
class Job:
    """How large the job is.

    Attributes:
        world_size: Ranks; None where it is not known.
        model_parallel: Ranks over which one copy of the dense layers is cut.
    """

    world_size: int | None = None
    model_parallel: int = 1


def translate_config(path: Path, job: Job) -> Translation:
    """Return the flags and notes of a DeepSpeed configuration file.

    Args:
        path: The JSON file.
        job: Its size, against which batch sizes are checked.

    Raises:
        ConfigError: If the file is malformed or contradicts itself; with line and key.
    """
    file = Fields.read(path, "DeepSpeed file")
    found = Translation()
    for key in file.values:
        reader = SECTIONS.get(key)
        if reader is not None:
            reader(file, found)
        elif key in _NO_EQUAL:
            found.note(key, _NO_EQUAL[key])
        elif key not in _BATCH:
            found.note(key, "This setting is not known here; nothing was made of it.")
    _read_batch(file, found, job)
    _say_how_long(found)
    if "gradient_clipping" not in file.values:
        found.set("--clip-grad", 0.0)
        found.note(
            "gradient_clipping", "Not given, which is off in DeepSpeed; Megatron clips at 1."
        )
    if not {"--bf16", "--fp16"} & found.flags.keys():
        found.note("precision", "Neither fp16 nor bf16 is on: the model trains in fp32.")
    if {"--bf16", "--fp16"} <= found.flags.keys():
        raise file.error("fp16", "both fp16 and bf16 are enabled. Keep one.")
    return found


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _read_batch(file: Fields, found: Translation, job: Job) -> None:
    whole, micro, steps = (optional_count(file, key) for key in _BATCH)
    replicas = None if job.world_size is None else job.world_size // job.model_parallel
    each = (micro or 1) * (steps or 1)
    if whole is not None and whole % each:
        parts = [] if micro is None else [f"{micro} a micro-batch"]
        parts += [] if steps is None else [f"{steps} accumulation steps"]
        raise file.error(
            "train_batch_size",
            f"{whole} is no multiple of {' x '.join(parts)}, on however many ranks. Change one of "
            "them.",
        )
    if whole and micro and steps and replicas is None:
        found.note(
            "train_batch_size",
            f"{whole} is {micro} a micro-batch x {steps} accumulation steps on {whole // each} "
            "data-parallel ranks: start as many, or say --num-nodes and --num-gpus.",
        )
    if whole is None and micro is not None and replicas is not None:
        whole = micro * (steps or 1) * replicas
    if micro is None and whole is not None and replicas is not None:
        share = (steps or 1) * replicas
        if whole % share:
            raise file.error(
                "train_batch_size",
                f"{whole} is no multiple of {steps or 1} accumulation steps x {replicas} data-"
                "parallel ranks. Change one of them.",
            )
        micro = whole // share
    product = micro * steps * replicas if micro and steps and replicas else whole
    if whole != product:
        raise file.error(
            "train_batch_size",
            f"{whole} is not {micro} a micro-batch x {steps} accumulation steps x {replicas} "
            "data-parallel ranks. DeepSpeed refuses it too.",
        )
    if whole is not None:
        found.set("--global-batch-size", whole)
    if micro is not None:
        found.set("--micro-batch-size", micro)
    if whole is None or micro is None:
        found.note(
            "train_batch_size", "Not decided by the file alone: say --num-nodes and --num-gpus."
        )
    if steps is not None:
        found.note(
            "gradient_accumulation_steps",
            "Follows from --global-batch-size / (--micro-batch-size x data-parallel ranks).",
        )


def _say_how_long(found: Translation) -> None:
    """Train for the steps of the scheduler; without one, note that the number is missing."""
    steps = found.flags.get("--lr-decay-iters")
    if steps is not None:
        found.set("--train-iters", steps)
        return
    found.note(
        "train_iters",
        "DeepSpeed's file has no number of steps, unless its scheduler names total_num_steps: add "
        "--train-iters N, over which the learning rate decays too.",
    )


def check_job(job: Job) -> None:
    """Refuse a job whose ranks cannot hold whole copies of the model.

    Raises:
        ConfigError: If model-parallel ranks do not divide all ranks.
    """
    if job.world_size is not None and job.world_size % job.model_parallel:
        raise ConfigError(
            f"--model-parallel-size {job.model_parallel} does not divide {job.world_size} ranks."
        )
