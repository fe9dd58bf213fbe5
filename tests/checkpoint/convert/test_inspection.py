"""Foreign formats are recognised by their files, and something can be done about each."""

import pytest
import torch
from support import hf_models

from megatron_switch.checkpoint.convert.inspection import inspect_folder
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import save_checkpoint


@pytest.mark.parametrize(
    ("path", "name", "advice"),
    [
        ("iter_0000005/mp_rank_00/x.pt", "legacy format", "--ckpt-convert-format torch_dist"),
        ("mp_rank_00_001/x.pt", "legacy format", "--ckpt-convert-format torch_dist"),
        ("global_step10/mp_rank_00_model_states.pt", "Megatron-DeepSpeed", "ds_to_universal"),
    ],
)
def test_foreign_formats_are_named(tmp_path, path, name, advice):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(b"\x80\x04N.")
    found = inspect_folder(tmp_path)
    assert name in found.facts["format"]
    assert advice in found.advice


def test_a_checkpoint_of_fsdp_is_named(tmp_path):
    folder = save_checkpoint(tmp_path, 5, {"args.x": torch.ones(1)}, {})
    (folder / "metadata.json").unlink()
    found = inspect_folder(tmp_path)
    assert "fsdp_dtensor" in found.facts["format"]
    assert "--ckpt-format torch_dist" in found.advice


def test_hugging_faces_format_is_held_against_its_name_map(tmp_path):
    hf_models.save(tmp_path, "switch_transformers")
    found = inspect_folder(tmp_path)
    assert found.facts["model type"] == "switch_transformers"
    assert found.facts["num-experts"] == "6"
    assert found.facts["name map"].startswith("fits: 96 tensors")
    assert "hf-to-megatron" in found.advice


def test_a_checkpoint_with_optimizer_state(tmp_path):
    tensors = {"decoder.x": torch.ones(4), "optimizer.state.exp_avg.decoder.x": torch.ones(4)}
    form = {"distrib_optim_sharding_type": "dp_reshardable"}
    save_checkpoint(tmp_path, 5, tensors, {"content_metadata": form})
    found = inspect_folder(tmp_path)
    assert found.facts["parameters"] == "4"
    assert found.facts["iteration"] == "5"
    assert found.facts["arguments"] == "none stored"
    assert "dp_reshardable" in found.facts["optimizer state"]
    assert "--dist-ckpt-optim-fully-reshardable" in found.advice
    assert inspect_folder(tmp_path / "iter_0000005").facts == found.facts


def test_what_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.* another folder to inspect"):
        inspect_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        inspect_folder(tmp_path / "absent")
