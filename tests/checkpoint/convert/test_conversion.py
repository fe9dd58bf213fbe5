"""There and back is the same model: every tensor bit for bit, every key known to the library."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import hf_models
from support.converted import imported, rewrite

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.checkpoint.convert.architectures import model_of_checkpoint
from megatron_switch.checkpoint.convert.conversion import (
    plan_export,
    plan_import,
    release_state,
    write_export,
    write_import,
)
from megatron_switch.checkpoint.convert.gpt_names import gpt_name_map
from megatron_switch.checkpoint.convert.t5_config import _step
from megatron_switch.checkpoint.convert.verification import plan_comparison
from megatron_switch.checkpoint.formats.hf_folder import read_json, write_json
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.commands.checkpoints.written_arguments import written_arguments
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import load_tensors, save_checkpoint

MODELS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen2_moe with biases": {"qkv_bias": True},
    "qwen2_moe sparse everywhere but there": {"decoder_sparse_step": 1, "mlp_only_layers": [2]},
    "qwen3_moe": {},
    "switch_transformers": {},
    "switch_transformers untied": {"tie_word_embeddings": False},
    "switch_transformers sparse everywhere": {
        "num_sparse_encoder_layers": 4,
        "num_sparse_decoder_layers": 2,
    },
    "switch_transformers in many files": {"max_shard_size": "20KB"},
    "t5": {},
}


def exported(megatron: Path, target: Path, **settings) -> Path:
    settings = {"vocab_size": hf_models.GPT["vocab_size"], **settings}
    write_export(plan_export(find_checkpoint(megatron), **settings), target)
    return target


@pytest.fixture
def switch(tmp_path) -> Path:
    """A folder with a small Switch-T5."""
    hf_models.save(tmp_path / "hf", "switch_transformers")
    return tmp_path / "hf"


@pytest.fixture
def llama(tmp_path) -> Path:
    """A folder with a small Llama."""
    hf_models.save(tmp_path / "hf", "llama")
    return tmp_path / "hf"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_same_model(tmp_path, name):
    model_type = name.split()[0]
    before = hf_models.save(tmp_path / "hf", model_type, **MODELS[name])
    imported(tmp_path / "hf", tmp_path / "megatron")
    plan_comparison(tmp_path / "hf", find_checkpoint(tmp_path / "megatron")).carry_out()
    exported(tmp_path / "megatron", tmp_path / "back")

    after, report = type(before).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    assert read_json(tmp_path / "back" / "config.json")["model_type"] == model_type
    inert = "shared_expert_gate"  # multiplies the output of an expert of width 0
    for key, tensor in before.state_dict().items():
        assert inert in key or torch.equal(after.state_dict()[key], tensor), key
    tokens = torch.randint(0, 99, (2, 20))
    more = {"decoder_input_ids": tokens[:, :7]} if before.config.is_encoder_decoder else {}
    # Kernels may round otherwise where a weight begins within a cache line, and a file's tensors
    # begin where they lie in it: bits are compared with both models in memory of torch's own.
    for model in (before, after):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        assert torch.equal(after(tokens, **more).logits, before(tokens, **more).logits)


def test_padding_is_zeros_and_is_left_out_again(llama, tmp_path):
    imported(llama, tmp_path / "megatron", multiple=64)
    tensors = load_tensors(find_checkpoint(tmp_path / "megatron").folder)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert tensors[key].shape == (128, 32)
        assert tensors[key][99:].count_nonzero() == 0
        assert tensors[key][:99].count_nonzero() == 99 * 32


def test_types_are_kept_unless_another_is_asked_for(llama, tmp_path):
    tensors = {k: v.bfloat16() for k, v in load_file(llama / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, llama / "model.safetensors")
    kept = load_tensors(find_checkpoint(imported(llama, tmp_path / "kept")).folder)
    assert kept["decoder.final_layernorm.weight"].dtype == torch.float32
    assert kept["output_layer.weight"].dtype == torch.bfloat16
    asked = load_tensors(find_checkpoint(imported(llama, tmp_path / "m", dtype="fp32")).folder)
    assert {tensor.dtype for tensor in asked.values()} == {torch.float32}
    torch.testing.assert_close(asked["output_layer.weight"], kept["output_layer.weight"].float())


def test_workers_write_the_same_tensors(switch, tmp_path):
    one = imported(switch, tmp_path / "one")
    plan = plan_import(switch)
    args = Namespace(num_layers=4)
    write_import(plan, args, tmp_path / "three", workers=3)
    first, second = (load_tensors(find_checkpoint(p).folder) for p in (one, tmp_path / "three"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert len(list((tmp_path / "three" / "release").glob("*_[0-9].distcp"))) == 3


@pytest.mark.slow
def test_files_of_older_libraries_are_read(switch, tmp_path):
    """Weights that torch saved, the embedding under all its names, no step of sparse layers."""
    expected = load_tensors(find_checkpoint(imported(switch, tmp_path / "new")).folder)
    tensors = load_file(switch / "model.safetensors")
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = tensors["shared.weight"].clone()
    torch.save(tensors, switch / "pytorch_model.bin")
    (switch / "model.safetensors").unlink()
    config = read_json(switch / "config.json")
    for name in ("encoder_sparse_step", "decoder_sparse_step", "dtype"):
        config.pop(name)
    write_json(switch / "config.json", config)
    found = load_tensors(find_checkpoint(imported(switch, tmp_path / "old")).folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_untied_model_of_transformers_4_shares_its_embedding(tmp_path):
    hf = tmp_path / "hf"
    hf_models.save(hf, "switch_transformers", tie_word_embeddings=False)
    tensors = load_file(hf / "model.safetensors")
    for stack in ("encoder", "decoder"):
        del tensors[f"{stack}.embed_tokens.weight"]
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    back = exported(imported(hf, tmp_path / "megatron"), tmp_path / "back")
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        back, output_loading_info=True
    )
    assert not any(report.values()), report
    assert torch.equal(model.encoder.embed_tokens.weight, tensors["shared.weight"])


def test_gated_experts_are_read_and_written_by_the_released_names(switch, tmp_path):
    """transformers has no gated Switch, but Switch-XXL is one."""
    tensors = {}
    for key, tensor in load_file(switch / "model.safetensors").items():
        if key.endswith(".wi.weight"):
            tensors[key.replace("wi.", "wi_0.")] = tensor
            tensors[key.replace("wi.", "wi_1.")] = tensor + 1.0
        else:
            tensors[key] = tensor
    save_file(tensors, switch / "model.safetensors", {"format": "pt"})
    config = read_json(switch / "config.json")
    write_json(switch / "config.json", {**config, "dense_act_fn": "gated-gelu"})
    megatron = imported(switch, tmp_path / "megatron")
    stored = load_tensors(find_checkpoint(megatron).folder)
    fc1 = stored["encoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert fc1.shape == (6, 56, 20)
    torch.testing.assert_close(fc1[:, :28] + 1.0, fc1[:, 28:])
    back = load_file(exported(megatron, tmp_path / "back") / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


@pytest.mark.slow
def test_a_switch_gpt_has_a_layout_of_its_own(tmp_path):
    """Biases, LayerNorm and learned positions, which no stock architecture with experts has."""
    flags = {
        "num-layers": 2,
        "hidden-size": 16,
        "num-attention-heads": 2,
        "seq-length": 8,
        "max-position-embeddings": 8,
        "num-experts": 2,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 31,
        "position-embedding-type": "learned_absolute",
    }
    args = written_arguments(flags, padded_vocab_size=32)
    shapes = {each.key: each.shape for each in gpt_name_map(model_of_checkpoint(args)).entries}
    tensors = {key: torch.randn(shape) for key, shape in shapes.items()}
    assert "decoder.layers.0.mlp.linear_fc1.bias" in tensors
    save_checkpoint(tmp_path / "megatron", "release", tensors, release_state(args))

    plan = plan_export(find_checkpoint(tmp_path / "megatron"))
    assert plan.model.model_type == "switch_gpt"
    assert "normalises with LayerNorm" in plan.model.notes[0]
    write_export(plan, tmp_path / "hf")
    config = read_json(tmp_path / "hf" / "config.json")
    assert config["routing"]["moe_expert_capacity_factor"] == 1.25
    imported(tmp_path / "hf", tmp_path / "again")
    again = load_tensors(find_checkpoint(tmp_path / "again").folder)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    with pytest.raises(CheckpointError, match=r"qwen2_moe cannot .* LayerNorm; its positions are"):
        plan_export(find_checkpoint(tmp_path / "megatron"), architecture="qwen2_moe")


def reconfigure(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, **changes})


Q = "encoder.block.0.layer.0.SelfAttention.q.weight"
ROUTER = "decoder.block.1.layer.2.mlp.router.classifier.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"lacks {Q}.* Nothing was converted"),
        (lambda t: t.update(new=torch.ones(1)), r"Not part of the model are new"),
        (
            lambda t: t.update({Q: t[Q][:31].clone()}),
            rf"model.safetensors: {Q} has shape \(31, 20\), but the .* needs \(32, 20\)",
        ),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), rf"{Q} is of type torch.int8, but"),
        (
            lambda t: t.update({"lm_head.weight": t["shared.weight"] + 1}),
            r"lm_head.weight differs from shared.weight, but Megatron has one",
        ),
        (lambda t: t[ROUTER][2].fill_(float("nan")), rf"{ROUTER} holds 20 elements that are NaN"),
        (lambda t: t[ROUTER][2, 3].fill_(float("inf")), rf"{ROUTER} holds 1 elements"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(switch, tmp_path, change, message):
    rewrite(switch, change)
    with pytest.raises(CheckpointError, match=message):
        imported(switch, tmp_path / "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"attention_bias.weight has shape \(32, 4\), .* needs \(32, 5\)"),
        ({"d_kv": 10}, rf"{Q} has shape \(32, 20\), .* needs \(40, 20\)"),
        ({"d_ff": 29}, r"has shape \(28, 20\), but the configuration needs \(29, 20\)"),
        ({"num_experts": 7}, r"lacks .*expert_6"),
        ({"encoder_sparse_step": 1}, r"lacks encoder.block.0.layer.1.mlp.experts"),
        (
            {"router_bias": True},
            r"a Switch-T5, which needs router_bias False; found router_bias True",
        ),
        ({"dense_act_fn": "silu"}, r"nonlinearity is silu"),
        (
            {"d_model": None},
            r"lacks the key 'd_model', a whole number, 1 or more. A switch_t",
        ),
        ({"model_type": "bert"}, r"of type 'bert', for which there is no name map"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(switch, tmp_path, changes, message):
    reconfigure(switch, **changes)
    with pytest.raises(CheckpointError, match=message):
        imported(switch, tmp_path / "megatron")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"needs hidden_act silu; found hidden_act gelu"),
        ({"attention_bias": True}, r"needs attention_bias False"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"scaled as yarn"),
    ],
)
def test_a_llama_that_megatron_computes_otherwise_is_refused(llama, changes, message):
    reconfigure(llama, **changes)
    with pytest.raises(CheckpointError, match=message):
        plan_import(llama)


def test_more_than_one_expert_a_token_is_refused(tmp_path):
    hf_models.save(tmp_path / "hf", "qwen2_moe", num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"needs num_experts_per_tok 1; found .* 2"):
        plan_import(tmp_path / "hf")


def test_a_checkpoint_of_another_architecture_is_refused(switch, llama, tmp_path):
    megatron = imported(llama, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"switch_transformers is an encoder-decoder"):
        plan_export(find_checkpoint(megatron), architecture="switch_transformers")


def test_the_reason_for_another_pattern_of_sparse_layers_is_given():
    with pytest.raises(CheckpointError, match=r"encoder's layers \[0, 2\] of 4 have experts"):
        _step(Stack(4, (0, 2)), "encoder")


def test_values_that_rounding_makes_infinite_are_refused(llama, tmp_path):
    key = "model.layers.2.self_attn.v_proj.weight"
    largest = torch.finfo(torch.float32).max
    rewrite(llama, lambda tensors: tensors[key][3, 4].fill_(largest))
    message = r"linear_qkv.weight \(.*v_proj.weight\) has values up to 3.40282e\+38, which torch"
    with pytest.raises(CheckpointError, match=message):
        imported(llama, tmp_path / "megatron", dtype="bf16")
    megatron = imported(llama, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=message):
        exported(megatron, tmp_path / "back", dtype="bf16")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [
        ("llama", "model.layers.2.self_attn.rotary_emb.inv_freq", (4,)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (32, 4)),
    ],
)
def test_what_no_library_reads_any_more_is_left_out(tmp_path, model_type, name, shape):
    hf_models.save(tmp_path / "hf", model_type)
    before = plan_import(tmp_path / "hf").chunks
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({name: torch.ones(shape)}))
    plan = plan_import(tmp_path / "hf")
    assert plan.model.name_map.without_effect(plan.source) == (name,)
    assert [chunk.key for chunk in plan.chunks] == [chunk.key for chunk in before]


@pytest.mark.slow
def test_nothing_is_left_of_a_conversion_that_failed(switch, tmp_path):
    shutil.copytree(switch, tmp_path / "good")
    rewrite(switch, lambda tensors: tensors[ROUTER].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="NaN"):
        imported(switch, tmp_path / "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "hf"]
    imported(tmp_path / "good", tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"--megatron .* already exists"):
        imported(tmp_path / "good", tmp_path / "megatron")
