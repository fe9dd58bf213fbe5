"""Reference implementation of the Switch layer: one token at a time, as in the paper.

Every fast path is compared with it, values and gradients, in float64. It shares no code with them:
plain loops, Python's own comparison for the choice of expert, a dictionary of how many tokens each
expert has taken. Do not make it fast.

Sources:
    Switch Transformer, https://arxiv.org/abs/2101.03961, section 2; dropped tokens output zero, so
    that the residual connection around the layer passes them on.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


def switch_layer(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    wi_EFD: Tensor,
    wo_EDF: Tensor,
    *,
    capacity: int,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
) -> Tensor:
    """Return the output of a Switch layer, before dropout and residual.

    ``y = p_e(x) * wo_e @ activation(wi_e @ x)`` with ``e`` the most probable expert, the lowest
    index on ties; zero where ``e`` has already taken ``capacity`` tokens of the same group, and
    zero for padding, which takes no capacity.

    Args:
        x_TD: Tokens in first-come order, shape (T, D). The router works at least in float32, all
            else in this dtype.
        router_weight_ED: Router weight, shape (E, D).
        wi_EFD: First weight of each expert, shape (E, F, D).
        wo_EDF: Second weight of each expert, shape (E, D, F).
        capacity: Tokens that an expert takes of one group.
        activation: Elementwise function between the two weights.
        group_T: Group of each token, shape (T,), integers. Default: one group.
        padding_T: True for padding, shape (T,), bool. Default: no padding.

    Returns:
        Shape (T, D), dtype of ``x_TD``. Gradients reach all four tensors, zeros where a token was
        dropped.
    """
    groups = [0] * len(x_TD) if group_T is None else group_T.tolist()
    padding = [False] * len(x_TD) if padding_T is None else padding_T.tolist()
    router_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    taken: defaultdict[tuple[int, int], int] = defaultdict(int)
    rows = []
    for x_D, group, is_padding in zip(x_TD, groups, padding, strict=True):
        probs_E = torch.softmax(router_weight_ED.to(router_dtype) @ x_D.to(router_dtype), dim=0)
        values = probs_E.tolist()
        expert = values.index(max(values))

        kept = not is_padding and taken[group, expert] < capacity
        taken[group, expert] += not is_padding

        hidden_F = activation(wi_EFD[expert] @ x_D)
        y_D = (probs_E[expert] * (wo_EDF[expert] @ hidden_F)).to(x_TD.dtype)
        rows.append(y_D.masked_fill(torch.tensor(not kept, device=y_D.device), 0.0))
    return torch.stack(rows) if rows else x_TD.clone()
