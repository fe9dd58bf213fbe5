"""Text from a checkpoint of two ranks, on one rank and on two, against plain forward passes.

Whatever opens a model runs in a forked rank: a process that has used gloo cannot fork ranks later.
"""

import io
import shlex
import sys

import pytest
import torch

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.cli import main
from megatron_switch.commands import table
from megatron_switch.commands.inspect.generate import text_pieces
from megatron_switch.emulation import launch
from megatron_switch.errors import CheckpointError, ConfigError, DataError, LayoutError
from megatron_switch.testing.checkpoints import load_tensors, save_checkpoint
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model

PROMPT = "def f3(a, b):"
pytestmark = pytest.mark.slow  # two trainings come first

CONTEXT = 32
ON_CPU = ("--switch-device", "cpu")
TRAINING = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear --switch-device cpu
    --micro-batch-size 4 --global-batch-size 4 --lr 3e-2 --eval-iters 0 --eval-interval 1000
    --split 100,0,0
"""
SPARSE = """
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --num-experts 4 --moe-layer-freq [1,0] --train-iters 12
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
"""
DENSE = "--train-iters 1 --mock-data --bf16 --tokenizer-type NullTokenizer --vocab-size 100"


def train(num_ranks, flags, run_folder):
    argv = ["train", *shlex.split(TRAINING + flags), "--switch-run-dir", str(run_folder)]
    assert launch(num_ranks, lambda: main(argv)) == 0


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
    files = f"""
        --data-path {folder / "data" / "corpus"} --tokenizer-type SentencePieceTokenizer
        --tokenizer-model {folder / "data" / "tokenizer.model"}
    """
    train(2, SPARSE + files, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Train without experts, in bfloat16, with learned positions; return the checkpoint folder."""
    folder = tmp_path_factory.mktemp("dense")
    train(1, DENSE, folder)
    return folder / "checkpoints"


def generate(capfd, folder, *flags, num_ranks=1):
    """Return what is printed."""
    argv = ["--load", str(folder), *ON_CPU, *flags]
    assert launch(num_ranks, lambda: table.run("generate", argv)) == 0
    return capfd.readouterr().out


def generate_each(capfd, folder, *cases):
    """Return what is printed for each tuple of flags, all by one process."""

    def each():
        for flags in cases:
            table.run("generate", ["--load", str(folder), *ON_CPU, *flags])
            print("\0", end="", flush=True)

    in_a_rank(each)
    return capfd.readouterr().out.split("\0")[:-1]


def in_a_rank(check, *args):
    """Call a function that asserts, in a process of its own."""
    assert launch(1, lambda: check(*args)) == 0


def window(ids):
    tokens_BS = torch.tensor([ids])
    return tokens_BS, torch.zeros_like(tokens_BS, dtype=torch.bool)


def test_greedy_text_is_the_argmax_of_plain_forward_passes(trained, tmp_path, capfd):
    in_a_rank(_write_greedy_text, trained, tmp_path / "text")
    capfd.readouterr()
    expected = (tmp_path / "text").read_text()
    assert expected.startswith(PROMPT)
    greedy = ("--greedy", "--num-tokens", "30")
    assert generate(capfd, trained, "--prompt", PROMPT, *greedy) == expected + "\n"


def _write_greedy_text(folder, path):
    with open_trained_model(folder, ON_CPU) as model:
        tokenizer = model.tokenizer
        ids = tokenizer.built.tokenize(PROMPT)
        for _ in range(30):  # longer than the context
            logits_BSV = model.logits(*window(ids[-CONTEXT:]))
            ids.append(int(logits_BSV[0, -1, : tokenizer.vocab_size].argmax()))
        assert tokenizer.eod not in ids
        path.write_text(tokenizer.built.detokenize(ids))


def test_the_model_holds_the_trained_weights_and_settings(trained):
    in_a_rank(_check_weights, trained)


def _check_weights(folder):
    stored = load_tensors(folder / "checkpoints" / "iter_0000012")
    stored = [tensor for name, tensor in stored.items() if not name.startswith("optimizer.")]
    with open_trained_model(folder, ON_CPU) as model:
        held = list(model.module.parameters())
        assert sum(map(torch.numel, held)) == sum(map(torch.numel, stored))
        assert sum(map(squares, held)) == pytest.approx(sum(map(squares, stored)))
        assert not model.module.training
        args = model.args
    assert (args.swiglu, args.normalization, args.moe_layer_freq) == (True, "RMSNorm", [1, 0])
    assert args.tensor_model_parallel_size == args.expert_model_parallel_size == 1


