"""Text from a checkpoint of two ranks, on one rank and on two, against plain forward passes."""

import io
import sys

import pytest
import torch

from megatron_switch.cli import main
from megatron_switch.emulation import launch
from megatron_switch.errors import CheckpointError, ConfigError, DataError, LayoutError
from megatron_switch.testing.checkpoints import load_tensors, save_checkpoint
from megatron_switch.training.generation import run, text_pieces
from megatron_switch.training.trained_model import open_trained_model

PROMPT = "def f3(a, b):"
CONTEXT = 32
ON_CPU = ("--switch-device", "cpu")
TRAINING = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear --switch-device cpu
    --micro-batch-size 4 --global-batch-size 4 --lr 3e-2 --eval-iters 0 --eval-interval 1000
    --split 100,0,0
""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two ranks, with sparse layers where no default puts them; return the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    text = "".join(
        f"def f{n}(a, b):\n    return a + b * {n}  # the sum, scaled by {n}\n\n\n"
        for n in range(80)
    )
    (folder / "text.py").write_text(text)
    data = ["prepare", str(folder / "text.py"), "--output", str(folder / "data")]
    assert main([*data, "--vocab-size", "300", "--workers", "1"]) == 0
    flags = [
        *TRAINING,
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
        *("--num-experts", "4", "--moe-layer-freq", "[1,0]", "--train-iters", "12"),
        *("--data-path", str(folder / "data" / "corpus")),
        *("--tokenizer-type", "SentencePieceTokenizer"),
        *("--tokenizer-model", str(folder / "data" / "tokenizer.model")),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
        *("--switch-run-dir", str(folder / "run")),
    ]
    assert launch(2, lambda: main(["train", *flags])) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Train a model without experts in bfloat16, with learned positions; return its checkpoints."""
    folder = tmp_path_factory.mktemp("dense") / "checkpoints"
    flags = [*TRAINING, "--train-iters", "1", "--mock-data", "--bf16", "--save", str(folder)]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    assert launch(1, lambda: main(["train", *flags, *tokenizer])) == 0
    return folder


def generate(capsys, folder, *flags):
    """Return what is printed of a prompt on one rank."""
    assert run(["--load", str(folder), *ON_CPU, *flags]) == 0
    return capsys.readouterr().out


def window(ids):
    tokens_BS = torch.tensor([ids])
    return tokens_BS, torch.zeros_like(tokens_BS, dtype=torch.bool)


def test_greedy_text_is_the_argmax_of_plain_forward_passes(trained, capsys):
    with open_trained_model(trained, ON_CPU) as model:
        tokenizer = model.tokenizer
        ids = tokenizer.built.tokenize(PROMPT)
        for _ in range(30):  # longer than the context
            logits_BSV = model.logits(*window(ids[-CONTEXT:]))
            ids.append(int(logits_BSV[0, -1, : tokenizer.vocab_size].argmax()))
        assert tokenizer.eod not in ids
        expected = tokenizer.built.detokenize(ids)
    assert expected.startswith(PROMPT)
    greedy = ("--greedy", "--num-tokens", "30")
    assert generate(capsys, trained, "--prompt", PROMPT, *greedy) == expected + "\n"


def test_the_model_holds_the_trained_weights_and_settings(trained):
    stored = load_tensors(trained / "checkpoints" / "iter_0000012")
    stored = {name: t for name, t in stored.items() if not name.startswith("optimizer.")}
    with open_trained_model(trained, ON_CPU) as model:
        squares = [float(p.double().square().sum()) for p in model.module.parameters()]
        numbers = sum(p.numel() for p in model.module.parameters())
        assert not model.module.training
        args = model.args
    assert numbers == sum(t.numel() for t in stored.values())
    assert sum(squares) == pytest.approx(
        sum(float(t.double().square().sum()) for t in stored.values())
    )
    assert (args.swiglu, args.normalization, args.moe_layer_freq) == (True, "RMSNorm", [1, 0])
    assert args.tensor_model_parallel_size == args.expert_model_parallel_size == 1


@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--expert-model-parallel-size", "2"),
    ],
    ids=["TP 2", "EP 2"],
)
def test_every_layout_draws_the_same_text(trained, layout, capfd):
    flags = ["--prompt", PROMPT, "--prompt", "x", "--num-tokens", "21", "--temperature", "2"]
    alone = generate(capfd, trained, *flags)
    argv = ["--load", str(trained), *ON_CPU, *flags, *layout]
    assert launch(2, lambda: run(argv)) == 0
    assert capfd.readouterr().out == alone


def test_a_seed_decides_the_text(trained, capsys):
    flags = ("--prompt", PROMPT, "--temperature", "2", "--top-p", "1", "--num-tokens", "20")
    first, again, other = (
        generate(capsys, trained, *flags, "--seed", seed) for seed in ("7", "7", "8")
    )
    assert first == again
    assert first != other


def test_drop_changes_nothing_while_capacity_suffices(trained, capsys):
    flags = ("--prompt", PROMPT, "--temperature", "2", "--num-tokens", "20")
    ample = ("--drop", "--switch-eval-capacity-factor", "4")
    assert generate(capsys, trained, *flags, *ample) == generate(capsys, trained, *flags)


def test_padding_takes_no_capacity(trained):
    with open_trained_model(trained, ON_CPU) as model:
        ids = model.tokenizer.built.tokenize(PROMPT)
        dropless_BSV = model.logits(*window(ids))
    with open_trained_model(trained, [*ON_CPU, "--switch-capacity", "2"], drop=True) as model:
        limited_BSV = model.logits(*window(ids))
        tokens_BS, padding_BS = window([*ids, *[0] * 9])
        padding_BS[:, len(ids) :] = True
        padded_BSV = model.logits(tokens_BS, padding_BS)
    torch.testing.assert_close(padded_BSV[:, : len(ids)], limited_BSV)
    assert not torch.allclose(limited_BSV, dropless_BSV)


def test_drop_counts_capacity_as_an_evaluation_does(trained, capsys, monkeypatch):
    """One window of the whole context from the first token on, whatever --num-tokens says."""
    widths = []
    original = torch.nn.Module.__call__

    def noted(self, *args, **kwargs):
        if type(self).__name__ == "GPTModel":
            widths.append(args[0].size(1))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", noted)
    generate(capsys, trained, "--prompt", "x", "--num-tokens", "2", "--drop")
    assert set(widths) == {CONTEXT}
    widths.clear()
    generate(capsys, trained, "--prompt", "x", "--num-tokens", "2")
    assert max(widths) < CONTEXT


def test_prompts_come_from_flags_files_and_standard_input(trained, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("from a file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    flags = ("--prompt", "typed", "--prompt", "-", "--prompt-file", str(tmp_path / "prompt.txt"))
    texts = generate(capsys, trained, *flags, "--greedy", "--num-tokens", "1").split("\n\n")
    starts = ("typed", "from a pipe", "from a file")
    assert [text.startswith(start) for text, start in zip(texts, starts, strict=True)] == [True] * 3


def test_a_dense_16_bit_model_of_numbers(dense, capsys):
    flags = ("--prompt", "5 6 7", "--num-tokens", "4", "--greedy", "--drop")
    assert run(["--load", str(dense), *ON_CPU, *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("5 6 7 ")
    assert len(printed.out.split()) == 7
    assert "--drop has no effect: the model has no experts." in printed.err


def test_notes_go_to_standard_error(trained, capsys):
    flags = ("--greedy", "--top-k", "3", "--switch-capacity", "2", "--num-tokens", "1")
    assert run(["--load", str(trained), *ON_CPU, "--prompt", "a b c d " * 20, *flags]) == 0
    error = capsys.readouterr().err
    assert "iter_0000012: 7" in error  # parameters
    assert "--top-k has no effect with --greedy." in error
    assert "--switch-capacity has no effect without --drop." in error
    assert "sequences of 32: only the last 32 are seen." in error


def test_text_grows_by_whole_characters():
    text = "è un café ☕"
    pieces = text_pieces(lambda ids: bytes(ids).decode(errors="replace"), *_split(text.encode(), 3))
    assert list(pieces) == [*text[2:]]


def test_an_unfinished_character_is_shown_at_the_end():
    cut = "é☕".encode()[:-1]
    pieces = text_pieces(lambda ids: bytes(ids).decode(errors="replace"), *_split(cut, 2))
    assert list(pieces) == ["\N{REPLACEMENT CHARACTER}"]


def _split(ids, where):
    return list(ids[:where]), iter(ids[where:])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "There is nothing to continue: give --prompt TEXT"),
        (("--prompt", ""), "needs at least one token .* an empty --prompt"),
        (("--prompt", "a", "--num-tokens", "0"), "got --num-tokens 0"),
        (("--prompt", "a", "--temperature", "-1"), "at least 0 .* got --temperature -1"),
        (("--prompt", "a", "--top-p", "1.5"), "above 0 and at most 1, got --top-p 1.5"),
        (("--prompt", "a", "--top-k", "-2"), "left to choose from, got --top-k -2"),
        (("--prompt-file", "absent"), "--prompt-file wants a UTF-8 text file, and absent cannot"),
        (("--prompt", "a", "--promt", "b"), "There is no flag --promt"),
        (
            ("--prompt", "a", "--pipeline-model-parallel-size", "2"),
            "not cut by --pipeline-model-parallel-size, got 2. A checkpoint opens in any layout",
        ),
        (
            ("--prompt", "a", "--context-parallel-size", "2"),
            "not cut by --context-parallel-size, got 2",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(trained, flags, message):
    with pytest.raises(ConfigError, match=message):
        run(["--load", str(trained), *ON_CPU, *flags])


def test_a_model_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="There is no model: --load was not given"):
        run(["--prompt", "a"])
    with pytest.raises(CheckpointError, match="The checkpoint folder .*absent does not exist"):
        run(["--prompt", "a", "--load", str(tmp_path / "absent")])
    with pytest.raises(CheckpointError, match="--load"):
        run(["--prompt", "a", "--load", str(tmp_path)])


def test_a_layout_that_does_not_fit_is_refused(trained):
    with pytest.raises(LayoutError, match="--expert-model-parallel-size"):
        run(["--load", str(trained), *ON_CPU, "--prompt", "a", "--expert-model-parallel-size", "3"])


def test_flags_of_another_model_are_refused(trained):
    with pytest.raises(CheckpointError, match=r"of another model:\n  --hidden-size: 32 .* 64 now"):
        run(["--load", str(trained), *ON_CPU, "--prompt", "a", "--hidden-size", "64"])


def test_a_checkpoint_without_arguments_names_what_is_missing(tmp_path):
    save_checkpoint(tmp_path, "release", {"a": torch.zeros(1)}, {"checkpoint_version": 3.0})
    with pytest.raises(CheckpointError, match="stores no arguments, .*--num-layers"):
        run(["--load", str(tmp_path), *ON_CPU, "--prompt", "a"])


def test_a_tokenizer_that_moved_is_asked_for(trained, capsys):
    model = trained.parent / "data" / "tokenizer.model"
    moved = model.rename(model.with_name("moved.model"))
    try:
        with pytest.raises(DataError, match="not where it was in training: .* --tokenizer-model"):
            run(["--load", str(trained), *ON_CPU, "--prompt", "a"])
        flags = ("--tokenizer-model", str(moved), "--num-tokens", "1")
        assert generate(capsys, trained, "--prompt", "a", *flags).startswith("a")
    finally:
        moved.rename(model)


def test_the_command_ends_with_its_message_and_code_2(capsys):
    assert main(["generate", "--prompt", "a"]) == 2
    assert "megatron-switch: error: There is no model" in capsys.readouterr().err
