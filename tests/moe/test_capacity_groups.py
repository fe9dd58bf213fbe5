"""Capacity groups over ranks: what they refuse, how large they are, where rows stand in them.

That slots of spread-out groups are those of the whole is shown by ``test_switch_mlp.py``.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from support.layout_case import Layout, start_groups

from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.moe.capacity_groups import CapacityGroups
from megatron_switch.moe.routing import route_probs
from megatron_switch.testing.ranks import run_ranks


class Group:
    """Stands for a process group of which only rank and size are asked."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def groups_of(kind, *, tp=1, cp=1, experts=1, rank=0):
    tp_cp = Group(tp * cp, rank)
    collection = ProcessGroupCollection(
        tp=Group(tp), cp=Group(cp), tp_cp=tp_cp, tp_ep=Group(experts, rank)
    )
    return CapacityGroups(kind, collection)


@pytest.mark.parametrize(
    ("kind", "count", "size"), [("microbatch", 1, 48), ("sequence", 2, 24), ("ep", 1, 96)]
)
def test_size_counts_all_shards(kind, count, size):
    groups = groups_of(kind, tp=2, cp=2, experts=8)
    assert groups.count(2) == count
    assert groups.size(num_sequences=2, length=6) == size


def test_positions_are_those_of_the_whole_micro_batch():
    groups = groups_of("microbatch", cp=2, rank=1)
    rows = groups.rows(torch.zeros(2, 4, 1), None)
    # The second of two context ranks holds the two middle pieces of both sequences of 8.
    assert groups.positions(rows).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    longer = groups.rows(torch.zeros(1, 6, 1), None)
    assert groups.positions(longer).tolist() == [3, 4, 5, 6, 7, 8]


def test_micro_batches_cut_in_half_are_refused():
    with pytest.raises(
        LayoutError,
        match=r"--switch-capacity-group ep .* 2 ranks .* multiple of the 4 .*"
        r"--expert-model-parallel-size, or use --switch-capacity-group microbatch",
    ):
        groups_of("ep", tp=4, experts=2)


def test_padding_mask_of_another_shape_is_refused():
    groups = groups_of("microbatch")
    with pytest.raises(ConfigError, match=r"padding mask .* shape \(2, 4\), got \(4, 2\)"):
        groups.rows(torch.zeros(2, 4, 1), torch.zeros(4, 2, dtype=torch.bool))
    rows = groups.rows(torch.zeros(2, 4, 1), torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"one bool a token, .* of torch\.float32"):
        groups.route(torch.full((8, 3), 1 / 3), rows, capacity=1, order="first_come")


@pytest.mark.parametrize("kind", ["microbatch", "sequence", "ep"])
def test_equal_gates_go_to_the_earlier_token_whoever_holds_it(kind):
    run_ranks(_check_ties, 4, kind)


def _check_ties(rank, kind):
    # Two micro-batches of two context ranks each, and two sequences of 8 tokens in each.
    collection = start_groups(Layout(4, cp=2, ep=4))
    groups = CapacityGroups(kind, collection)
    random = torch.Generator().manual_seed(3)
    probs_MBSE = torch.randint(1, 4, (2, 2, 8, 3), generator=random).float()
    probs_MBSE /= probs_MBSE.sum(dim=-1, keepdim=True)
    micro_batch, shard = divmod(dist.get_rank(), 2)
    mine_S = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])[shard]

    sequence_T = torch.arange(4).repeat_interleave(8)
    group_T = {"sequence": sequence_T, "microbatch": sequence_T // 2, "ep": sequence_T * 0}[kind]
    for order in ("first_come", "probability"):
        whole = route_probs(probs_MBSE.flatten(0, 2), capacity=3, group_T=group_T, order=order)
        probs_BSE = probs_MBSE[micro_batch][:, mine_S]
        rows = groups.rows(probs_BSE, None)
        part, counts_GE = groups.route(probs_BSE.flatten(0, 1), rows, capacity=3, order=order)
        for name in ("expert_T", "slot_T", "kept_T"):
            expected = getattr(whole, name).view(2, 2, 8)[micro_batch][:, mine_S].flatten()
            assert torch.equal(getattr(part, name), expected)
        expert_BS = whole.expert_T.view(2, 2, 8)[micro_batch]
        counts_BE = torch.stack([torch.bincount(expert_S, minlength=3) for expert_S in expert_BS])
        if kind != "sequence":
            counts_BE = counts_BE.sum(dim=0, keepdim=True)
        assert torch.equal(counts_GE.long(), counts_BE)
