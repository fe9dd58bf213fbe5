"""Stored arguments have the type and the range of their flags; what has not is named."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_switch.checkpoint.load.stored_values import check_stored
from megatron_switch.errors import CheckpointError

GPT = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "padded_vocab_size": 128,
    "make_vocab_size_divisible_by": 128,
    "untie_embeddings_and_output_weights": False,
    "seq_length": 16,
    "micro_batch_size": 2,
    "tokenizer_type": None,
    "tokenizer_model": None,
    "moe_aux_loss_coeff": [0.01],
    "rotary_percent": 1,
}
T5 = {
    **GPT,
    "switch_arch": "t5",
    "decoder_num_layers": 2,
    "switch_activation": "relu",
    "switch_eval_capacity_factor": 2.0,
    "switch_capacity": None,
    "switch_capacity_group": "sequence",
}


@pytest.mark.parametrize("values", [GPT, T5], ids=["gpt", "t5"])
def test_what_a_run_stores_is_accepted_and_nothing_may_be_missing(values):
    check_stored(Namespace(**values), Path("m"))
    for name in values.keys() - {"moe_aux_loss_coeff", "rotary_percent", "switch_arch"}:
        rest = {key: value for key, value in values.items() if key != name}
        with pytest.raises(CheckpointError, match=r"that no run can have: --.* is missing"):
            check_stored(Namespace(**rest), Path("m"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", float("nan"), "can have: --hidden-size nan. The checkpoint is damaged"),
        ("hidden_size", True, "--hidden-size True"),
        ("num_layers", 0, "--num-layers 0"),
        ("rotary_percent", 7, "--rotary-percent 7"),
        ("moe_aux_loss_coeff", [0.01, 0.02], r"--moe-aux-loss-coeff \[0.01, 0.02\]"),
        ("moe_expert_capacity_factor", float("nan"), "--moe-expert-capacity-factor nan"),
        ("tokenizer_model", 5, "--tokenizer-model 5"),
        ("swiglu", "yes", "--swiglu 'yes'"),
    ],
)
def test_what_no_run_can_have_is_named(name, value, message):
    with pytest.raises(CheckpointError, match=message):
        check_stored(Namespace(**{**GPT, name: value}), Path("m"))
