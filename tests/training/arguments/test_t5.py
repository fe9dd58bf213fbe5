"""What --switch-arch t5 makes of a command line, and what it refuses."""

import pytest

from megatron_switch.architecture.layer_pattern import stacks_of
from megatron_switch.architecture.model import Architecture
from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.flags.known_flags import flags_without_effect
from megatron_switch.training.arguments.data_flags import reads_pairs
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.arguments.t5 import check_t5
from megatron_switch.training.loop.gpt_builder import resolve_dispatch
from megatron_switch.training.preflight.flags import failed_conditions

T5 = (
    "--switch-arch t5 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --vocab-size 127 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --switch-device cpu "
)
SIZES = "--num-layers 4 --seq-length 512 "
PAIRS = "--data-path pairs.jsonl --decoder-seq-length 64 "


def filled(flags):
    line = parse_command_line((T5 + flags).split())
    fill_defaults(line, "cpu")
    return line.args


def test_defaults_are_those_of_t5():
    args = filled(SIZES)
    assert (args.normalization, args.layernorm_epsilon) == ("RMSNorm", 1e-6)
    assert not args.add_bias_linear
    assert args.embedding_init_method_std == 1.0
    assert args.position_embedding_type == "none"
    assert not args.untie_embeddings_and_output_weights


def test_both_stacks_are_as_deep_unless_said_otherwise():
    args = filled(SIZES)
    assert (args.num_layers, args.decoder_num_layers, args.encoder_num_layers) == (4, 4, None)
    args = filled("--encoder-num-layers 3 --decoder-num-layers 2 --seq-length 64")
    assert (args.num_layers, args.decoder_num_layers, args.encoder_num_layers) == (3, 2, None)


def test_the_decoder_is_as_long_as_the_targets_of_span_corruption():
    args = filled(SIZES)
    assert args.decoder_seq_length == 128  # 114, and the next multiple of 16
    assert args.max_position_embeddings == 512
    assert filled(SIZES + "--decoder-seq-length 700").max_position_embeddings == 700
    assert filled(SIZES + "--switch-span-density 0.5").decoder_seq_length > 128
    assert filled("--num-layers 2 --encoder-seq-length 512").seq_length == 512


def test_pairs_need_a_length_for_their_targets():
    assert reads_pairs(filled(SIZES + PAIRS))
    with pytest.raises(ConfigError, match=r"give --decoder-seq-length"):
        filled(SIZES + "--train-data-path pairs.jsonl")


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ("--num-layers 4", (2, 4, 6, 8)),
        ("--encoder-num-layers 3 --decoder-num-layers 2", (2, 5)),
        ("--num-layers 2 --moe-layer-freq [1,1]", (1, 2, 3, 4)),
        ("--num-layers 2 --moe-layer-freq 1 --decoder-num-layers 3", (1, 2, 3, 4, 5)),
        ("--num-layers 2 --decoder-num-layers 3 --switch-decoder-layer-freq [1,0,1]", (2, 3, 5)),
        ("--num-layers 2 --switch-decoder-layer-freq ([0,1])", (2, 4)),
    ],
)
def test_layers_with_experts_are_numbered_through_both_stacks(flags, numbers):
    args = filled(f"{flags} --seq-length 64")
    assert Architecture.from_args(args).sparse_layer_numbers == numbers


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[0,1]", r"has 2 entries for 4 layers.*--decoder-num-layers"),
        ("0", r"--switch-decoder-layer-freq is a number N of at least 1, .* got 0\."),
        ("many", r"got many\."),
        ("[0,1", r"got \[0,1\."),
    ],
)
def test_a_decoder_pattern_that_says_nothing_of_its_layers_is_refused(pattern, message):
    args = filled(f"{SIZES} --switch-decoder-layer-freq {pattern}")
    with pytest.raises(ConfigError, match=message):
        stacks_of(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--encoder-num-layers 4", r"given twice: --num-layers 4 and --encoder-num-layers 4"),
        ("--encoder-seq-length 9", r"given twice: --seq-length 512 and --encoder-seq-length 9"),
        ("--position-embedding-type rope", r"relative attention bias, got .* rope"),
    ],
)
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        filled(SIZES + flags)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--pipeline-model-parallel-size 2", LayoutError, r"no pipeline .*-size 2: every decoder"),
        ("--context-parallel-size 2", LayoutError, r"no context parallelism, got .*-size 2"),
        ("--swiglu", ConfigError, r"--swiglu cannot be used.*--switch-activation"),
        ("--calculate-per-token-loss", ConfigError, r"--calculate-per-token-loss cannot be used"),
        ("--log-throughput", ConfigError, r"--log-throughput cannot be used"),
        ("--full-validation", ConfigError, r"--full-validation cannot be used.*--eval-iters"),
        ("--data-path a.jsonl corpus --decoder-seq-length 9", ConfigError, r"corpus is no .jsonl"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 9",
            LayoutError,
            r"--decoder-seq-length 9 is no multiple of --tensor-model-parallel-size 2",
        ),
    ],
)
def test_what_a_t5_cannot_do_is_refused(flags, error, message):
    args = filled(SIZES + flags)
    with pytest.raises(error, match=message):
        check_t5(args)


def test_a_t5_without_fault_passes():
    for flags in ("", PAIRS, "--tensor-model-parallel-size 4 --sequence-parallel"):
        check_t5(filled(SIZES + flags))


def ignored(flags):
    line = parse_command_line(flags.split())
    fill_defaults(line, "cpu")
    switch = resolve_dispatch(line.args, SwitchConfig.from_args(line.args), "cpu")
    return flags_without_effect(line.explicit, failed_conditions(line.args, switch))


def test_flags_of_the_other_architecture_or_objective_are_idle():
    gpt = f"{T5}{SIZES}".replace("--switch-arch t5", "--switch-arch gpt")
    assert ignored(f"{gpt} --switch-activation relu --switch-span-length 2") == {
        "--switch-activation": "it is for --switch-arch t5.",
        "--switch-span-length": "it is for --switch-arch t5.",
    }
    assert ignored(f"{T5}{SIZES} --switch-activation relu --switch-span-length 2") == {}
    assert ignored(f"{T5}{SIZES}{PAIRS} --switch-span-length 2") == {
        "--switch-span-length": "the data are pairs of texts."
    }
    dense = f"{T5}{SIZES}".replace("--num-experts 4", "")
    assert ignored(f"{dense} --switch-activation relu --switch-min-capacity 2") == {
        "--switch-min-capacity": "without --num-experts every layer is dense."
    }
