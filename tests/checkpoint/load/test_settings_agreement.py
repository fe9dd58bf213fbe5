"""What may differ between a checkpoint and the run that continues from it, and what may not."""

import re
from argparse import Namespace
from dataclasses import fields
from functools import partial

import pytest

from megatron_switch.checkpoint.load import settings_agreement
from megatron_switch.checkpoint.load.settings_agreement import (
    UNTRAINED,
    check_optimizer_state,
    check_switch_settings,
)
from megatron_switch.config import FLAG_PREFIX, SwitchConfig, switch_traits
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import flags_with
from megatron_switch.training.arguments.stored_arguments import compared_attributes

check_model = partial(settings_agreement.check_model, model=compared_attributes())
check_resume = partial(settings_agreement.check_resume, model=compared_attributes())

MEGATRON = {
    # the model
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 16,
    "padded_vocab_size": 1024,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": False,
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": False,
    "num_experts": 8,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 1,
    # its semantics
    "moe_expert_capacity_factor": 1.25,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_router_pre_softmax": True,
    # the optimizer
    "use_distributed_optimizer": True,
    "bf16": False,
    "fp16": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "transformer_impl": "local",
    # the schedule
    "train_iters": 10,
    "train_samples": None,
    "global_batch_size": 8,
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_decay_iters": 10,
    "lr_warmup_iters": 0,
    "lr_warmup_fraction": None,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.01,
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
    # what to load
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "no_save_optim": None,
}
SWITCH = {FLAG_PREFIX + field.name: field.default for field in fields(SwitchConfig)}
SCHEDULE = {
    "max_lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_warmup_steps": 0,
    "lr_decay_steps": 80,
    "wd_incr_steps": 80,
    "wd_incr_style": "constant",
    "start_wd": 0.01,
    "end_wd": 0.01,
    "num_steps": 24,
}


def arguments(**changes) -> Namespace:
    return Namespace(**{**MEGATRON, **SWITCH, **changes})


def stock(**changes) -> Namespace:
    return Namespace(**{**MEGATRON, **changes})


def common_state(args: Namespace, form: str = "fully_reshardable") -> dict:
    return {
        "args": args,
        "iteration": 3,
        "opt_param_scheduler": dict(SCHEDULE),
        "content_metadata": {"distrib_optim_sharding_type": form},
    }


def test_the_same_run_continues_without_a_word():
    assert check_resume(common_state(arguments()), arguments()) == ()


def test_a_checkpoint_without_arguments_says_that_nothing_was_compared():
    (message,) = check_resume({"iteration": 3}, arguments())
    assert "could not be compared" in message


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("num_layers", 6, "--num-layers: 4 in the checkpoint, 6 now"),
        ("hidden_size", 128, "--hidden-size: 64 in the checkpoint, 128 now"),
        ("ffn_hidden_size", 512, "--ffn-hidden-size: 256 in the checkpoint, 512 now"),
        ("num_attention_heads", 8, "--num-attention-heads: 4 in the checkpoint, 8 now"),
        ("num_experts", 16, "--num-experts: 8 in the checkpoint, 16 now"),
        ("num_experts", None, "--num-experts: 8 in the checkpoint, None now"),
        ("moe_ffn_hidden_size", 64, "--moe-ffn-hidden-size: 256 in the checkpoint, 64 now"),
        ("moe_router_topk", 2, "--moe-router-topk: 1 in the checkpoint, 2 now"),
        ("moe_layer_freq", 1, r"--moe-layer-freq: [1, 3] in the checkpoint, [0, 1, 2, 3] now"),
        ("padded_vocab_size", 2048, "--padded-vocab-size: 1024 in the checkpoint, 2048 now"),
        ("normalization", "LayerNorm", "--normalization: RMSNorm in the checkpoint, LayerNorm now"),
        ("swiglu", True, "--swiglu: False in the checkpoint, True now"),
        ("layernorm_zero_centered_gamma", True, "--apply-layernorm-1p: False in"),
        ("add_bias_linear", True, "--disable-bias-linear): False in the checkpoint, True now"),
        (
            "untie_embeddings_and_output_weights",
            True,
            "--untie-embeddings-and-output-weights: False in the checkpoint, True now",
        ),
        (
            "position_embedding_type",
            "learned_absolute",
            "--position-embedding-type: rope in the checkpoint, learned_absolute now",
        ),
    ],
)
def test_another_model_is_an_error_that_names_both_values(name, value, line):
    with pytest.raises(CheckpointError, match="of another model") as error:
        check_resume(common_state(arguments()), arguments(**{name: value}))
    assert line in str(error.value)


