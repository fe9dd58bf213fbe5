"""First-come slots of the kernels against the sort in plain torch."""

import pytest
import torch
from support.compiled_kernels import assert_compiles, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.kernels import slots
from megatron_switch.moe.routing import assign_slots, count_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_groups"),
    [(0, 3, 2), (5, 1, 1), (64, 7, 1), (65, 7, 1), (390, 130, 3), (12, 2, 12)],
)
@pytest.mark.parametrize("padded", [False, True])
def test_slots_and_counts_are_those_of_a_stable_sort(
    kernels, num_tokens, num_experts, num_groups, padded
):
    expert_T = (torch.rand(num_tokens) ** 2 * num_experts).long()  # some experts get far more
    padding_T = torch.rand(num_tokens) < 0.3 if padded else None
    group_T = torch.arange(num_tokens) // max(num_tokens // num_groups, 1)

    result = kernels.slots.first_come_slots(
        expert_T, num_experts=num_experts, num_groups=num_groups, padding_T=padding_T
    )
    groups = {"group_T": group_T, "padding_T": padding_T}
    expected_T = assign_slots(expert_T, num_experts=num_experts, **groups)
    assert torch.equal(result.slot_T, expected_T)
    assert result.slot_T.dtype == result.tokens_per_expert_GE.dtype == torch.int64
    counts_GE = count_tokens(expert_T, num_experts=num_experts, num_groups=num_groups, **groups)
    assert torch.equal(result.tokens_per_expert_GE, counts_GE)


def test_blocks_beyond_one_tile_of_the_scan_go_on_counting(kernels, monkeypatch):
    monkeypatch.setattr(kernels.slots, "_SCAN_BLOCKS", 2)
    expert_T = torch.randint(3, (300,))  # five blocks
    result = kernels.slots.first_come_slots(expert_T, num_experts=3)
    assert torch.equal(result.slot_T, assign_slots(expert_T, num_experts=3))
    assert result.tokens_per_expert_GE.tolist() == [expert_T.bincount(minlength=3).tolist()]


def test_a_group_of_padding_counts_nothing(kernels):
    result = kernels.slots.first_come_slots(
        torch.zeros(8, dtype=torch.int64),
        num_experts=2,
        num_groups=2,
        padding_T=torch.tensor([True] * 4 + [False] * 4),
    )
    assert result.slot_T.tolist() == [-1] * 4 + [0, 1, 2, 3]
    assert result.tokens_per_expert_GE.tolist() == [[0, 0], [4, 0]]


def fake_slots(num_experts: int, num_tokens: int = 8192):
    """Number tokens that claim to be on a GPU."""
    with FakeTensorMode():
        return slots.first_come_slots(
            torch.empty(num_tokens, device="cuda", dtype=torch.int64),
            num_experts=num_experts,
            num_groups=2,
            padding_T=torch.empty(num_tokens, device="cuda", dtype=torch.bool),
        )


def test_shapes_are_known_without_a_gpu():
    result = fake_slots(2048)
    assert result.slot_T.shape == (8192,)
    assert result.tokens_per_expert_GE.shape == (2, 2048)
    assert {result.slot_T.device.type, result.tokens_per_expert_GE.device.type} == {"cuda"}


def test_its_largest_tensor_is_a_histogram_for_every_64_tokens():
    with launches_of(slots) as launches:
        fake_slots(2048)
    tensors = [a for launch in launches for a in launch.arguments if isinstance(a, torch.Tensor)]
    assert max(tensor.numel() for tensor in tensors) == 8192 * 2048 // 64


# Triton compiles numbers that are 1 in, here the experts and the tokens of a group.
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("capability", "num_experts", "num_tokens"),
    [
        (90, 2048, 4096),
        *(
            pytest.param(capability, *sizes, marks=pytest.mark.slow)
            for capability in (80, 90, 100)
            for sizes in ((1, 2), (8, 4096), (100, 4096), (128, 4096), (2048, 4096))
        ),
    ],
)
def test_it_compiles_without_spilling_registers(capability, num_experts, num_tokens):
    with launches_of(slots) as launches:
        fake_slots(num_experts, num_tokens)
    assert len(launches) == 3
    assert_compiles(launches, capability)
