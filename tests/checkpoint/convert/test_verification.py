"""Both sides are the same in every bit, or the tensor that differs is named."""

from pathlib import Path

import pytest
import torch
from support import hf_models
from support.converted import imported, rewrite

from megatron_switch.checkpoint.convert.conversion import release_state
from megatron_switch.checkpoint.convert.verification import plan_comparison
from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import load_tensors, save_checkpoint


@pytest.fixture
def llama(tmp_path) -> Path:
    """A folder with a small Llama."""
    hf_models.save(tmp_path / "hf", "llama")
    return tmp_path / "hf"


def test_a_changed_weight_is_found_by_comparing(llama, tmp_path):
    megatron = imported(llama, tmp_path / "megatron")
    found = find_checkpoint(megatron)
    assert plan_comparison(llama, found).carry_out().rounded == 0
    key = "model.layers.2.self_attn.v_proj.weight"
    rewrite(llama, lambda tensors: tensors[key][3, 4].add_(1.0))
    with pytest.raises(CheckpointError, match=rf"linear_qkv.* differs from .*{key}.*: 1 of"):
        plan_comparison(llama, found).carry_out()


def test_the_sign_of_a_zero_is_a_bit_as_well(llama, tmp_path):
    rewrite(llama, lambda tensors: tensors["model.norm.weight"].zero_())
    found = find_checkpoint(imported(llama, tmp_path / "megatron"))
    rewrite(llama, lambda tensors: tensors["model.norm.weight"][5:7].mul_(-1))
    with pytest.raises(CheckpointError, match=r"final_layernorm.* differs from .*: 2 of 32"):
        plan_comparison(llama, found).carry_out()


@pytest.mark.parametrize("model_type", ["switch_transformers", "llama"])
def test_what_is_left_to_compare_is_known_before(tmp_path, model_type):
    hf_models.save(tmp_path / "hf", model_type)
    found = find_checkpoint(imported(tmp_path / "hf", tmp_path / "megatron"))
    comparison = plan_comparison(tmp_path / "hf", found)
    done: list[int] = []
    result = comparison.carry_out(on_bytes=done.append)
    assert sum(done) == result.nbytes == comparison.nbytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # none of the two holds the other
def test_comparing_after_rounding(llama, tmp_path, dtype):
    rewrite(llama, lambda tensors: tensors.update({k: t.to(dtype) for k, t in tensors.items()}))
    megatron = imported(llama, tmp_path / "megatron", dtype="bf16")
    result = plan_comparison(llama, find_checkpoint(megatron)).carry_out()
    assert (result.widened, result.rounded) == (0, result.tensors)
    key = "model.layers.2.self_attn.v_proj.weight"
    rewrite(llama, lambda tensors: tensors[key][3, 4].mul_(1.01))  # more than rounding
    with pytest.raises(CheckpointError, match=rf"differs from .*{key}.*: 1 of"):
        plan_comparison(llama, find_checkpoint(megatron)).carry_out()


@pytest.mark.slow
def test_a_bit_that_only_the_finer_side_has_shows_as_rounding(llama, tmp_path):
    rewrite(llama, lambda tensors: tensors.update({k: t.half() for k, t in tensors.items()}))
    found = find_checkpoint(imported(llama, tmp_path / "megatron", dtype="fp32"))
    result = plan_comparison(llama, found).carry_out()
    assert (result.widened, result.rounded) == (result.tensors, 0)
    tensors = load_tensors(found.folder)
    key = "decoder.layers.2.self_attention.linear_qkv.weight"
    tensors[key].view(torch.int32)[3, 4] ^= 1
    args = read_common_state(found.folder)["args"]
    save_checkpoint(tmp_path / "changed", 1, tensors, release_state(args))
    result = plan_comparison(llama, find_checkpoint(tmp_path / "changed")).carry_out()
    assert (result.widened, result.rounded) == (result.tensors - 1, 1)
