"""Whether the learning rate's schedule is one, which Megatron asserts late and without words."""

from argparse import Namespace

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name


def check_schedule(args: Namespace) -> None:
    """Refuse a schedule that Megatron's own class asserts against.

    Args:
        args: Validated arguments.

    Raises:
        ConfigError: Warm-up fills the whole schedule, rates are in the wrong order, or the decay of
            ``--lr-decay-style WSD`` has no length.
    """
    if args.skip_train:
        return
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"lr_decay_{unit}")
    length = getattr(args, f"train_{unit}") if length is None else length
    if args.lr_warmup_fraction is not None:
        given, warm_up = "fraction", args.lr_warmup_fraction * length
    else:
        given, warm_up = unit, getattr(args, f"lr_warmup_{unit}")
    if warm_up >= length:
        raise ConfigError(
            f"Warm-up must end before the schedule does, but --lr-warmup-{given} "
            f"{getattr(args, f'lr_warmup_{given}')} leaves nothing of its {length} {unit} "
            f"(--lr-decay-{unit}, else --train-{unit}). Shorten the warm-up, or train longer."
        )
    for name in ("min_lr", "lr_warmup_init"):
        low = getattr(args, name)
        if low > args.lr:
            flag = flag_name(name)
            raise ConfigError(
                f"The learning rate does not go above --lr, which is {args.lr:g}, but {flag} is "
                f"{low:g}. Lower it, or raise --lr."
            )
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise ConfigError(
            "--lr-decay-style WSD holds the learning rate and lets it fall at the end, but how "
            f"long that takes is not given. Add --lr-wsd-decay-{unit}."
        )
