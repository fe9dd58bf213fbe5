"""Whole tensors start from their names, and parts are cut from them as checkpoints say."""

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import nn

from megatron_switch.testing.global_start import NamedTensors, Part, set_weights, start_of

E, O, I = 4, 6, 8  # noqa: E741  # experts, outputs, inputs


class Chunk(nn.Module):
    """The second half of a linear layer's rows, and of its experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(O // 2, I))
        self.experts = nn.Parameter(torch.zeros(E // 2, O, I))

    def sharded_state_dict(self):
        def build(key, data, replica_id, flattened_range):
            return [
                ShardedTensor.from_rank_offsets(
                    key, expert, (0, E // 2 + index, E), replica_id=replica_id, prepend_axis_num=1
                )
                for index, expert in enumerate(data)
            ]

        return {
            "weight": ShardedTensor.from_rank_offsets("linear.weight", self.weight, (0, 1, 2)),
            "experts": ShardedTensorFactory("experts.weight", self.experts, build, torch.stack),
            "objects": {"beside": object()},
        }


def test_a_start_is_a_function_of_name_and_shape():
    first = start_of("decoder.layers.0.mlp.router.weight", (E, I))
    assert torch.equal(first, start_of("decoder.layers.0.mlp.router.weight", (E, I)))
    assert not torch.equal(first, start_of("decoder.layers.1.mlp.router.weight", (E, I)))


def test_drawing_a_start_leaves_the_random_stream_alone():
    before = torch.get_rng_state()
    start_of("weight", (3, 5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("key", "mean", "deviation"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", 0.0, 0.1),
        ("decoder.final_layernorm.weight", 1.0, 0.1),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", 1.0, 0.1),
        ("decoder.final_layernorm.bias", 0.0, 0.1),
    ],
)
def test_weights_are_of_a_size_that_keeps_activations_of_order_one(key, mean, deviation):
    values = start_of(key, (200, 100))
    assert values.mean().item() == pytest.approx(mean, abs=0.01)
    assert values.std().item() == pytest.approx(deviation, rel=0.05)


def test_a_rank_holds_its_part_of_the_whole():
    chunk = Chunk()
    set_weights([chunk])
    assert torch.equal(chunk.weight, start_of("linear.weight", (O, I))[O // 2 :])
    assert torch.equal(chunk.experts, start_of("experts.weight", (E, O, I))[E // 2 :])


def test_parts_describe_other_tensors_in_the_place_of_parameters():
    chunk = Chunk()
    gradients = {chunk.weight: torch.ones(O // 2, I), chunk.experts: torch.ones(E // 2, O, I) * 2}
    parts = list(NamedTensors([chunk]).parts(gradients.__getitem__))
    described = [(part.key, part.offset, part.shape, part.whole_shape) for part in parts]
    assert described == [
        ("linear.weight", (O // 2, 0), (O // 2, I), (O, I)),
        ("experts.weight", (2, 0, 0), (1, O, I), (E, O, I)),
        ("experts.weight", (3, 0, 0), (1, O, I), (E, O, I)),
    ]
    assert [part.values.unique().item() for part in parts] == [1.0, 2.0, 2.0]


def test_parts_are_views_so_that_a_start_can_be_written_into_them():
    chunk = Chunk()
    for part in NamedTensors([chunk]).parts(lambda parameter: parameter.data):
        part.values.fill_(3.0)
    assert (chunk.weight == 3.0).all()
    assert (chunk.experts == 3.0).all()


def test_a_part_is_cut_out_of_a_whole():
    whole = torch.arange(24.0).view(2, 3, 4)
    part = Part("key", (1, 0, 2), (1, 3, 2), (2, 3, 4), torch.empty(3, 2))
    assert torch.equal(part.of(whole), whole[1, :, 2:])


def test_a_parameter_without_a_name_is_refused():
    chunk = Chunk()
    chunk.forgotten = nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match="1 parameters have no global name"):
        NamedTensors([chunk])


def test_what_is_no_parameter_is_refused():
    chunk = Chunk()
    chunk.sharded_state_dict = lambda: {
        "weight": ShardedTensor.from_rank_offsets("linear.weight", torch.zeros(O, I))
    }
    with pytest.raises(AssertionError, match=r"linear\.weight is no whole parameter"):
        NamedTensors([chunk])