def squares(tensor):
    return float(tensor.double().square().sum())


@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--expert-model-parallel-size", "2"),
    ],
    ids=["TP 2", "EP 2"],
)
def test_every_layout_draws_the_same_text(trained, layout, capfd):
    flags = ("--prompt", PROMPT, "--prompt", "x", "--num-tokens", "21", "--temperature", "2")
    alone = generate(capfd, trained, *flags)
    assert generate(capfd, trained, *flags, *layout, num_ranks=2) == alone


def test_a_seed_decides_the_text(trained, capfd):
    flags = ("--prompt", PROMPT, "--temperature", "2", "--top-p", "1", "--num-tokens", "20")
    seeds = [(*flags, "--seed", seed) for seed in ("7", "7", "8")]
    first, again, other = generate_each(capfd, trained, *seeds)
    assert first == again
    assert first != other


def test_drop_changes_nothing_while_capacity_suffices(trained, capfd):
    flags = ("--prompt", PROMPT, "--temperature", "2", "--num-tokens", "20")
    ample = ("--drop", "--switch-eval-capacity-factor", "4")
    dropless, limited = generate_each(capfd, trained, flags, (*flags, *ample))
    assert limited == dropless


def test_padding_takes_no_capacity(trained):
    """Not even from earlier tokens, which the order of probability would let it do."""
    in_a_rank(_check_padding, trained)


def _check_padding(folder):
    with open_trained_model(folder, ON_CPU) as model:
        ids = model.tokenizer.built.tokenize(PROMPT)
        dropless_BSV = model.logits(*window(ids))
    limits = ("--switch-capacity", "2", "--switch-drop-order", "probability")
    with open_trained_model(folder, [*ON_CPU, *limits], drop=True) as model:
        limited_BSV = model.logits(*window(ids))
        tokens_BS, padding_BS = window([*ids, *[0] * 9])
        padding_BS[:, len(ids) :] = True
        padded_BSV = model.logits(tokens_BS, padding_BS)
    torch.testing.assert_close(padded_BSV[:, : len(ids)], limited_BSV)
    assert not torch.allclose(limited_BSV, dropless_BSV)


def test_only_drop_feeds_windows_of_the_whole_context(trained):
    in_a_rank(_check_widths, trained)


def _check_widths(folder):
    widths = []
    logits = TrainedModel.logits

    def noted(self, tokens_BS, padding_BS):
        widths.append(tokens_BS.size(1))
        return logits(self, tokens_BS, padding_BS)

    TrainedModel.logits = noted  # in a process of its own
    argv = ["--load", str(folder), *ON_CPU, "--prompt", PROMPT, "--num-tokens", "1"]
    table.run("generate", [*argv, "--drop"])
    table.run("generate", argv)
    assert widths[0] == CONTEXT
    assert widths[1] < CONTEXT


def test_prompts_come_from_flags_files_and_standard_input(trained, tmp_path, capfd, monkeypatch):
    (tmp_path / "prompt.txt").write_text("from a file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    flags = ("--prompt", "typed", "--prompt", "-", "--prompt-file", str(tmp_path / "prompt.txt"))
    text = generate(capfd, trained, *flags, "--greedy", "--num-tokens", "1")
    places = [text.index(start) for start in ("typed", "\n\nfrom a pipe", "\n\nfrom a file")]
    assert places == sorted(places)
    assert text.startswith("typed")
    assert text.endswith("\n")


def test_a_dense_16_bit_model_of_numbers(dense, capfd):
    flags = ("--prompt", "5 6 7", "--num-tokens", "4", "--greedy", "--drop")
    argv = ["--load", str(dense), *ON_CPU, *flags]
    assert launch(1, lambda: table.run("generate", argv)) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("5 6 7 ")
    assert len(printed.out.split()) == 7
    assert "--drop has no effect: the model has no experts." in printed.err


def test_notes_go_to_standard_error(trained, capfd):
    flags = ("--greedy", "--top-k", "3", "--switch-capacity", "2", "--num-tokens", "1")
    argv = ["--load", str(trained), *ON_CPU, "--prompt", "a b c d " * 20, *flags]
    assert launch(1, lambda: table.run("generate", argv)) == 0
    error = capfd.readouterr().err
    assert "iter_0000012: 7" in error  # parameters
    assert "--top-k has no effect with --greedy." in error
    assert "--switch-capacity has no effect: without --drop no token is dropped." in error
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
        table.run("generate", ["--load", str(trained), *ON_CPU, *flags])


def test_an_empty_prompt_is_refused(trained, capfd):
    argv = ["generate", "--load", str(trained), *ON_CPU, "--prompt", ""]
    assert launch(1, lambda: main(argv)) == 2
    assert "at least one token to start from, got an empty --prompt" in capfd.readouterr().err


def test_a_model_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="There is no model: --load was not given"):
        table.run("generate", ["--prompt", "a"])
    with pytest.raises(CheckpointError, match=r"The checkpoint folder .*absent does not exist"):
        table.run("generate", ["--prompt", "a", "--load", str(tmp_path / "absent")])
    with pytest.raises(CheckpointError, match="--load"):
        table.run("generate", ["--prompt", "a", "--load", str(tmp_path)])


