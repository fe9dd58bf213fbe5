"""Give an optimizer's stored parameter groups the learning rates and weight decay of this run.

Megatron pairs stored groups with those of the run by everything that tells them apart, rates
included, and then keeps the stored rates. So a run with another ``--lr`` does not find its groups.
Which schedule holds was decided before, by :mod:`megatron_switch.checkpoint.load.lr_agreement`: at
this point the rates of the run are those to use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What Megatron's schedule reads from a group."""


def take_rates(
    stored_groups: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Copy the rates of each group to the stored group of the same kind.

    Nothing is changed where rates alone tell two groups of a list apart: Megatron must pair those.

    Args:
        stored_groups: Groups of a checkpoint; changed in place.
        groups: Groups of this run's optimizer.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    names = [name for name in param_group_identifier_keys if name not in RATES]

    def kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)

    by_kind = {kind(group): group for group in groups}
    if len(by_kind) < len(groups) or len({kind(g) for g in stored_groups}) < len(stored_groups):
        return
    for stored in stored_groups:
        if (group := by_kind.get(kind(stored))) is not None:
            stored.update({name: group[name] for name in RATES if name in group})
            for name in RATES:
                if name not in group:
                    stored.pop(name, None)
