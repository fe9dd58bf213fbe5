"""Routing statistics from the routers to Megatron's log.

:class:`SwitchMetricsTracker` takes the place of Megatron's MoE metrics tracker
(``set_moe_metrics_tracker``). Routers add rows of sums; once a step :meth:`report` adds the rows of
all ranks with one all-reduce over the world, which every rank joins: pipeline stages without an MoE
layer add zeros, and tensor, context and data ranks hold distinct tokens, so each token counts once.

A router records only where gradients are enabled, which is once per micro-batch with or without
recompute; evaluation has rows of its own that only :meth:`report_evaluation` reads. Both are
Megatron metric entries and are cleared in place, because a captured CUDA graph keeps adding to the
memory it was captured with, and Megatron restores the entries after its warm-up.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.moe_logging import (
    MetricEntry,
    MoEMetricsTracker,
    get_moe_metrics_tracker,
)
from torch import Tensor

from megatron_switch.moe.metrics.routing_counts import RoutingReport, not_finite, row_width

_STEP_KEYS = ("advanced iterations", "skipped iterations")
_Phase = Literal["training", "evaluation"]


class SwitchMetricsTracker(MoEMetricsTracker):  # type: ignore[misc]
    """Collects rows of routing statistics and reports them once per step.

    Args:
        layer_numbers: 1-based numbers of all layers with experts, over all pipeline stages.
        num_experts: Experts in each of them.
        on_report: Called on every rank with (report, iteration) after each training step.
        layer_interval: Iterations between per-layer values in TensorBoard.
        encoder_layers: Layers of the encoder, which are numbered first; 0 without one.
    """

    def __init__(
        self,
        layer_numbers: tuple[int, ...],
        num_experts: int,
        *,
        on_report: Callable[[RoutingReport, int], None] | None = None,
        layer_interval: int = 10,
        encoder_layers: int = 0,
    ) -> None:
        super().__init__()
        self._encoder_layers = encoder_layers
        self._layer_numbers = layer_numbers
        self._row_of_layer = {number: row for row, number in enumerate(layer_numbers)}
        self._shape = (len(layer_numbers), row_width(num_experts))
        self._on_report = on_report
        self._layer_interval = layer_interval
        self._steps_before = (0, 0)
        self._step_is_skipped = False

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """1-based numbers of all layers with experts."""
        return self._layer_numbers

    @property
    def step_is_skipped(self) -> bool:
        """Whether the current step must not change a weight."""
        return self._step_is_skipped

    def mark_step_skipped(self) -> None:
        """Let the optimizer skip the current step; until the next report."""
        self._step_is_skipped = True

    def not_finite_layers(self) -> Tensor:
        """Return in which layers this rank's routers saw infinity or NaN in the current step.

        Returns:
            Shape (L,), bool, on the device; nothing waits for it.
        """
        return not_finite(self._rows("training", _device()))

    def record_row(self, layer_number: int, row: Tensor, *, training: bool) -> None:
        """Add one micro-batch's row of one layer (see ``statistics_row``)."""
        rows = self._rows("training" if training else "evaluation", row.device)
        rows[self._row_of_layer[layer_number]] += row

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        per_layer_logging: bool = False,
        total_loss_dict: dict[str, Any] | None = None,
        **_: object,
    ) -> str:
        """Sum over ranks, log, clear; called by Megatron once per step on every rank.

        Megatron also passes names and per-name settings, all known here from construction; they
        are not read.

        Args:
            loss_scale: One over the number of micro-batches; the rows know how many they hold.
            iteration: Current iteration.
            writer: TensorBoard writer, on the rank that has one.
            wandb_writer: Weights & Biases run, on the rank that has one.
            per_layer_logging: Write per-layer values each iteration (``--moe-per-layer-logging``).
            total_loss_dict: Megatron's sums between two console lines.

        Returns:
            Text for the console line.
        """
        self._step_is_skipped = False
        if not self._layer_numbers:
            return ""
        report = self._summed("training")
        scalars = report.scalars()
        _log(writer, wandb_writer, scalars, iteration)
        if per_layer_logging or iteration % self._layer_interval == 0:
            _log(writer, wandb_writer, _named_by_layer(report), iteration)
        self._add_to_console(total_loss_dict, scalars)
        if self._on_report is not None:
            self._on_report(report, iteration)
        return console_text(report)

    def report_evaluation(self) -> RoutingReport | None:
        """Sum evaluation rows over ranks and clear them; every rank must call it.

        Returns:
            The report, or None where the model has no MoE layer.
        """
        return self._summed("evaluation") if self._layer_numbers else None

    def _rows(self, phase: _Phase, device: torch.device | int | str) -> Tensor:
        """Return the rows recorded since the last report: (L, row_width(E)), float64."""
        if phase not in self._metrics:
            with torch.inference_mode(False):  # generating text may come first
                rows = torch.zeros(self._shape, dtype=torch.float64, device=device)
            self._metrics[phase] = MetricEntry(values=rows)
        values: Tensor = self._metrics[phase].values
        return values

    def _summed(self, phase: _Phase) -> RoutingReport:
        recorded = self._rows(phase, _device())
        rows = recorded.clone()
        recorded.zero_()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(rows)
        return RoutingReport.of(
            rows.cpu(), self._layer_numbers, encoder_layers=self._encoder_layers
        )

    def _add_to_console(
        self, total_loss_dict: dict[str, Any] | None, scalars: dict[str, float]
    ) -> None:
        """Add to Megatron's sums, except for a skipped step, which it does not count either.

        Where a line has no step that counts, a value is NaN, which Megatron leaves out of the line.
        """
        if total_loss_dict is None:
            return
        skipped = self._step_was_skipped(total_loss_dict)
        counted = int(total_loss_dict.get(_STEP_KEYS[0], 0))
        for name in ("load_balancing_loss", "z_loss"):
            if skipped and not counted:
                total_loss_dict[name] = torch.tensor([math.nan])
            elif not skipped and counted > 1 and name in total_loss_dict:
                total_loss_dict[name] = total_loss_dict[name] + scalars[name]
            elif not skipped:
                total_loss_dict[name] = torch.tensor([scalars[name]])

    def _step_was_skipped(self, total_loss_dict: dict[str, Any]) -> bool:
        """Return it from Megatron's two counters, which it resets together after a console line."""
        advanced, skipped = (int(total_loss_dict.get(key, 0)) for key in _STEP_KEYS)
        advanced_before, skipped_before = self._steps_before
        self._steps_before = (advanced, skipped)
        return (advanced, skipped) in {(advanced_before, skipped_before + 1), (0, 1)}


