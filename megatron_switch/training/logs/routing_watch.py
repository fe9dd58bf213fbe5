"""Warnings about routing: one as soon as it collapses, one where drops stay high after warm-up.

Early in training routing is uneven and drops are normal, so two rules differ in patience. A router
that sends most tokens to a few experts is reported from the tenth iteration on. A drop rate that is
merely high is reported once it has stayed so after warm-up, *and* lies above what even a perfectly
balanced router would drop at the same capacity.

Both name the cause before the symptom: first the balancing loss, then initialisation and learning
rate, then the capacity.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.training.logs.balance_settings import BalanceSettings
from megatron_switch.training.logs.capacity_facts import CapacityFacts, capacity_advice

_HIGH = 0.05
"""Drop rate from which on it is worth a warning."""
_ABOVE_BALANCED = 1.25
"""How much more than a balanced router's drops count as the router's own."""
_WINDOW = 50
"""Iterations over which rates are averaged after warm-up."""
_WORST_LAYERS = 3
_MIN_WARM_UP = 100
"""Least iterations before a high drop rate says anything about the router."""

_FIRST_ALARM = 10
"""First iteration that may be called collapsed."""
_ALARM_WINDOW = 5
_COLLAPSED_DROPS = 0.65
_COLLAPSED_ONTO_ONE = 0.7
"""Share of a layer's tokens that choose its busiest expert."""
_COLLAPSED_DEAD = 0.4
"""Share of a layer's experts that receive no token, where a balanced load has 16 for each."""
_TOKENS_AN_EXPERT = 16


@dataclass(frozen=True)
class Window:
    """Means over some iterations."""

    iterations: int
    layer_numbers: tuple[int, ...]
    dropped_L: Tensor
    sweep_F: Tensor
    busiest_L: Tensor
    """Share of a layer's tokens that choose its busiest expert."""
    dead_L: Tensor
    """Experts of a layer that receive no token."""
    tokens_L: Tensor
    num_experts: int

    @classmethod
    def of(cls, reports: list[RoutingReport]) -> "Window":
        """Return the means of some reports, at least one."""

        def mean(values: list[Tensor]) -> Tensor:
            return torch.stack(values).mean(dim=0)

        return cls(
            iterations=len(reports),
            layer_numbers=reports[0].layer_numbers,
            dropped_L=mean([one.dropped_L for one in reports]),
            sweep_F=mean([one.sweep_dropped_LF.mean(dim=0) for one in reports]),
            busiest_L=mean([one.load_LE.amax(dim=1) for one in reports]),
            dead_L=mean([(one.load_LE == 0).sum(dim=1).double() for one in reports]),
            tokens_L=mean([one.tokens_L for one in reports]),
            num_experts=reports[0].load_LE.shape[1],
        )

    @property
    def dropped(self) -> float:
        """Mean drop rate over layers."""
        return self.dropped_L.mean().item()

    def is_collapsed(self, balanced_drops: float) -> bool:
        """Return whether most tokens go to a few experts.

        Args:
            balanced_drops: What a balanced router would drop.
        """
        enough_L = self.tokens_L >= _TOKENS_AN_EXPERT * self.num_experts
        dead_L = enough_L & (self.dead_L > _COLLAPSED_DEAD * self.num_experts)
        onto_one = self.num_experts > 2 and self.busiest_L.max().item() > _COLLAPSED_ONTO_ONE
        drops = self.dropped > max(_COLLAPSED_DROPS, _ABOVE_BALANCED * balanced_drops)
        return drops or onto_one or bool(dead_L.any())


def routing_watch_of(
    args: Namespace,
    switch: SwitchConfig,
    *,
    num_sparse_layers: int,
    warn: Callable[[str, int], None],
) -> "RoutingWatch":
    """Return the watch of a run.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.
        num_sparse_layers: Sparse layers in the whole model.
        warn: Receives a warning's text and the iteration.
    """
    return RoutingWatch(
        CapacityFacts.of(args, switch, num_sparse_layers=num_sparse_layers),
        BalanceSettings.of(args, switch),
        warm_up=max(args.lr_warmup_iters or 0, _MIN_WARM_UP),
        warn=warn,
    )