def test_the_factor_of_rope_scaling_counts_only_with_it():
    check_model(arguments(rope_scaling_factor=8.0), arguments(rope_scaling_factor=32.0))
    scaled = {"use_rope_scaling": True}
    with pytest.raises(CheckpointError, match=r"--rope-scaling-factor: 8\.0 in the checkpoint, 32"):
        check_model(
            arguments(rope_scaling_factor=8.0, **scaled),
            arguments(rope_scaling_factor=32.0, **scaled),
        )


def test_every_difference_is_listed():
    with pytest.raises(CheckpointError) as error:
        check_model(arguments(), arguments(num_layers=2, moe_layer_freq=[0, 1], hidden_size=32))
    assert str(error.value).count(" in the checkpoint, ") == 3


def test_query_groups_count_only_with_grouped_queries():
    check_model(arguments(), arguments(num_query_groups=2))
    with pytest.raises(CheckpointError, match="--num-query-groups: 4 in the checkpoint, 2 now"):
        check_model(arguments(), arguments(group_query_attention=True, num_query_groups=2))


def test_two_ways_to_say_the_same_pattern_of_layers_are_equal():
    check_model(arguments(moe_layer_freq=2), arguments(moe_layer_freq=[1, 0, 1, 0]))


def test_the_number_of_positions_counts_only_where_it_is_a_weight():
    check_model(arguments(), arguments(max_position_embeddings=64))
    learned = {"position_embedding_type": "learned_absolute"}
    with pytest.raises(CheckpointError, match="--max-position-embeddings: 32 in"):
        check_model(arguments(**learned), arguments(**learned, max_position_embeddings=64))


def test_the_vocabulary_is_not_compared_before_the_tokenizer_is_built():
    check_model(arguments(), arguments(padded_vocab_size=None))


def test_a_dense_model_has_no_switch_settings():
    dense = {"num_experts": None, "moe_layer_freq": 1}
    assert check_resume(common_state(stock(**dense)), arguments(**dense)) == ()
    changed = arguments(**dense, switch_min_capacity=1, moe_aux_loss_coeff=0.5)
    assert check_resume(common_state(arguments(**dense)), changed) == ()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("switch_capacity", 32, "--switch-capacity: None in the checkpoint, 32 now"),
        ("switch_drop_order", "probability", "--switch-drop-order: first_come in"),
        ("switch_min_capacity", 0, "--switch-min-capacity: 4 in the checkpoint, 0 now"),
        ("switch_eval_capacity_factor", 1.0, "--switch-eval-capacity-factor: 2.0 in"),
        ("switch_capacity_rounding", "ceil", "--switch-capacity-rounding: floor in"),
        ("switch_capacity_group", "sequence", "--switch-capacity-group: microbatch in"),
        ("switch_expert_dropout", 0.1, "--switch-expert-dropout: 0.0 in the checkpoint, 0.1 now"),
        ("moe_expert_capacity_factor", 2.0, "--moe-expert-capacity-factor: 1.25 in"),
        ("moe_aux_loss_coeff", 0.1, "--moe-aux-loss-coeff: 0.01 in the checkpoint, 0.1 now"),
        ("moe_z_loss_coeff", 1e-3, "--moe-z-loss-coeff: None in the checkpoint, 0.001 now"),
        ("moe_input_jitter_eps", 0.1, "--moe-input-jitter-eps: None in the checkpoint, 0.1 now"),
        ("moe_router_pre_softmax", False, "--moe-router-pre-softmax: True in"),
    ],
)
def test_another_switch_setting_is_an_error_unless_overridden(name, value, line):
    changed = arguments(**{name: value})
    with pytest.raises(CheckpointError, match="--switch-override-checkpoint") as error:
        check_resume(common_state(arguments()), changed)
    assert line in str(error.value)
    changed.switch_override_checkpoint = True
    (message,) = check_resume(common_state(arguments()), changed)
    assert line in message


