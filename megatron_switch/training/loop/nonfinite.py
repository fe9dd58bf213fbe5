"""What happens when router logits are not finite: ``--switch-nonfinite``.

Once a step, after all gradients are complete and before they change a weight, an all-reduce finds
the Switch layers whose router saw infinity or NaN on any rank. The layers record it on the device
while they route (:mod:`megatron_switch.moe.metrics.routing_counts`), so nothing waits for it; this
is the one read by the host.

raise
    Training ends, with the first layer and rank. Megatron would find NaN in the gradients, run the
    step again to distinguish faulty hardware from diverged training, and end with an exit code.
skip
    The step is skipped, as one whose fp16 gradients overflow: no parameter, no moment and no
    learning rate changes. Megatron's own check for NaN ends the run and is therefore off; steps
    whose gradients are not finite for another reason are skipped as well.

A router is judged by the logarithm of its sum of exponentials, which infinity and NaN in any logit
reach, except a lone minus infinity: that is a probability of zero. Padding does not count.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.training import get_args

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import NumericError, OneRankNumericError
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker

_SHOWN = 3


class NonFiniteGuard:
    """Takes the place of Megatron's ``finalize_model_grads_func``, and calls it.

    Args:
        tracker: Holds what the routers recorded.
        action: What to do.
        watch_gradients: Whether to skip steps of non-finite gradients too; not where a loss scaler
            does so.
        say: Prints a line, on one rank.
    """

    def __init__(
        self,
        tracker: SwitchMetricsTracker,
        *,
        action: Literal["raise", "skip"],
        watch_gradients: bool,
        say: Callable[[str], None],
    ) -> None:
        self._tracker = tracker
        self._action = action
        self._watch_gradients = watch_gradients and action == "skip"
        self._say = say

    @classmethod
    def of(
        cls,
        args: Namespace,
        switch: SwitchConfig,
        tracker: SwitchMetricsTracker,
        say: Callable[[str], None],
    ) -> "NonFiniteGuard | None":
        """Return the guard of a run, or None where nothing is to be checked.

        Args:
            args: Validated arguments.
            switch: Switch settings.
            tracker: Holds what the routers recorded.
            say: Prints a line, on one rank.
        """
        # The host cannot read values inside a captured iteration.
        captured = args.cuda_graph_impl == "full_iteration"
        if switch.nonfinite == "ignore" or captured or not args.num_experts:
            return None
        return cls(tracker, action=switch.nonfinite, watch_gradients=not args.fp16, say=say)

    def __call__(self, model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        """Check this step, and complete its gradients.

        Raises:
            NumericError: Router logits were not finite, and the action is to raise.
        """
        bad_L = self._tracker.not_finite_layers()
        if self._action == "raise":  # before Megatron looks for NaN in gradients
            places = self._places(bad_L)
            if places:
                raise NumericError(self._verdict(places) + _ADVICE)
        finalize_model_grads(model, *args, **kwargs)
        if self._action == "skip":
            bad_gradient = (
                _gradients_are_bad(model) if self._watch_gradients else bad_L.new_zeros(1)
            )
            places = self._places(torch.cat([bad_L, bad_gradient]))
            if places:
                self._tracker.mark_step_skipped()
                self._say(f"{self._verdict(places)} The step is skipped.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "NonFiniteGuard":
        """Return itself: it stands in the model's settings, which Megatron copies for some layers.

        It does so for attention with fewer key heads than tensor ranks.
        """
        return self

    def explain(self, error: RuntimeError) -> None:
        """Explain an error by what this rank's routers recorded before it, if anything.

        For errors between the routers and the end of the step, when other ranks may have ended.

        Raises:
            OneRankNumericError: From ``error``, if router logits were not finite.
        """
        # As numbers: a rehearsal, which has no values, takes every bool for true and a count for 0.
        bad_L = self._tracker.not_finite_layers().int().tolist()
        places = {layer: dist.get_rank() for layer, bad in enumerate(bad_L) if bad}
        if places:
            raise OneRankNumericError(self._verdict(places) + _ADVICE) from error

    def _places(self, bad: torch.Tensor) -> dict[int, int]:
        """Return the entries that are set on any rank, each with the lowest such rank."""
        world = dist.get_world_size()
        rank_from_above = torch.where(bad, world - dist.get_rank(), 0)
        dist.all_reduce(rank_from_above, op=dist.ReduceOp.MAX)
        return {i: world - value for i, value in enumerate(rank_from_above.tolist()) if value}

    def _verdict(self, places: dict[int, int]) -> str:
        numbers = self._tracker.layer_numbers
        layers = [
            f"{numbers[row]} (rank {rank})" for row, rank in places.items() if row < len(numbers)
        ]
        iteration = get_args().curr_iteration + 1
        if not layers:
            (rank,) = places.values()
            return (
                f"Iteration {iteration}: gradients are not finite, from rank {rank} on; router "
                "logits are."
            )
        more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
        return (
            f"Iteration {iteration}: the router's logits are not finite in layer "
            f"{', '.join(layers[:_SHOWN])}{more}."
        )


_ADVICE = (
    " What a layer gets from the one below it may have been infinite already, so look at the first "
    "layer named. Lower --lr or --clip-grad, lengthen --lr-warmup-iters, add --moe-z-loss-coeff "
    "1e-3, or continue from the last checkpoint with --switch-nonfinite skip."
)


def _gradients_are_bad(model: Sequence[torch.nn.Module]) -> torch.Tensor:
    """Return whether a gradient on this rank is not finite: bool, shape (1,)."""
    gradients = [
        parameter.main_grad  # type: ignore[attr-defined]  # Megatron sets it
        for chunk in model
        for parameter in chunk.parameters()
        if getattr(parameter, "main_grad", None) is not None
    ]
    norm: torch.Tensor = torch.nn.utils.get_total_norm(gradients)
    return ~norm.isfinite().view(1)
