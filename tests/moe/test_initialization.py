"""Initial weights are the paper's, differ between experts, and are the same in every layout."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.moe.initialization import (
    init_expert_weight_,
    init_router_weight_,
    truncated_normal,
)

D, FF = 12, 8


def megatron_normal(tensor):
    return torch.nn.init.normal_(tensor, std=0.02)


def draw(matrix, *, expert=3, shard=0, num_shards=1, gated=False, dtype=torch.float32, **changes):
    width = FF // num_shards
    shape = (width * (1 + gated), D) if matrix == "fc1" else (D, width)
    settings = {"seed": 1, "layer_number": 2, "scale": 0.1, "init_method": megatron_normal}
    weight = torch.empty(shape, dtype=dtype)
    init_expert_weight_(
        weight,
        matrix=matrix,
        expert=expert,
        shard=shard,
        num_shards=num_shards,
        gated=gated,
        **{**settings, **changes},
    )
    return weight


@pytest.mark.parametrize("scale", [0.1, None])
@pytest.mark.parametrize("gated", [False, True])
def test_shards_are_slices_of_the_whole(scale, gated):
    whole = draw("fc1", scale=scale, gated=gated)
    for shard in range(2):
        part = draw("fc1", scale=scale, gated=gated, shard=shard, num_shards=2)
        halves = whole.chunk(2 if gated else 1)
        assert torch.equal(part, torch.cat([half.chunk(2)[shard] for half in halves]))
    whole = draw("fc2", scale=scale)
    for shard in range(2):
        part = draw("fc2", scale=scale, shard=shard, num_shards=2)
        assert torch.equal(part, whole.chunk(2, dim=1)[shard])


@pytest.mark.parametrize("scale", [0.1, None])
def test_weights_depend_on_seed_layer_expert_and_matrix_only(scale):
    one = draw("fc1", scale=scale)
    torch.manual_seed(99)
    assert torch.equal(draw("fc1", scale=scale), one)
    for change in ({"seed": 2}, {"layer_number": 3}, {"expert": 4}):
        assert not torch.equal(draw("fc1", scale=scale, **change), one)
    assert not torch.equal(draw("fc2", scale=scale).flatten(), one.flatten())


@pytest.mark.parametrize("scale", [0.1, None])
def test_drawing_leaves_the_random_stream_alone(scale):
    before = torch.get_rng_state()
    draw("fc2", scale=scale)
    assert torch.equal(torch.get_rng_state(), before)


def test_distribution_is_the_papers():
    weight = torch.empty(400, 500)
    init_router_weight_(weight, seed=5, layer_number=1, scale=0.1)
    sigma = math.sqrt(0.1 / 500)
    assert weight.abs().max() <= 2 * sigma
    # A normal distribution cut at two deviations keeps 0.8796 of one.
    assert weight.std().item() == pytest.approx(0.8796 * sigma, rel=0.01)
    assert abs(weight.mean().item()) < 0.01 * sigma
    ends = truncated_normal(torch.tensor([0.0, 0.5, 1.0 - 2.0**-24], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([-2.0, 0.0, 2.0]).double(), atol=1e-5, rtol=0)


def test_fan_in_is_that_of_the_whole_matrix():
    largest = draw("fc2", shard=1, num_shards=2).abs().max().item()
    assert math.sqrt(0.1 / FF) < largest <= 2 * math.sqrt(0.1 / FF)
    assert draw("fc1", gated=True).abs().max().item() <= 2 * math.sqrt(0.1 / D)


def test_megatrons_method_draws_the_whole_matrix():
    seen = []
    draw("fc2", scale=None, num_shards=2, init_method=lambda tensor: seen.append(tensor.shape))
    assert seen == [(D, FF)]
    router = torch.empty(4, D)
    init_router_weight_(router, seed=1, layer_number=2, scale=None, init_method=megatron_normal)
    assert 0.0 < router.abs().max() < 0.2


def test_dtype_of_the_weight_is_kept():
    assert torch.equal(draw("fc1", dtype=torch.bfloat16), draw("fc1").bfloat16())


def test_weights_without_data_are_left_alone():
    init_router_weight_(torch.empty(4, D, device="meta"), seed=1, layer_number=1, scale=0.1)
    with FakeTensorMode():
        draw("fc1", scale=0.1)
        draw("fc1", scale=None)
