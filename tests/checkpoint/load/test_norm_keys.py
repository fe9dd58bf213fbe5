"""The norm before experts is found by the name it was saved under."""

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_switch.checkpoint.formats.dist_reader import DistSource
from megatron_switch.checkpoint.load.norm_keys import NeutralNorms, name_norms_as_stored
from megatron_switch.testing.checkpoints import save_checkpoint

NORM = torch.ones(4)
OTHER = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"


def state(*keys):
    return {"model": {key: ShardedTensor.from_rank_offsets(key, NORM.clone()) for key in keys}}


def test_keys_become_those_of_the_checkpoint():
    names = ["decoder.layers.1.", "decoder.layers.", "optimizer.state.exp_avg.decoder.layers.12."]
    wanted = state(*(f"{name}pre_mlp_layernorm.weight" for name in names), "decoder.norm.weight")
    stored = [f"{name}mlp.linear_fc1.layer_norm_weight" for name in names]
    name_norms_as_stored(wanted, [*stored, "decoder.norm.weight"])
    assert [t.key for t in wanted["model"].values()] == [*stored, "decoder.norm.weight"]


def test_keys_that_are_stored_or_in_neither_form_stay():
    key = "decoder.layers.1.pre_mlp_layernorm.weight"
    for stored in ([key], [key, OTHER], []):
        wanted = state(key)
        name_norms_as_stored(wanted, stored)
        assert wanted["model"][key].key == key


def test_a_source_shows_one_name(tmp_path):
    tensors = {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": NORM,  # a dense layer
        OTHER: NORM * 2,
        "decoder.layers.1.mlp.router.weight": torch.ones(2, 4),
    }
    source = NeutralNorms(DistSource(save_checkpoint(tmp_path, 1, tensors, {})))
    assert source.tensors.keys() == {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
    }
    assert torch.equal(source.read("decoder.layers.1.pre_mlp_layernorm.weight"), NORM * 2)