def test_what_no_run_has_trained_may_be_trained_with_any_setting():
    changed = arguments(moe_expert_capacity_factor=2.0)
    state = common_state(arguments()) | {UNTRAINED: True}
    (message,) = check_resume(state, changed)
    assert "Continuing with Switch settings other than the checkpoint's" in message


@pytest.mark.parametrize("experts", [8, None])
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("switch_arch", "t5", "--switch-arch: gpt in the checkpoint, t5 now"),
        ("decoder_num_layers", 3, "--decoder-num-layers: None in the checkpoint, 3 now"),
        (
            "switch_decoder_layer_freq",
            "[1,0]",
            "--switch-decoder-layer-freq: None in the checkpoint, [1,0] now",
        ),
    ],
)
def test_another_architecture_is_another_model(name, value, line, experts):
    stored = arguments(num_experts=experts, decoder_num_layers=None)
    current = arguments(**{"num_experts": experts, "decoder_num_layers": None, name: value})
    with pytest.raises(CheckpointError, match=re.escape(line)):
        check_model(stored, current)


def test_the_nonlinearity_is_that_of_a_t5_only_and_auto_is_relu():
    t5 = {"switch_arch": "t5"}
    check_model(arguments(**t5), arguments(**t5, switch_activation="relu"))
    check_model(arguments(), arguments(switch_activation="gated-gelu"))
    with pytest.raises(CheckpointError, match=r"--switch-activation: relu .*, gated-gelu now"):
        check_model(arguments(**t5), arguments(**t5, switch_activation="gated-gelu"))


def test_a_checkpoint_of_an_older_release_is_of_a_decoder_only_model():
    stored = arguments()
    del stored.switch_arch
    check_model(stored, arguments())
    with pytest.raises(CheckpointError, match=r"--switch-arch: gpt in the checkpoint, t5 now"):
        check_model(stored, arguments(switch_arch="t5"))


@pytest.mark.parametrize("name", sorted(set(flags_with("free")) & switch_traits().keys()))
def test_where_and_how_fast_may_change(name):
    changed = arguments(**{name: "another"})
    changed.switch_override_checkpoint = False
    assert check_switch_settings(arguments(), changed) == ()


@pytest.mark.parametrize("unset", [None, 0, 0.0])
def test_an_unset_coefficient_is_zero(unset):
    assert check_switch_settings(arguments(), arguments(moe_z_loss_coeff=unset)) == ()


def test_a_coefficient_in_a_list_is_that_coefficient():
    assert check_switch_settings(arguments(), arguments(moe_aux_loss_coeff=[0.01])) == ()


def test_a_stock_checkpoint_loads_and_its_missing_settings_are_listed_once():
    checkpoint = common_state(stock(moe_expert_capacity_factor=None, moe_aux_loss_coeff=0.0))
    (message,) = check_resume(checkpoint, arguments())
    assert "stock Megatron" in message
    assert message.count("--switch-min-capacity 4") == 1
    assert "--moe-expert-capacity-factor: None in the checkpoint, 1.25 now" in message
    assert "--switch-run-dir" not in message


def test_a_setting_that_an_older_release_did_not_have_is_listed():
    older = arguments()
    del older.switch_drop_order
    (message,) = check_switch_settings(older, arguments())
    assert "an older release" in message
    assert "--switch-drop-order first_come" in message
    assert "--switch-min-capacity" not in message


def test_a_stock_checkpoint_of_a_top_2_model_is_another_model():
    with pytest.raises(CheckpointError, match="--moe-router-topk: 2 in the checkpoint, 1 now"):
        check_resume(common_state(stock(moe_router_topk=2)), arguments())


@pytest.mark.parametrize("stored", [True, False])
def test_the_kind_of_optimizer_cannot_change(stored):
    checkpoint = common_state(arguments(use_distributed_optimizer=stored))
    word = "with" if stored else "without"
    with pytest.raises(CheckpointError, match=rf"saved {word} --use-distributed-optimizer"):
        check_resume(checkpoint, arguments(use_distributed_optimizer=not stored))


