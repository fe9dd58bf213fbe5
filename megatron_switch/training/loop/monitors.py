"""What watches Megatron's loop: routing of each step, evaluations, and values that are not finite.

Megatron calls one function on every rank at the end of an evaluation, and another on the last rank
once the loss is written. The first sums the routing statistics over ranks, the second logs them. In
between it prints nothing, so the progress of a long evaluation is counted in the forward step.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker

from megatron_switch.architecture.model import Architecture
from megatron_switch.config import SwitchConfig
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker, console_text
from megatron_switch.training.logs.evaluation_names import (
    AFTER_TRAINING,
    TEST,
    VALIDATION,
    NamedValues,
    is_after_training,
)
from megatron_switch.training.logs.metrics_file import MetricsFile, StepWriter
from megatron_switch.training.logs.routing_watch import routing_watch_of
from megatron_switch.training.loop.forward_step import ForwardStep, forward_step_of
from megatron_switch.training.loop.global_state import training_seconds
from megatron_switch.training.loop.nonfinite import NonFiniteGuard
from megatron_switch.upstream.private import (
    open_log_writers,
    replace_tensorboard_writer,
    replace_wandb_writer,
)
from megatron_switch.utils.progress import PeriodicReport

_TEST_SPLIT = 1
"""What the forward step calls the test data."""
_INTERVAL_S = 15.0
"""Seconds between the lines of a long evaluation."""


@dataclass(frozen=True)
class LoopMonitors:
    """What Megatron's ``pretrain`` is given to call."""

    forward_step: ForwardStep
    evaluation: "EvaluationReporter"


@contextmanager
def loop_monitors(
    args: Namespace, switch: SwitchConfig, model: Any, say: Callable[[str], None]
) -> Iterator[LoopMonitors]:
    """Watch Megatron's loop for the length of a block; its process groups exist.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.
        model: Megatron's configuration of the model, changed in place.
        say: Prints a line on the screen, on the rank that prints the losses.

    Raises:
        OneRankNumericError: From an error in the block, where this rank's router logits were not
            finite.
    """
    writer = _step_writer(args, switch)
    tracker = SwitchMetricsTracker(
        Architecture.from_args(args).sparse_layer_numbers,
        args.num_experts or 1,
        encoder_layers=args.num_layers if args.switch_arch == "t5" else 0,
        on_report=_on_report(args, switch, writer, say),
        layer_interval=switch.metrics_interval,
    )
    set_moe_metrics_tracker(tracker)
    progress = EvaluationProgress(args, say)
    forward_step = forward_step_of(args, switch, on_evaluation=progress.begin_micro_batch)
    guard = NonFiniteGuard.of(args, switch, tracker, say)
    if guard is not None:
        model.transformer.finalize_model_grads_func = guard
    try:
        yield LoopMonitors(
            forward_step, EvaluationReporter(args, tracker, forward_step, writer, progress)
        )
    except RuntimeError as error:
        if guard is not None:
            guard.explain(error)
        raise
    finally:
        if writer is not None:
            writer.finish_iteration()


def _step_writer(args: Namespace, switch: SwitchConfig) -> StepWriter | None:
    """Return the writer of the last rank, which is the one that Megatron logs from."""
    open_log_writers(args)
    if args.rank != args.world_size - 1:
        return None
    path = switch.metrics_file
    writer = StepWriter(
        replace_tensorboard_writer(None),
        None if path is None else MetricsFile(Path(path)),
        tensorboard_folder=Path(args.tensorboard_dir) if args.tensorboard_dir else None,
        # Of a sample, for throughput: both sides of a t5.
        sequence_length=args.seq_length + (args.decoder_seq_length or 0),
        array_interval=switch.metrics_interval,
        clock=training_seconds,
    )
    replace_tensorboard_writer(writer)
    return writer


