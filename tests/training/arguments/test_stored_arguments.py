"""What is taken from a checkpoint: all of the model, and nothing of how it was trained."""

from argparse import Namespace
from dataclasses import fields

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
)

from megatron_switch.checkpoint.load.settings_agreement import check_model
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.flags.known_flags import KNOWN_FLAGS
from megatron_switch.testing.checkpoints import save_checkpoint
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.arguments.stored_arguments import (
    compared_attributes,
    model_attributes,
    tokenizer_attributes,
    with_checkpoint_args,
    with_stored_model,
)
from megatron_switch.training.loop.global_state import validate

TRANSFORMER = {field.name for field in fields(TransformerConfig)}
PARALLEL = {field.name for field in fields(ModelParallelConfig)}
ELSEWHERE = {
    # device, kernels and layout
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "fp4_param_gather",
    "fp8_param_gather",
    "no_persist_layer_norm",
    "te_precision_config_file",
    # where weights come from when they are not read
    "init_method_xavier_uniform",
    "seed",
    # follow from others
    "padded_vocab_size",
    "params_dtype",
    # of another kind of model, or refused
    "fp16_lm_cross_entropy",
    "heterogeneous_layers_config_path",
    "hybrid_layer_pattern",
    "kitchen_config_file",
    "kitchen_recipe_number",
    "spec",
}
"""What Megatron reads to build a model besides, and why it is not taken."""


class Noting(Namespace):
    """A namespace that notes which of its attributes were asked for."""

    asked: set[str] = set()  # noqa: RUF012

    def __getattribute__(self, name):
        if not name.startswith("__"):
            Noting.asked.add(name)
        return super().__getattribute__(name)


def test_everything_that_builds_a_model_is_taken_or_known_not_to_be(sparse_line):
    line = sparse_line("--swiglu --group-query-attention --num-query-groups 2")
    fill_defaults(line, "cpu")
    validate(line.args)
    line.args.padded_vocab_size = 1024
    args = Noting(**vars(line.args))
    Noting.asked.clear()
    gpt_config_from_args(args, core_transformer_config_from_args(args))
    known = model_attributes() | PARALLEL | TRANSFORMER | ELSEWHERE
    assert Noting.asked - known == set()


def test_tokenizer_flags_are_attributes():
    assert flags() >= tokenizer_attributes()


@pytest.mark.parametrize(
    "family", ["cuda_graph_", "fp4", "fp8", "inference_", "init_", "recompute_"]
)
def test_no_flag_of_speed_or_precision_is_taken(family):
    assert [name for name in model_attributes() & flags() if name.startswith(family)] == []


def flags() -> set[str]:
    return set(vars(parse_command_line([]).args))


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",
        "kv_channels",
        "layernorm_epsilon",
        "window_size",
        "qk_layernorm",
        "moe_layer_freq",
        "num_experts",
        "rotary_base",
        "seq_length",
        "bf16",
        "switch_min_capacity",
        "switch_capacity_group",
    ],
)
def test_settings_of_the_model_are_taken(name):
    assert name in model_attributes()


@pytest.mark.parametrize(
    "name",
    [
        "tensor_model_parallel_size",
        "expert_model_parallel_size",
        "sequence_parallel",
        "transformer_impl",
        "attention_backend",
        "recompute_granularity",
        "fp8_recipe",
        "config_logger_dir",
        "moe_pad_expert_input_to_capacity",
        "switch_dispatch",
        "switch_device",
        "switch_nodes_per_leaf",
        "switch_run_dir",
    ],
)
def test_how_it_was_trained_is_not_taken(name):
    assert name not in model_attributes()


# Compared in the form of what follows from them (layers, groups, the activation of a T5), or only
# where something else is on; tests/checkpoint/load/test_settings_agreement.py.
DERIVED = {
    *("num_experts", "num_layers", "moe_layer_freq", "num_query_groups", "switch_activation"),
    *("max_position_embeddings", "rope_scaling_factor"),
}


@pytest.mark.parametrize("name", sorted(compared_attributes() - DERIVED))
def test_another_value_is_another_model(sparse_line, name):
    stored = sparse_line().args
    stored.padded_vocab_size = 1024
    if not hasattr(stored, name):
        setattr(stored, name, 1)
    changed = Namespace(**{**vars(stored), name: "another"})
    with pytest.raises(CheckpointError, match="of another model"):
        check_model(stored, changed, compared_attributes())


