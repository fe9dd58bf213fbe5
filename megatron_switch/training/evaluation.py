"""What evaluation adds to the log: its own drop rate and expert load, per split.

Megatron calls one function on every rank at the end of an evaluation, and another on the last rank
once the loss is written. The first sums the routing statistics over ranks, the second logs them.
"""

from typing import Any

import torch
from megatron.training.global_vars import get_wandb_writer

from megatron_switch.moe.metrics import SwitchMetricsTracker, console_text
from megatron_switch.moe.statistics import RoutingReport
from megatron_switch.training.batch import ForwardStep
from megatron_switch.training.metrics_file import StepWriter

_SPLITS = ("validation", "test")


class EvaluationReporter:
    """Reports the routing of evaluations.

    Args:
        tracker: Holds the statistics that routers recorded.
        forward_step: Knows which data iterator was read.
        writer: The last rank's writer; None on the others.
    """

    def __init__(
        self, tracker: SwitchMetricsTracker, forward_step: ForwardStep, writer: StepWriter | None
    ) -> None:
        self._tracker = tracker
        self._forward_step = forward_step
        self._writer = writer
        self._split = _SPLITS[0]

    def collect(self, model: Any) -> RoutingReport | None:
        """Sum over ranks what the routers recorded; called on every rank."""
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
