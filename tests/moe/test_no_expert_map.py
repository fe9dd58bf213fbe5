"""No step of a Switch layer builds an integer or boolean map of tokens by experts.

Such a map of a one-hot kind is what makes routing cost tokens x experts. Every tensor that any
operation makes, forward and backward, is looked at, in both modes of dispatch.
"""

import pytest
import torch
from support.layout_case import Layout, start_groups
from support.switch_case import Case, build_layer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_switch.testing.ranks import run_ranks

NUM_TOKENS, NUM_EXPERTS, WIDTH = 512, 64, 16


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor, by whether it holds integers or floating numbers."""

    def __init__(self):
        super().__init__()
        self.of_integers = self.of_floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                if value.is_floating_point():
                    self.of_floats = max(self.of_floats, value.numel())
                else:
                    self.of_integers = max(self.of_integers, value.numel())
        return result


@pytest.mark.parametrize("dispatch", ["packed", "padded"])
def test_integers_and_booleans_stay_far_below_tokens_by_experts(dispatch):
    run_ranks(_check_sizes, 1, dispatch)


def _check_sizes(rank, dispatch):
    groups = start_groups(Layout(1))
    sizes = {"hidden_size": WIDTH, "num_moe_experts": NUM_EXPERTS, "params_dtype": torch.float32}
    for changes in (
        {},
        {"capacity_group": "sequence"},
        {"capacity_group": "ep"},
        {"drop_order": "probability"},
    ):
        if changes.get("capacity_group") == "ep" and dispatch == "padded":
            continue  # refused
        layer = build_layer(Case(changes), Layout(1), groups, dispatch, **sizes)
        hidden_SBD = torch.randn(NUM_TOKENS // 4, 4, WIDTH, requires_grad=True)
        padding_BS = torch.zeros(4, NUM_TOKENS // 4, dtype=torch.bool)
        padding_BS[:, -1] = True
        with Largest() as largest:
            output, _ = layer(hidden_SBD, padding_mask=padding_BS)
            output.sum().backward()
        assert hidden_SBD.grad is not None
        assert largest.of_floats >= NUM_TOKENS * NUM_EXPERTS  # logits and probabilities
        assert 0 < largest.of_integers <= 8 * NUM_TOKENS < NUM_TOKENS * NUM_EXPERTS


def test_a_map_would_be_seen():
    with Largest() as largest:
        torch.nn.functional.one_hot(torch.zeros(NUM_TOKENS, dtype=torch.int64), NUM_EXPERTS)
    assert largest.of_integers == NUM_TOKENS * NUM_EXPERTS