def test_the_precision_can_change_with_the_distributed_optimizer_only():
    check_resume(common_state(arguments()), arguments(bf16=True))
    plain = {"use_distributed_optimizer": False}
    with pytest.raises(CheckpointError, match=r"saved in fp32 and this run is in --bf16"):
        check_resume(common_state(arguments(**plain)), arguments(**plain, bf16=True))
    check_resume(common_state(arguments(**plain, fp16=True)), arguments(**plain, bf16=True))


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("tensor_model_parallel_size", "--tensor-model-parallel-size: 1 in"),
        ("pipeline_model_parallel_size", "--pipeline-model-parallel-size: 1 in"),
        ("expert_model_parallel_size", "--expert-model-parallel-size: 2 in"),
        ("transformer_impl", "--transformer-impl: local in"),
    ],
)
def test_state_in_bucket_order_cannot_change_its_layout(name, flag):
    changed = arguments(**{name: 4})
    with pytest.raises(CheckpointError, match="--dist-ckpt-optim-fully-reshardable") as error:
        check_resume(common_state(arguments(), form="dp_reshardable"), changed)
    assert flag in str(error.value)
    check_resume(common_state(arguments(), form="fully_reshardable"), changed)
    check_optimizer_state(common_state(arguments(), form="dp_reshardable"), arguments())


def test_state_in_the_bucket_order_of_other_experts_is_refused():
    """The sizes are equal, so that Megatron would load one expert's moments into another."""
    checkpoint = common_state(stock(), form="dp_reshardable")
    with pytest.raises(
        CheckpointError, match=r"stock Megatron have another order.*--no-load-optim"
    ):
        check_resume(checkpoint, arguments())
    check_resume(checkpoint, arguments(no_load_optim=True))
    dense = {"num_experts": None}
    check_resume(common_state(stock(**dense), form="dp_reshardable"), arguments(**dense))


def test_other_data_and_another_seed_are_noted():
    stored = common_state(arguments(data_path=["one"], seed=1))
    assert check_resume(stored, arguments(data_path=["one"], seed=1)) == ()
    changed = {"data_path": ["two"], "seed": 5}
    (note,) = check_resume(stored, arguments(**changed))
    assert "\n  --seed: 1 in the checkpoint, 5 now" in note
    assert "\n  --data-path: ['one'] in the checkpoint, ['two'] now" in note
    assert check_resume(stored, arguments(**changed, finetune=True)) == ()


@pytest.mark.parametrize("way", ["finetune", "no_load_optim"])
def test_nothing_of_the_optimizer_is_compared_when_it_is_not_loaded(way):
    changed = arguments(**{way: True}, use_distributed_optimizer=False, lr=5.0, train_iters=99)
    notes = check_resume(common_state(arguments()), changed)
    assert ["start anew" in note for note in notes] == [True] * (way == "no_load_optim")


def test_a_release_has_no_optimizer():
    changed = arguments(lr=5.0)
    assert check_resume(common_state(arguments()), changed, is_release=True) == ()
    notes = check_resume(common_state(arguments(no_save_optim=True)), changed)
    assert notes[0] == "The checkpoint has no optimizer state: it was saved with --no-save-optim."
    assert "start anew" in notes[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("adam_beta1", 0.1), ("adam_beta2", 0.5), ("adam_eps", 1.0), ("optimizer", "sgd")],
)
def test_the_optimizer_continues_as_it_was(name, value):
    saved = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    state = common_state(arguments(**saved))
    check_resume(state, arguments(**saved))
    line = f"--{name.replace('_', '-')}: {saved[name]} in the checkpoint, {value} now"
    with pytest.raises(CheckpointError, match=f"{line}\n.*--no-load-optim"):
        check_resume(state, arguments(**{**saved, name: value}))


def test_another_micro_batch_is_another_capacity_group():
    state = common_state(arguments(micro_batch_size=2))
    (note,) = check_resume(state, arguments(micro_batch_size=4))
    assert "--micro-batch-size: 2 in the checkpoint, 4 now" in note
    assert check_resume(state, arguments(micro_batch_size=2)) == ()
