"""What evaluation adds to the log: its own drop rate and expert load, per split, and how far it is.

Megatron calls one function on every rank at the end of an evaluation, and another on the last rank
once the loss is written. The first sums the routing statistics over ranks, the second logs them. In
between it says nothing, so an evaluation that takes long is counted from the forward step.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.training.global_vars import get_wandb_writer

from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker, console_text
from megatron_switch.training.logs.metrics_file import StepWriter
from megatron_switch.training.loop.batch import ForwardStep
from megatron_switch.utils.progress import PeriodicReport

_SPLITS = ("validation", "test")
_INTERVAL_S = 15.0
"""Seconds between the lines of a long evaluation."""


class EvaluationProgress:
    """Counts the micro-batches of an evaluation, and says how far a long one is.

    Args:
        args: Validated arguments.
        say: Where lines go.
    """

    def __init__(self, args: Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self._report = PeriodicReport("evaluation", say, interval_s=_INTERVAL_S)
        self._micro_batches = 0

    def begin_micro_batch(self) -> None:
        """Note that this rank begins one."""
        args = self._args
        replicas = args.eval_micro_batch_size * args.data_parallel_size
        done = self._micro_batches // max(1, args.eval_global_batch_size // replicas)
        several = args.full_validation or args.multiple_validation_sets  # of lengths of their own
        self._report.begin_step(done, None if several else args.eval_iters)
        self._micro_batches += 1

    def end(self) -> None:
        """Note that the evaluation is over."""
        self._micro_batches = 0
        self._report.end()


class EvaluationReporter:
    """Reports the routing of evaluations.

    Args:
        tracker: Holds the statistics that routers recorded.
        forward_step: Knows which data iterator was read.
        writer: The last rank's writer; None on the others.
        progress: Told when an evaluation is over.
    """

    def __init__(
        self,
        tracker: SwitchMetricsTracker,
        forward_step: ForwardStep,
        writer: StepWriter | None,
        progress: EvaluationProgress,
    ) -> None:
        self._tracker = tracker
        self._forward_step = forward_step
        self._writer = writer
        self._progress = progress
        self._split = _SPLITS[0]

    def collect(self, model: Any) -> RoutingReport | None:
        """Sum over ranks what the routers recorded; called on every rank."""
        self._progress.end()
        index = torch.tensor([self._forward_step.evaluated_split()], device="cuda")
        torch.distributed.all_reduce(index, op=torch.distributed.ReduceOp.MAX)
        self._split = _SPLITS[int(index)]
        return self._tracker.report_evaluation()

    def write(self, report: RoutingReport | None, iteration: int, writer: Any) -> None:
        """Log the evaluation that has just ended; called on the last rank."""
        assert self._writer is not None, "Megatron calls this where its writer is"
        logged = self._writer.add_evaluation(report, self._split, iteration)
        wandb_writer = get_wandb_writer()
        if wandb_writer and logged:
            wandb_writer.log(logged, iteration)
        if report is not None:
            print(f" {self._split} routing at iteration {iteration} |{console_text(report)}")