def test_every_setting_of_megatrons_layers_is_compared_or_has_a_row():
    assert compared_attributes() | KNOWN_FLAGS.keys() >= TRANSFORMER - PARALLEL
    for name in ("layernorm_epsilon", "window_size", "use_rope_scaling", "softmax_type"):
        assert name in compared_attributes()


def test_a_checkpoint_does_not_choose_code():
    stored = Namespace(trust_remote_code=True, tokenizer_model="there", metadata_path=None)
    args = with_stored_model(parse_command_line([]), stored).args
    assert (args.tokenizer_model, args.trust_remote_code) == ("there", False)
    own = parse_command_line(["--trust-remote-code", "--tokenizer-metadata", "own.json"])
    stored.metadata_path = "there/metadata.json"
    with pytest.raises(ConfigError, match=r"--tokenizer-metadata there/metadata\.json.*the flag"):
        with_stored_model(parse_command_line([]), stored)
    args = with_stored_model(own, stored).args
    assert (args.trust_remote_code, args.metadata_path) == (True, "own.json")


def test_an_explicit_flag_wins_and_what_was_taken_keeps_defaults_away():
    stored = Namespace(
        num_layers=4,
        num_experts=8,
        moe_layer_freq=[0, 0, 1, 1],
        seq_length=64,
        tokenizer_model="there.model",
        tensor_model_parallel_size=2,
        lr=1.0,
    )
    line = parse_command_line(["--seq-length", "16"])
    taken = with_stored_model(line, stored)
    fill_defaults(taken, "cpu")
    args = taken.args
    assert (args.num_layers, args.num_experts, args.moe_layer_freq) == (4, 8, [0, 0, 1, 1])
    assert (args.seq_length, args.tokenizer_model) == (16, "there.model")
    assert (args.tensor_model_parallel_size, args.lr) == (1, None)
    assert "moe_layer_freq" in taken.settled - taken.explicit
    assert "moe_layer_freq" not in line.settled


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(folder, iteration, args=None):
    common = {"iteration": iteration} | ({} if args is None else {"args": args})
    save_checkpoint(folder, iteration, {"weight": torch.zeros(2)}, common)


def test_what_is_not_asked_for_is_not_taken(sparse_line):
    line = sparse_line("--load gone")
    assert with_checkpoint_args(line) is line


def test_model_and_routing_come_from_the_checkpoint_unless_given(sparse_line, folder):
    stored = sparse_line("--num-layers 2 --moe-layer-freq [1,1] --switch-recipe hf").args
    save(folder, 3, stored)
    flags = f"--use-checkpoint-args --load {folder} --num-layers 2 --moe-z-loss-coeff 0.5"
    line = with_checkpoint_args(sparse_line(flags))
    assert line.args.moe_layer_freq == [1, 1]
    assert "moe_layer_freq" in line.settled  # no default replaces it
    assert (line.args.switch_capacity, line.args.switch_capacity_group) == (64, "sequence")
    assert line.args.moe_input_jitter_eps == 1e-2
    assert line.args.moe_z_loss_coeff == 0.5
    assert line.args.load == str(folder)


def test_a_tokenizer_inside_of_a_checkpoint_moves_with_it(sparse_line, folder, tmp_path):
    model = folder / "tokenizer" / "spiece.model"
    stored = sparse_line("").args
    stored.tokenizer_model = str(model)
    save(folder, 3, stored)
    model.parent.mkdir()
    model.touch()
    moved = folder.rename(tmp_path / "moved")
    line = with_checkpoint_args(sparse_line(f"--use-checkpoint-args --load {moved}"))
    assert line.args.tokenizer_model == str(moved / "tokenizer" / "spiece.model")
    line = f"--use-checkpoint-args --load {moved} --tokenizer-model other"
    assert with_checkpoint_args(sparse_line(line)).args.tokenizer_model == "other"


def test_nowhere_to_take_the_model_from(sparse_line, folder):
    with pytest.raises(ConfigError, match=r"no checkpoint is given\. Add --load"):
        with_checkpoint_args(sparse_line("--use-checkpoint-args"))
    save(folder, 3)
    line = sparse_line(f"--use-checkpoint-args --load {folder}")
    with pytest.raises(CheckpointError, match=r"stores no arguments .*--switch-model"):
        with_checkpoint_args(line)
