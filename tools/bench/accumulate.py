"""Weights' gradients that are added up over micro-batches, as Megatron's data parallelism does.

Autograd leaves a gradient in ``parameter.grad``; a hook adds it to ``parameter.main_grad`` and
drops it. A layer may add to ``main_grad`` itself and say so with ``grad_added_to_main_grad``: then
what it leaves in ``parameter.grad`` is a placeholder. The buffers are float32, and all candidates
share those of the experts: what is measured is the adding, not the sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.candidate import Candidate
from bench.problem import Problem


class GradientBuffers:
    """The buffers of one rank's experts."""

    def __init__(self, problem: Problem) -> None:
        """Allocate them."""
        self._wi_eFD, self._wo_eDF = (
            torch.zeros_like(weight, dtype=torch.float32)
            for weight in (problem.wi_eFD, problem.wo_eDF)
        )

    def attach(self, candidate: Candidate) -> None:
        """Add a candidate's gradients to buffers from now on."""
        if candidate.router is not None:
            _attach(candidate.router, torch.zeros_like(candidate.router, dtype=torch.float32))
        _attach_each(candidate.wi, self._wi_eFD)
        _attach_each(candidate.wo, self._wo_eDF)


def _attach_each(parameters: Sequence[Tensor], buffer: Tensor) -> None:
    for number, parameter in enumerate(parameters):
        _attach(parameter, buffer if parameter.ndim == buffer.ndim else buffer[number])


def _attach(parameter: Tensor, buffer: Tensor) -> None:
    parameter.main_grad = buffer  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(_add)


def _add(parameter: Tensor) -> None:
    if not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