def record_routing(layer_number: int, row: Tensor, *, training: bool) -> None:
    """Hand a router's row to the active tracker, if it is ours.

    Inside another training program Megatron's own tracker is active; it records only losses, and
    that program decides what it logs.
    """
    tracker = get_moe_metrics_tracker()
    if isinstance(tracker, SwitchMetricsTracker):
        tracker.record_row(layer_number, row, training=training)


def step_is_skipped() -> bool:
    """Return whether the active tracker, if it is ours, marks the step as skipped."""
    tracker = get_moe_metrics_tracker()
    return isinstance(tracker, SwitchMetricsTracker) and tracker.step_is_skipped


def console_text(report: RoutingReport) -> str:
    """Return the addition to a console line: drops and load of each stack, and idle experts."""
    parts = {f"{stack} ": part for stack, part in report.stacks().items()} or {"": report}
    text = "".join(
        f" {stack}dropped: {part.dropped:.4f} |"
        f" {stack}expert load max/mean: {part.load_ratio:.2f} |"
        for stack, part in parts.items()
    )
    return (
        f"{text}"
        f" experts below half: {report.experts_below_half} |"
        f" dead experts: {report.dead_experts} |"
    )


def _device() -> torch.device | int | str:
    """Return the device of rows on a rank that has recorded none: a stage without an MoE layer."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _named_by_layer(report: RoutingReport) -> dict[str, float]:
    """Return per-layer values under Megatron's names, with the stack's where there are two."""
    return {
        f"moe/{name}_{layer}": value
        for name, values in report.per_layer().items()
        for layer, value in zip(report.layer_names(), values, strict=True)
    }


def _log(writer: Any, wandb_writer: Any, scalars: dict[str, float], iteration: int) -> None:
    if writer is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
    if wandb_writer:
        wandb_writer.log(scalars, iteration)