def test_an_iteration_that_was_not_saved_is_refused(trained):
    with pytest.raises(CheckpointError, match=r"--ckpt-step 5 asks for .*iter_0000012"):
        table.run(
            "generate", ["--load", str(trained), *ON_CPU, "--prompt", "a", "--ckpt-step", "5"]
        )


def test_a_layout_that_does_not_fit_is_refused(trained):
    with pytest.raises(LayoutError, match="--expert-model-parallel-size"):
        table.run(
            "generate",
            ["--load", str(trained), *ON_CPU, "--prompt", "a", "--expert-model-parallel-size", "3"],
        )


def test_flags_of_another_model_are_refused(trained):
    with pytest.raises(CheckpointError, match=r"of another model:\n  --hidden-size: 32 .* 64 now"):
        table.run(
            "generate", ["--load", str(trained), *ON_CPU, "--prompt", "a", "--hidden-size", "64"]
        )


def test_every_weight_is_read_and_used(trained, tmp_path):
    in_a_rank(_check_completeness, trained / "checkpoints" / "iter_0000012", tmp_path)


def _check_completeness(iteration, folder):
    state = read_common_state(iteration)
    tensors = load_tensors(iteration)
    weights = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    save_checkpoint(folder / "whole", "release", weights, state)
    with open_trained_model(folder / "whole", ON_CPU) as model:
        assert model.checkpoint.is_release
    weights["decoder.layers.0.mlp.rooter.weight"] = weights.pop(
        "decoder.layers.0.mlp.router.weight"
    )
    save_checkpoint(folder / "other", "release", weights, state)
    message = (
        r"of another model\. It lacks decoder\.layers\.0\.mlp\.router\.weight\. Not part of the "
        r"model are decoder\.layers\.0\.mlp\.rooter\.weight\."
    )
    with (
        pytest.raises(CheckpointError, match=message),
        open_trained_model(folder / "other", ON_CPU),
    ):
        pass


def test_a_checkpoint_without_arguments_names_what_is_missing(tmp_path):
    save_checkpoint(tmp_path, "release", {"a": torch.zeros(1)}, {"checkpoint_version": 3.0})
    with pytest.raises(CheckpointError, match=r"stores no arguments, .*--num-layers"):
        table.run("generate", ["--load", str(tmp_path), *ON_CPU, "--prompt", "a"])


def test_a_tokenizer_that_moved_is_asked_for(trained, capfd):
    model = trained.parent / "data" / "tokenizer.model"
    moved = model.rename(model.with_name("moved.model"))
    try:
        with pytest.raises(DataError, match=r"not where it was in training: .* --tokenizer-model"):
            table.run("generate", ["--load", str(trained), *ON_CPU, "--prompt", "a"])
        flags = ("--tokenizer-model", str(moved), "--num-tokens", "1")
        assert generate(capfd, trained, "--prompt", "a", *flags).startswith("a")
    finally:
        moved.rename(model)


def test_the_command_ends_with_its_message_and_code_2(capfd):
    assert main(["generate", "--prompt", "a"]) == 2
    assert "megatron-switch: error: There is no model" in capfd.readouterr().err
