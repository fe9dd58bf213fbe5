"""Refuse a changed learning-rate or weight-decay schedule before Megatron's assertion does.

Megatron counts its schedule in samples, keeps it in the checkpoint, and compares the two
with a bare assertion when a run resumes. A longer ``--train-iters`` therefore ends a job
with a message that names no flag. :func:`check_schedule` computes the same numbers from
the arguments and names the flag that made them differ, in the flag's own unit.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_switch.errors import CheckpointError

_RATES = {
    "lr": "max_lr",
    "min_lr": "min_lr",
    "start_weight_decay": "start_wd",
    "end_weight_decay": "end_wd",
}
"""Arguments that parameter groups are built from, and their names in the record."""

_DECOUPLED = {"decoupled_lr": "--decoupled-lr", "decoupled_min_lr": "--decoupled-min-lr"}


@dataclass(frozen=True)
class _Entry:
    """One number of the schedule: the flag that sets it, its value, and whether it is a span."""

    flag: str
    value: Any
    is_span: bool = False  # counted in samples


def check_schedule(
    record: Mapping[str, Any] | None, stored_args: Namespace, args: Namespace
) -> None:
    """Raise when the arguments ask for another schedule than the checkpoint continues.

    Args:
        record: The checkpoint's ``opt_param_scheduler`` record; None if it has none.
        stored_args: Megatron's arguments that the checkpoint was saved with.
        args: Megatron's validated arguments of this run.

    Raises:
        CheckpointError: Unless ``--override-opt_param-scheduler`` (take the new values) or
            ``--use-checkpoint-opt_param-scheduler`` (keep the old ones) decides.
    """
    decided = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if record is None or decided or not (args.train_iters or args.train_samples):
        return
    batches = getattr(stored_args, "global_batch_size", None), args.global_batch_size
    # Iterations of different sizes cannot be compared; samples always can.
    batch = args.global_batch_size if args.train_iters and batches[0] == batches[1] else 1
    lines = {}  # one line for a flag, though several numbers follow from it
    for name, entry in _schedule(args).items():
        if name in record and record[name] != entry.value:
            old, new = (
                _span(value, batch) if entry.is_span else value
                for value in (record[name], entry.value)
            )
            lines[entry.flag] = f"\n  {entry.flag}: {old} in the checkpoint, {new} now"
    for name, flag in _DECOUPLED.items():  # of single parameters, so not in the record
        old, new = (getattr(each, name, None) for each in (stored_args, args))
        if old != new:
            lines[flag] = f"\n  {flag}: {old} in the checkpoint, {new} now"
    if lines:
        if batches[0] not in (None, batches[1]):
            lines["batch"] = (
                f"\n  --global-batch-size: {batches[0]} in the checkpoint, {batches[1]} now"
            )
        raise CheckpointError(
            f"The schedule differs from the checkpoint's:{''.join(lines.values())}\n"
            "Pass --override-opt_param-scheduler to continue with the new values, or "
            "--use-checkpoint-opt_param-scheduler to keep the old ones. To stop early, leave the "
            "schedule as it is and pass --exit-interval."
        )


def keep_schedule(
    record: Mapping[str, Any] | None, stored_args: Namespace, args: Namespace
) -> None:
    """Take the checkpoint's rates if ``--use-checkpoint-opt_param-scheduler`` asks for them.

    Megatron takes them for its schedule only. Each of the optimizer's parameter groups has rates
    too, and is not loaded with others.

    Args:
        record: The checkpoint's ``opt_param_scheduler`` record; None if it has none.
        stored_args: Megatron's arguments that the checkpoint was saved with.
        args: Megatron's validated arguments of this run; changed.
    """
    if record is None or not args.use_checkpoint_opt_param_scheduler:
        return
    for name, key in _RATES.items():
        setattr(args, name, record.get(key, getattr(args, name)))
    for name in _DECOUPLED:
        setattr(args, name, getattr(stored_args, name, None))


def _schedule(args: Namespace) -> dict[str, _Entry]:
    """Compute what Megatron's scheduler will be built with, by the names it stores."""
    if args.train_iters:
        unit, batch = "iters", args.global_batch_size
        length, decay = args.train_iters, args.lr_decay_iters
        warmup = args.lr_warmup_iters
    else:
        unit, batch = "samples", 1
        length, decay = args.train_samples, args.lr_decay_samples
        warmup = args.lr_warmup_samples
    decay_flag = f"--train-{unit}" if decay is None else f"--lr-decay-{unit}"
    decay_steps = (length if decay is None else decay) * batch
    warmup_flag, warmup_steps = f"--lr-warmup-{unit}", warmup * batch
    if args.lr_warmup_fraction is not None:
        warmup_flag, warmup_steps = "--lr-warmup-fraction", args.lr_warmup_fraction * decay_steps
    return {
        "max_lr": _Entry("--lr", float(args.lr)),
        "min_lr": _Entry("--min-lr", args.min_lr),
        "lr_decay_style": _Entry("--lr-decay-style", args.lr_decay_style),
        "lr_warmup_steps": _Entry(warmup_flag, warmup_steps, is_span=True),
        "lr_decay_steps": _Entry(decay_flag, decay_steps, is_span=True),
        "wd_incr_steps": _Entry(f"--train-{unit}", length * batch, is_span=True),
        "wd_incr_style": _Entry("--weight-decay-incr-style", args.weight_decay_incr_style),
        "start_wd": _Entry("--start-weight-decay", args.start_weight_decay),
        "end_wd": _Entry("--end-weight-decay", args.end_weight_decay),
    }


def _span(samples: float, batch: int) -> str:
    """Write a span of samples as iterations of ``batch`` samples, or as samples where it is 1."""
    if batch == 1 or samples % batch != 0:
        return f"{samples:g} samples"
    return f"{samples / batch:g}"
