"""Switch-T5 through the whole program: layouts, resume, objectives, answers."""

import json

import pytest
from support.tiny_run import read_records, run_command, trained

from megatron_switch.data.preparation.sentencepiece_model import (
    SentencePieceSettings,
    train_sentencepiece,
)

pytestmark = pytest.mark.slow

T5 = (
    "--switch-arch t5 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
    "--switch-device cpu --num-experts 4 --eval-iters 0 --log-interval 1 --save-interval 1 "
    "--switch-metrics-interval 2 "
)
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 127 "
EXACT = "--hidden-dropout 0 --attention-dropout 0 --moe-z-loss-coeff 1e-3 "


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Write pairs of number rows, the target being the input backwards; return their flags."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = []
    for first in range(40):
        row = [(first * factor) % 120 for factor in range(1, 4 + first % 12)]
        texts = (" ".join(map(str, each)) for each in (row, row[::-1]))
        lines.append(json.dumps(dict(zip(("input", "target"), texts, strict=True))))
    path.write_text("\n".join(lines))
    return f"--data-path {path} --split 100,0,0 --decoder-seq-length 12 "


@pytest.fixture(scope="module")
def one_rank(pairs, tmp_path_factory):
    """Train on one rank without noise; return flags that go on after iteration 1, and records."""
    folder = tmp_path_factory.mktemp("one")
    flags = f"{T5}{NUMBERS}{EXACT}{pairs}--train-iters 3 --use-distributed-optimizer"
    trained(f"{flags} --switch-run-dir {folder}")
    onward = f"{flags} --load {folder / 'checkpoints'} --ckpt-step 1"
    return onward, read_records(folder / "metrics.jsonl")


LAYOUTS = {
    "the same": (1, ""),
    "TP 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP 2": (2, "--expert-model-parallel-size 2"),
    "DP 2": (2, ""),
    "recomputed": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_in_any_layout_with_the_same_losses(layout, one_rank, tmp_path):
    onward, expected = one_rank
    ranks, flags = LAYOUTS[layout]
    trained(f"{onward} {flags} --switch-metrics-file {tmp_path / 'm.jsonl'}", ranks=ranks)
    actual = read_records(tmp_path / "m.jsonl")
    assert [record["iteration"] for record in actual] == [2, 3]
    for name in ("lm_loss", "grad_norm", "load_balancing_loss", "encoder_z_loss"):
        values = [[record[name] for record in records] for records in (actual, expected[1:])]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name
    loads = [record["expert_load"] for record in (actual[0], expected[1])]
    assert loads[0] == loads[1]


def test_encoder_and_decoder_are_logged_apart(one_rank):
    _, records = one_rank
    second = records[1]
    assert second["layers"] == [2, 4]  # the decoder's follow the encoder's
    assert second["encoder_layers"] == 2
    assert len(second["expert_load"]) == 2
    by_layer = second["dropped_by_layer"]
    assert [second["encoder_dropped_fraction"], second["decoder_dropped_fraction"]] == by_layer
    assert second["dropped_fraction"] == pytest.approx(sum(by_layer) / 2)


def test_noise_resumes_bit_equal(pairs, tmp_path):
    flags = f"{T5}{NUMBERS}{pairs}--switch-expert-dropout 0.4 --moe-input-jitter-eps 0.01 "
    flags += "--switch-activation gated-gelu --untie-embeddings-and-output-weights"
    trained(f"{flags} --train-iters 3 --switch-run-dir {tmp_path / 'whole'}")
    onward = f"--load {tmp_path / 'whole' / 'checkpoints'} --ckpt-step 1 --train-iters 3"
    again = tmp_path / "again.jsonl"
    trained(f"{flags} {onward} --switch-metrics-file {again}")
    whole = read_records(tmp_path / "whole" / "metrics.jsonl")[1:]
    names = ("lm_loss", "grad_norm", "load_balancing_loss")
    assert [[r[n] for n in names] for r in read_records(again)] == [
        [r[n] for n in names] for r in whole
    ]


def test_a_model_learns_its_pairs_and_answers(tmp_path):
    path = tmp_path / "pairs.jsonl"
    known = {"5 6 7": "20 21", "8 9": "30 31 32", "11": "40"}
    lines = [json.dumps({"input": one, "target": other}) for one, other in known.items()]
    path.write_text("\n".join(lines))
    trained(
        f"{T5}{NUMBERS}{EXACT}--data-path {path} --split 100,0,0 --decoder-seq-length 8 --lr 1e-2 "
        f"--micro-batch-size 3 --global-batch-size 3 --train-iters 60 --save-interval 60 "
        f"--untie-embeddings-and-output-weights --switch-run-dir {tmp_path / 'run'}"
    )
    prompts = [word for text in known for word in ("--prompt", text)]
    answered = run_command(
        "generate", "--load", str(tmp_path / "run"), *prompts, "--greedy", "--num-tokens", "8"
    )
    assert answered.code == 0, answered.errors
    assert [line for line in answered.screen.splitlines() if line] == list(known.values())
    looked = run_command("experts", "--load", str(tmp_path / "run"))
    assert looked.code == 2
    assert "experts of an encoder-decoder" in looked.errors


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare text with a tokenizer that has sentinels; return the flags that use it."""
    folder = tmp_path_factory.mktemp("prepared")
    words = ["expert", "router", "token", "gate", "slot", "layer", "switch", "load"]
    for number in range(30):
        text = " ".join(words[(number * n) % 8] + f" {n % 7}" for n in range(1, 60))
        (folder / f"{number:02}.txt").write_text(text)
    model = folder / "tokenizer.model"
    texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    settings = SentencePieceSettings(310, "bpe", 2**20, sentinels=8)
    model.write_bytes(train_sentencepiece(texts, settings))
    tokenizer = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    inputs = [str(path) for path in sorted(folder.glob("*.txt"))]
    output = folder / "data"
    made = run_command("prepare", *inputs, "--output", str(output), *tokenizer.split())
    assert made.code == 0, made.errors
    return f"--data-path {output / 'corpus'} --split 80,20,0 {tokenizer} "


def test_span_corruption_trains_and_evaluates_on_prepared_text(prepared, tmp_path):
    outcome = trained(
        f"{T5}{prepared}--train-iters 2 --eval-iters 1 --eval-interval 2 "
        f"--switch-metrics-file {tmp_path / 'm.jsonl'}"
    )
    (record,) = read_records(tmp_path / "m.jsonl", "validation")[:1]
    assert record["lm_loss"] > 0
    assert "encoder_dropped_fraction" in record
    assert "encoder of 2 layers (sparse 2; dense 1), decoder of 2 layers" in outcome.screen


def test_too_few_sentinels_stop_the_run_before_it_begins(prepared):
    flags = f"{T5}{prepared}--train-iters 2".replace("--seq-length 16", "--seq-length 256")
    outcome = run_command("train", *flags.split())
    assert outcome.code == 2
    assert "8 sentinels <extra_id_N>" in outcome.errors


def test_a_bad_line_stops_the_run_with_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "1", "target": "2"}\n{"input": "1"}\n')
    flags = f"{T5}{NUMBERS}--data-path {path} --split 100,0,0 --decoder-seq-length 8"
    outcome = run_command("train", *flags.split(), "--train-iters", "1")
    assert outcome.code == 2
    assert "bad.jsonl, line 2: has no 'target'" in outcome.errors
