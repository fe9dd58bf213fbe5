"""What every implementation of the layer looks like to the bench."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import Parameter

Drops = Literal["first come", "probability", "any", "all rows"]
"""Who keeps a slot of a full expert: the earlier token, the one with the larger gate, or tokens in
no order that is promised; and what is only a floor, computes all of its rows and drops none."""


@dataclass(frozen=True)
class Candidate:
    """One implementation, ready to run, with the weights of the problem."""

    name: str
    forward: Callable[[Tensor], Tensor]
    """From tokens (T, D) to outputs (T, D)."""
    drops: Drops
    router: Tensor | None = None
    """Router weight, shape (E, D); None for a floor."""
    wi: Sequence[Tensor] = ()
    """First matrices: one parameter (e, F, D), or one of shape (F, D) an expert."""
    wo: Sequence[Tensor] = ()
    """Second matrices, (e, D, F) or (D, F)."""
    router_module: nn.Module | None = None
    expert_modules: Sequence[nn.Module] = ()
    differs: str = ""
    """Where its semantics differ from those of the Switch layer here, for the table."""

    @property
    def parameters(self) -> list[Tensor]:
        """All weights."""
        return [*([] if self.router is None else [self.router]), *self.wi, *self.wo]

    def forget_gradients(self) -> None:
        """Drop the gradients of all weights."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class LeftOut:
    """Candidates that take no part, with the reason that the table shows."""

    reasons: dict[str, str] = field(default_factory=dict)


class GateOnly(nn.Module):
    """Stands where experts stand: multiplies each row by its gate, and nothing else."""

    def forward(
        self, rows_RD: Tensor, tokens_per_expert_e: Tensor, gate_R: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the rows times their gates, and no bias: Megatron's ``ExpertsInterface``."""
        return rows_RD * gate_R.unsqueeze(1).to(rows_RD.dtype), None


class FeedForward(nn.Module):
    """One expert: two matrices, ReLU between them."""

    def __init__(self, wi_FD: Tensor, wo_DF: Tensor) -> None:
        """Hold the matrices as they are, without a copy."""
        super().__init__()
        self.wi, self.wo = Parameter(wi_FD), Parameter(wo_DF)

    def forward(self, x: Tensor) -> Tensor:
        """Return the expert's output for rows of shape (..., D)."""
        return nn.functional.linear(nn.functional.linear(x, self.wi).relu(), self.wo)


def share_weights(holders: Iterable[Tensor], stacked: Tensor) -> list[Tensor]:
    """Let parameters use slices of one tensor as their memory; return them."""
    parameters = list(holders)
    for parameter, matrix in zip(parameters, stacked, strict=True):
        parameter.data = matrix
    return parameters