def _on_report(
    args: Namespace, switch: SwitchConfig, writer: StepWriter | None, say: Callable[[str], None]
) -> Callable[[RoutingReport, int], None]:
    """Return what receives each step's routing on this rank."""
    listeners: list[Callable[[RoutingReport, int], None]] = []

    def warn(text: str, iteration: int) -> None:
        assert writer is not None, "the rank that writes the losses warns"
        say(text)
        writer.add_warning(text, iteration)

    if writer is not None:
        listeners.append(writer.add_routing)
        if args.num_experts:
            layers = len(Architecture.from_args(args).sparse_layer_numbers)
            listeners.append(routing_watch_of(args, switch, num_sparse_layers=layers, warn=warn))

    def on_report(report: RoutingReport, iteration: int) -> None:
        for listener in listeners:
            listener(report, iteration)

    return on_report


class EvaluationProgress:
    """Counts the micro-batches of an evaluation, and prints the progress of a long one.

    Args:
        args: Validated arguments.
        say: Prints a line on the screen.
    """

    def __init__(self, args: Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self._report = PeriodicReport("evaluation", say, interval_s=_INTERVAL_S)
        self._micro_batches = 0

    def begin_micro_batch(self) -> None:
        """Count one, which this rank begins."""
        args = self._args
        replicas = args.eval_micro_batch_size * args.data_parallel_size
        done = self._micro_batches // max(1, args.eval_global_batch_size // replicas)
        several = args.full_validation or args.multiple_validation_sets  # of lengths of their own
        self._report.begin_step(done, None if several else args.eval_iters)
        self._micro_batches += 1

    def end(self) -> None:
        """Finish the count of an evaluation."""
        self._micro_batches = 0
        self._report.end()


class EvaluationReporter:
    """Names evaluations in the logs, and reports their routing.

    Args:
        args: Validated arguments, which the loop keeps up to date.
        tracker: Holds the statistics that routers recorded.
        forward_step: Knows which data iterator was read.
        writer: The last rank's writer; None on the others.
        progress: Ended with the evaluation.
    """

    def __init__(
        self,
        args: Namespace,
        tracker: SwitchMetricsTracker,
        forward_step: ForwardStep,
        writer: StepWriter | None,
        progress: EvaluationProgress,
    ) -> None:
        self._args = args
        self._tracker = tracker
        self._forward_step = forward_step
        self._writer = writer
        self._progress = progress
        self._evaluation = VALIDATION
        self._seen: tuple[int | None, int] = (None, 0)
        wandb_writer = replace_wandb_writer(None)
        self._wandb = None if wandb_writer is None else NamedValues(wandb_writer)
        if self._wandb is not None:
            replace_wandb_writer(self._wandb)

    def collect(self, model: Any) -> RoutingReport | None:
        """Sum over ranks what the routers recorded; called on every rank before any value."""
        self._progress.end()
        index = torch.tensor([self._forward_step.evaluated_split()], device="cuda")
        torch.distributed.all_reduce(index, op=torch.distributed.ReduceOp.MAX)
        self._evaluation = TEST if int(index) == _TEST_SPLIT else self._validation()
        if self._writer is not None:
            self._writer.begin_evaluation(self._evaluation)
        if self._wandb is not None:
            self._wandb.evaluation = self._evaluation
        return self._tracker.report_evaluation()

    def _validation(self) -> str:
        """Return the name of a validation; the loop counts a step that it begins."""
        if self._args.skip_train:
            return VALIDATION
        iteration = self._args.curr_iteration + 1
        seen = self._seen[1] if self._seen[0] == iteration else 0
        self._seen = iteration, seen + 1
        after = is_after_training(self._args, iteration, seen=seen)
        return AFTER_TRAINING if after else VALIDATION

    def write(self, report: RoutingReport | None, iteration: int, writer: Any) -> None:
        """Log the evaluation that has just ended; called on the last rank."""
        assert self._writer is not None, "Megatron calls this where its writer is"
        logged = self._writer.add_evaluation(report, iteration)
        if self._wandb is not None and logged:
            self._wandb.log(logged, iteration)
        if report is not None:
            name, _, after = self._evaluation.partition(" ")
            place = f"iteration {iteration}{after and ' ' + after}"
            print(f" {name} routing at {place} |{console_text(report)}")
