"""Before anything is timed: does every candidate compute the same layer?

A candidate's output says which tokens it kept, since a dropped token's output is zero. Those are
compared with its policy (the first tokens, the largest gates, or any as long as every expert keeps
as many as it has slots for). Then the plain layer is run with just these tokens, for all ranks, and
the output, the tokens' gradient, and the gradients of router and experts must all be its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from bench.candidate import Candidate
from bench.floors import plain_layer, plain_routing
from bench.problem import BenchError, Problem

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
"""Largest difference allowed, relative to the largest element of what is compared."""


@dataclass(frozen=True)
class Agreement:
    """What the check found."""

    kept: int
    """Tokens of this rank that were kept."""
    error: float
    """Largest relative difference of all that was compared."""


def check(candidate: Candidate, problem: Problem) -> Agreement:
    """Compare a candidate with the plain layer, values and gradients; every rank must call.

    Args:
        candidate: What to check.
        problem: This rank's problem.

    Returns:
        How many tokens it keeps, and how far off it is.

    Raises:
        BenchError: It keeps other tokens than its policy says, or computes something else.
    """
    candidate.forget_gradients()
    x_TD = problem.tokens_of(problem.rank).requires_grad_()
    y_TD = candidate.forward(x_TD)
    y_TD.backward(problem.output_gradient_of(problem.rank))
    kept_T = y_TD.detach().ne(0).any(dim=1)
    _check_kept(candidate, problem, kept_T)
    errors = dict(_errors(candidate, problem, kept_T, y_TD.detach(), _gradient(x_TD)))
    candidate.forget_gradients()
    limit = TOLERANCE[x_TD.dtype]
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= limit]
    if wrong:
        raise BenchError(
            f"{candidate.name} differs from the plain layer in {', '.join(wrong)} of its largest "
            f"element, {limit:.0e} are allowed. Leave it out with --only, and look into it."
        )
    return Agreement(int(kept_T.sum()), max(errors.values()))


def _check_kept(candidate: Candidate, problem: Problem, kept_T: Tensor) -> None:
    x_TD = problem.tokens_of(problem.rank)
    capacity = problem.sizes.capacity
    expected = plain_routing(
        x_TD, problem.router_ED, capacity, by_probability=candidate.drops == "probability"
    )
    if candidate.drops == "any":
        experts = problem.sizes.experts
        kept_E = torch.bincount(expected.expert_T[kept_T], minlength=experts)
        wanted_E = torch.bincount(expected.expert_T, minlength=experts).clamp(max=capacity)
        wrong = int((kept_E != wanted_E).sum())
    else:
        wrong = int((kept_T != expected.kept_T).sum())
    if wrong:
        of = "experts keep another number of tokens" if candidate.drops == "any" else "tokens are"
        raise BenchError(
            f"{candidate.name} should drop by {candidate.drops!r}, and {wrong} {of} "
            "otherwise. Leave it out with --only, and look into it."
        )


def _errors(
    candidate: Candidate, problem: Problem, kept_T: Tensor, y_TD: Tensor, x_grad_TD: Tensor
) -> Iterator[tuple[str, float]]:
    """Run the plain layer on all ranks' tokens, and compare this rank's part of everything."""
    sizes, router_ED = problem.sizes, problem.router_ED.clone().requires_grad_()
    wi, wo = problem.all_experts()
    if not sizes.without_experts:
        wi, wo = wi.detach().requires_grad_(), wo.detach().requires_grad_()
    for rank, kept_of_rank_T in enumerate(_of_all_ranks(kept_T)):
        x_TD = problem.tokens_of(rank).requires_grad_()
        routing = plain_routing(x_TD, router_ED, sizes.capacity)
        routing = replace(routing, kept_T=kept_of_rank_T)
        experts = (None, None) if sizes.without_experts else (wi, wo)
        expected_TD = plain_layer(x_TD, routing, *experts)
        router_ED.grad = None
        expected_TD.backward(problem.output_gradient_of(rank))
        if rank == problem.rank:
            yield "the output", _relative(y_TD, expected_TD.detach())
            yield "the tokens' gradient", _relative(x_grad_TD, _gradient(x_TD))
            assert candidate.router is not None
            yield (
                "the router's gradient",
                _relative(_gradient(candidate.router), _gradient(router_ED)),
            )
    mine = problem.experts_of(problem.rank)
    pairs = (("first", candidate.wi, wi), ("second", candidate.wo, wo))
    for matrix, actual, expected in pairs:
        if actual:
            wanted = _gradient(expected)[mine.start : mine.stop]
            largest = float(wanted.abs().max())
            differences = [
                float((gradient - part).abs().max())
                for gradient, part in zip(_each_gradient(actual), wanted, strict=True)
            ]
            yield f"the {matrix} matrices' gradient", max(differences) / largest


def _each_gradient(parameters: list[Tensor]) -> Iterator[Tensor]:
    """Return the gradient of each expert's matrix; zeros where an idle expert got none."""
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        yield from gradient if gradient.ndim == 3 else [gradient]


def _of_all_ranks(kept_T: Tensor) -> list[Tensor]:
    if dist.get_world_size() == 1:
        return [kept_T]
    gathered = [torch.empty_like(kept_T) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, kept_T)
    return gathered


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