class RoutingWatch:
    """Reads every routing report, and gives each of its two warnings at most once.

    Args:
        facts: Capacity in force and what a row costs.
        settings: What acts on the balance.
        warm_up: Iterations of the run in which high drops are normal.
        warn: Receives a warning's text and the iteration.
    """

    def __init__(
        self,
        facts: CapacityFacts,
        settings: BalanceSettings,
        *,
        warm_up: int,
        warn: Callable[[str, int], None],
    ) -> None:
        self._facts = facts
        self._settings = settings
        self._warm_up = warm_up
        self._warn = warn
        self._recent: list[RoutingReport] = []
        self._collapse_is_known = self._drops_are_known = False
        self._floor = facts.balanced_drop_rate()
        self._threshold = max(_HIGH, _ABOVE_BALANCED * self._floor)

    def __call__(self, report: RoutingReport, iteration: int) -> None:
        """Take one step's report."""
        if self._drops_are_known and self._collapse_is_known:
            return
        self._recent = [*self._recent[1 - _WINDOW :], report]
        if not self._collapse_is_known and iteration >= _FIRST_ALARM:
            self._look_for_collapse(iteration)
        # Of reports after warm-up only.
        long_enough = iteration >= self._warm_up + _WINDOW and len(self._recent) == _WINDOW
        if long_enough and not self._drops_are_known:
            window = Window.of(self._recent)
            if window.dropped > self._threshold:
                self._drops_are_known = True
                self._warn(drop_warning(self._facts, self._settings, window, iteration), iteration)

    def _look_for_collapse(self, iteration: int) -> None:
        window = Window.of(self._recent[-_ALARM_WINDOW:])
        if window.is_collapsed(self._floor):
            self._collapse_is_known = True
            self._warn(collapse_warning(self._settings, window, iteration), iteration)


def collapse_warning(settings: BalanceSettings, window: Window, iteration: int) -> str:
    """Return the text about a router that sends most tokens to a few experts.

    Args:
        settings: What acts on the balance.
        window: The last iterations.
        iteration: Current iteration.
    """
    worst = int(window.busiest_L.argmax())
    text = (
        f"Warning: at iteration {iteration} most tokens go to a few experts: "
        f"{window.dropped:.1%} of tokens are dropped, and in layer {window.layer_numbers[worst]} "
        f"the busiest of {window.num_experts} experts receives "
        f"{window.busiest_L[worst].item():.0%} of the tokens and {window.dead_L[worst].item():.0f} "
        f"receive none (means of {window.iterations} iterations). "
    )
    if not settings.coefficient:
        return text + _sentences(settings.balance_advice())
    return (
        f"{text}This may pass while the balancing loss acts. If it does not: "
        f"{settings.start_advice()}; then {settings.balance_advice()}. A higher capacity factor "
        "does not help here."
    )


def drop_warning(
    facts: CapacityFacts, settings: BalanceSettings, window: Window, iteration: int
) -> str:
    """Return the text about drops that stay high.

    Args:
        facts: Capacity in force and what a row costs.
        settings: What acts on the balance.
        window: The last iterations.
        iteration: Current iteration.
    """
    order = window.dropped_L.argsort(descending=True)[:_WORST_LAYERS].tolist()
    layers = ", ".join(
        f"layer {window.layer_numbers[i]} {window.dropped_L[i].item():.1%}" for i in order
    )
    text = (
        f"Warning: {window.dropped:.1%} of tokens were dropped over the last {window.iterations} "
        f"iterations (iteration {iteration}; worst: {layers}), more than the "
        f"{facts.balanced_drop_rate():.1%} of a balanced router at capacity factor "
        f"{facts.factor:.4g}. "
    )
    if not settings.coefficient:
        return text + _sentences(
            settings.balance_advice(), "judge the capacity after that, not before"
        )
    capacity = capacity_advice(facts, window.dropped, window.sweep_F.tolist())
    return text + _sentences(
        f"In this order: 1. {settings.balance_advice()}",
        f"2. {settings.start_advice()}",
        f"3. {capacity}",
    )


def _sentences(*texts: str) -> str:
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)
