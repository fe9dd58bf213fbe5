"""The settings of a run that decide whether its router becomes balanced, and what to change first.

The order is that of cause and effect: without a balancing loss nothing balances; large initial
logits and a high learning rate without warm-up let a few experts win before the balancing loss
acts; the capacity only decides what an uneven load costs.
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron_switch.config import SwitchConfig

_PAPER_COEFFICIENT, _STRONG_COEFFICIENT = 0.01, 0.1
_PAPER_INIT_SCALE = 0.1


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """What acts on the balance of a router.

    Attributes:
        coefficient: Of the load-balancing loss.
        init_scale: Of the router's first weights; "megatron" for Megatron's own initialisation;
            None where they were loaded.
        lr: Largest learning rate.
        warm_up: Whether the learning rate rises at the beginning.
    """

    coefficient: float
    init_scale: str | None
    lr: float
    warm_up: bool

    @classmethod
    def of(cls, args: Namespace, switch: SwitchConfig) -> "BalanceSettings":
        """Return the settings of a run.

        Args:
            args: Validated arguments.
            switch: Switch settings.
        """
        rises = (args.lr_warmup_iters, args.lr_warmup_samples, args.lr_warmup_fraction)
        return cls(
            coefficient=args.moe_aux_loss_coeff or 0.0,
            init_scale=None if args.load else switch.init_scale,
            lr=args.lr or 0.0,
            warm_up=any(rises),
        )

    def balance_advice(self) -> str:
        """Return what to do about the balancing loss."""
        coefficient = self.coefficient
        if not coefficient:
            return (
                "nothing balances the load, because --moe-aux-loss-coeff is 0: set it to "
                f"{_PAPER_COEFFICIENT:g}"
            )
        if coefficient < _PAPER_COEFFICIENT:
            return (
                f"raise --moe-aux-loss-coeff, which is {coefficient:g} "
                f"(the Switch paper has {_PAPER_COEFFICIENT:g})"
            )
        if coefficient < _STRONG_COEFFICIENT:
            return (
                f"raise --moe-aux-loss-coeff, which is {coefficient:g} "
                f"({_STRONG_COEFFICIENT:g} is strong)"
            )
        return f"--moe-aux-loss-coeff is {coefficient:g}, which is strong already"

    def start_advice(self) -> str:
        """Return what to do about initialisation and learning rate."""
        advice = []
        scale = self.init_scale
        if scale == "megatron" or (scale is not None and float(scale) > _PAPER_INIT_SCALE):
            advice.append(
                f"--switch-init-scale is {scale}: larger values than {_PAPER_INIT_SCALE:g} "
                "destabilise routing"
            )
        if self.warm_up:
            advice.append(f"lower --lr, which is {self.lr:g}, or lengthen its warm-up")
        else:
            advice.append(f"--lr {self.lr:g} has no warm-up: add --lr-warmup-iters, or lower it")
        return "; ".join(advice)
