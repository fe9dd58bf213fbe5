"""What no implementation can beat, and the shortest one that is right.

* The dense floor computes as many rows as are kept, in one feed-forward network.
* The padded floor multiplies all slots of all experts, filled or not, in one batched product.
* The router floor of a layer without experts: logits, softmax, the largest probability.
* The plain layer: index arithmetic in a few lines of torch, written from the paper. All others are
  compared with it, and the tests compare it with a loop over tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.candidate import Candidate, FeedForward
from bench.problem import Problem


@dataclass(frozen=True)
class PlainRouting:
    """Who goes where, one entry a token."""

    expert_T: Tensor
    gate_T: Tensor
    kept_T: Tensor


def plain_routing(
    x_TD: Tensor, router_ED: Tensor, capacity: int, *, by_probability: bool = False
) -> PlainRouting:
    """Return each token's most probable expert, and whether it gets a slot.

    Args:
        x_TD: Tokens, in first-come order.
        router_ED: Router weight.
        capacity: Slots per expert.
        by_probability: Give slots to the largest gates instead of the first tokens.
    """
    probs_TE = (x_TD.float() @ router_ED.float().t()).softmax(dim=1)
    gate_T, expert_T = probs_TE.max(dim=1)
    row_T = torch.arange(len(x_TD), device=x_TD.device)
    if by_probability:
        row_T = gate_T.detach().argsort(descending=True, stable=True)
    row_T = row_T[expert_T[row_T].argsort(stable=True)]
    counts_E = torch.bincount(expert_T, minlength=len(router_ED))
    start_E = counts_E.cumsum(0) - counts_E
    slot_T = torch.empty_like(expert_T)
    slot_T[row_T] = torch.arange(len(x_TD), device=x_TD.device) - start_E[expert_T[row_T]]
    return PlainRouting(expert_T, gate_T, slot_T < capacity)


def plain_layer(
    x_TD: Tensor, routing: PlainRouting, wi_EFD: Tensor | None, wo_EDF: Tensor | None
) -> Tensor:
    """Return the layer's output for tokens that were routed; zeros where one was not kept.

    Args:
        x_TD: Tokens.
        routing: Where they go.
        wi_EFD: First matrices; None leaves the experts' products out.
        wo_EDF: Second matrices; None likewise.
    """
    (kept_R,) = routing.kept_T.nonzero(as_tuple=True)
    row_R = kept_R[routing.expert_T[kept_R].argsort(stable=True)]
    rows_RD = x_TD[row_R]
    if wi_EFD is not None and wo_EDF is not None:
        counts = torch.bincount(routing.expert_T[row_R], minlength=len(wi_EFD)).tolist()
        parts = zip(rows_RD.split(counts), wi_EFD, wo_EDF, strict=True)
        rows_RD = torch.cat([(part @ wi.t()).relu() @ wo.t() for part, wi, wo in parts])
    gated_RD = rows_RD * routing.gate_T[row_R].unsqueeze(1).to(rows_RD.dtype)
    return torch.zeros_like(x_TD).index_copy(0, row_R, gated_RD)


def build_plain(problem: Problem) -> Candidate:
    """Return the plain layer, which knows one rank only."""
    sizes = problem.sizes
    router = Parameter(problem.router_ED)
    experts = [Parameter(weight) for weight in (problem.wi_eFD, problem.wo_eDF)]
    wi, wo = (None, None) if sizes.without_experts else experts

    def forward(x_TD: Tensor) -> Tensor:
        return plain_layer(x_TD, plain_routing(x_TD, router, sizes.capacity), wi, wo)

    return Candidate(
        "plain torch",
        forward,
        "first come",
        router,
        wi=[] if wi is None else [wi],
        wo=[] if wo is None else [wo],
    )


def build_dense_floor(problem: Problem, kept_rows: int) -> Candidate:
    """Return one feed-forward network over as many rows as the layer keeps."""
    network = FeedForward(problem.wi_eFD[0], problem.wo_eDF[0])
    return Candidate(
        "floor: dense",
        lambda x_TD: network(x_TD[:kept_rows]),
        "all rows",
        wi=[network.wi],
        wo=[network.wo],
        differs="one network, no router",
    )


def build_padded_floor(problem: Problem) -> Candidate:
    """Return one batched product over every slot that this rank's experts have."""
    sizes = problem.sizes
    wi, wo = Parameter(problem.wi_eFD), Parameter(problem.wo_eDF)
    shape = (sizes.local_experts, sizes.world * sizes.capacity, sizes.width)
    slots = torch.randn(shape, dtype=wi.dtype, device=wi.device).requires_grad_()

    def forward(x_TD: Tensor) -> Tensor:
        slots.grad = None
        hidden = torch.bmm(slots, wi.transpose(1, 2)).relu()
        return torch.bmm(hidden, wo.transpose(1, 2)).flatten(0, 1)

    return Candidate(
        "floor: padded",
        forward,
        "all rows",
        wi=[wi],
        wo=[wo],
        differs="products only, slots filled before",
    )


def build_router_floor(problem: Problem) -> Candidate:
    """Return the part of a layer without experts that every implementation has to do."""
    router = Parameter(problem.router_ED)

    def forward(x_TD: Tensor) -> Tensor:
        gate_T, _ = (x_TD.float() @ router.t()).softmax(dim=1).max(dim=1)
        return x_TD * gate_T.unsqueeze(1).to(x_TD.dtype)

    return Candidate(
        "floor: router", forward, "all rows", router, differs="tokens stay in their places"
    )
