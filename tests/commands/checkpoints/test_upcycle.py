"""The first loss that ``upcycle --text`` reports is what ``transformers`` computes.

The dense model's is compared with that of its export. So is the new model's, where no token is
dropped: in the export, the output of each MLP that became experts is multiplied by the gate of the
new router, which is what top-1 does to equal experts.
"""

import re
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from support import hf_models
from support.tiny_run import run_command, trained

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import checkpoint_folder, find_checkpoint
from megatron_switch.commands.checkpoints.first_loss import FirstLosses
from megatron_switch.testing.checkpoints import load_tensors
from megatron_switch.training.arguments.stored_arguments import (
    model_attributes,
    tokenizer_attributes,
)

E = 4
LENGTH, WINDOWS = 16, 4
REPORT = re.compile(
    r"First loss on (\d+) tokens: (\S+), the dense model's is (\S+)\. Gates change it by (\S+), "
    r"tokens that find their expert full by (\S+)\. "
)
MODEL = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 5 --save-interval 5 --lr 1e-2 --switch-device cpu "
    "--mock-data --eval-iters 0 --tokenizer-type SentencePieceTokenizer"
)


def succeeded(*words: str) -> str:
    outcome = run_command(*words)
    assert outcome.code == 0, outcome.screen + outcome.errors
    return outcome.screen


@pytest.fixture(scope="module")
def text() -> Path:
    return Path(re.__file__)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, text) -> Path:
    prefix = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=200, minloglevel=2
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory, tokenizer) -> Path:
    """A dense model that was trained in a run folder, and its export."""
    folder = tmp_path_factory.mktemp("dense")
    trained(f"{MODEL} --tokenizer-model {tokenizer} --switch-run-dir {folder / 'megatron'}")
    found = find_checkpoint(checkpoint_folder(folder / "megatron"))
    rows = read_common_state(found.folder)["args"].padded_vocab_size
    assert rows > 200  # a run's loss counts the rows of padding, and so must the export's
    succeeded(
        *("convert", "megatron-to-hf", "--megatron", str(folder / "megatron")),
        *("--hf", str(folder / "hf"), "--vocab-size", str(rows)),
    )
    return folder


@pytest.fixture(scope="module")
def drawn_model(tmp_path_factory, tokenizer) -> Path:
    """A dense Llama with random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    hf_models.save(folder / "hf", "llama", vocab_size=200, max_position_embeddings=LENGTH)
    (folder / "hf" / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    return folder


def expected_loss(hf: Path, tokenizer: Path, text: Path, routers: dict[int, torch.Tensor]) -> float:
    """Return the loss of an export whose MLPs in some layers are multiplied by a gate."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    tokens = processor.encode(text.read_text(encoding="utf-8"))[: WINDOWS * (LENGTH + 1)]
    window_BS = torch.tensor(tokens).view(WINDOWS, LENGTH + 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    for layer, weight_ED in routers.items():

        def gated(module, inputs, output, weight_ED=weight_ED):
            probs = torch.softmax(inputs[0].float() @ weight_ED.float().T, dim=-1)
            return output * probs.amax(dim=-1, keepdim=True)

        model.model.layers[layer].mlp.register_forward_hook(gated)
    with torch.no_grad():
        scores = model(window_BS[:, :-1]).logits
    return float(
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), window_BS[:, 1:].flatten())
    )


def reported(screen: str) -> FirstLosses:
    found = REPORT.search(screen)
    assert found is not None, screen
    tokens, sparse, dense, gates, full = found.groups()
    dropless = float(dense) + float(gates)
    assert float(sparse) == pytest.approx(dropless + float(full), abs=2e-4)
    return FirstLosses(float(dense), dropless, float(sparse), int(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["none", "sqrt_e"])
@pytest.mark.parametrize("source", ["--load", "--hf"])
def test_the_first_losses_are_those_of_both_models(
    request, tmp_path, tokenizer, text, source, scale
):
    folder = request.getfixturevalue("trained_model" if source == "--load" else "drawn_model")
    dense = folder / ("megatron" if source == "--load" else "hf")
    router_scale = "100" if scale == "none" else "0"  # gates far from 1/E, or exactly that
    screen = succeeded(
        *("upcycle", source, str(dense), "--save", str(tmp_path / "new"), "--num-experts", str(E)),
        *("--scale", scale, "--router-scale", router_scale, "--text", str(text)),
    )
    losses = reported(screen)
    assert losses.tokens == WINDOWS * LENGTH
    before = expected_loss(folder / "hf", tokenizer, text, {})
    assert losses.dense == pytest.approx(before, abs=1e-4)
    if scale == "sqrt_e":
        assert losses.dropless == pytest.approx(losses.dense, abs=2e-4)
        assert losses.sparse != losses.dropless  # all tokens go to the first expert
        return
    tensors = load_tensors(find_checkpoint(tmp_path / "new").folder)
    routers = {layer: tensors[f"decoder.layers.{layer}.mlp.router.weight"] for layer in (1, 3)}
    after = expected_loss(folder / "hf", tokenizer, text, routers)
    assert abs(after - before) > 1e-3  # or the comparison would say nothing
    assert losses.dropless == pytest.approx(after, abs=2e-4)
    assert "multiplied by its gate, about 1/4 at first" in screen
    assert "WARNING" not in screen


def test_the_report_tells_gates_from_full_experts():
    losses = FirstLosses(dense=2.0, dropless=2.5, sparse=2.25, tokens=8)
    plain, scaled = (losses.explained(scale, E) for scale in ("none", "sqrt_e"))
    for text in (plain, scaled):
        found = REPORT.search(text)
        assert found is not None
        assert found.groups() == ("8", "2.2500", "2.0000", "+0.5000", "-0.2500")
    assert "--scale sqrt_e starts nearer" in plain
    assert "gate of a uniform router exactly" in scaled


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--hf", "--load"])
def test_a_text_of_other_tokens_is_refused(tmp_path, source):
    hf, megatron = str(tmp_path / "hf"), str(tmp_path / "megatron")
    hf_models.save(hf, "t5")
    if source == "--load":
        succeeded("convert", "hf-to-megatron", "--hf", hf, "--megatron", megatron)
    (tmp_path / "text").write_text(" ".join(str(number) for number in range(2000)))
    outcome = run_command(
        *("upcycle", source, hf if source == "--hf" else megatron, "--save", str(tmp_path / "new")),
        *("--num-experts", str(E), "--text", str(tmp_path / "text")),
    )
    assert outcome.code == 2
    rows = 99 if source == "--hf" else 104  # with the padding of Megatron's
    assert f"has a token {rows}, but the embedding has {rows} rows" in " ".join(
        outcome.errors.split()
    )


@pytest.mark.slow
def test_stacks_of_different_depth_have_their_own_patterns(tmp_path):
    hf_models.save(tmp_path / "hf", "t5")  # 4 and 2 layers
    words = ["upcycle", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "new")]
    words += ["--num-experts", str(E), "--moe-layer-freq", "[1,0,0,1]"]
    outcome = run_command(*words)
    assert outcome.code == 2
    assert "name its layers with --switch-decoder-layer-freq" in " ".join(outcome.errors.split())
    succeeded(*words, "--switch-decoder-layer-freq", "[0,1]")
    found = find_checkpoint(tmp_path / "new").folder
    routers = sorted(key for key in load_tensors(found) if key.endswith("router.weight"))
    assert routers == [
        "decoder.layers.1.mlp.router.weight",
        "encoder.layers.0.mlp.router.weight",
        "encoder.layers.3.mlp.router.weight",
    ]
    args = read_common_state(found)["args"]
    assert (args.moe_layer_freq, args.switch_decoder_layer_freq) == ([1, 0, 0, 1], "[0,1]")


@pytest.mark.slow
def test_a_text_that_is_none_or_short_is_refused(tmp_path, drawn_model):
    words = ["upcycle", "--hf", str(drawn_model / "hf"), "--save", str(tmp_path / "new")]
    words += ["--num-experts", str(E), "--text", str(tmp_path / "text")]
    outcome = run_command(*words)
    assert outcome.code == 2
    assert "is no file" in outcome.errors
    assert not (tmp_path / "new").exists()
    (tmp_path / "text").write_text("few")
    outcome = run_command(*words)
    assert outcome.code == 2
    assert re.search(r"has \d tokens, but a\s+window has 17\. The checkpoint", outcome.errors)
    assert find_checkpoint(tmp_path / "new").is_release


@pytest.mark.slow
def test_every_setting_of_the_dense_run_is_kept(tmp_path):
    odd = "--attention-softmax-in-fp32 --hidden-dropout 0.3 --attention-dropout 0.2 --bf16"
    odd += " --rotary-percent 0.5 --max-position-embeddings 64 --make-vocab-size-divisible-by 64"
    model = MODEL.replace("SentencePieceTokenizer", "NullTokenizer --vocab-size 127")
    trained(f"{model} {odd} --save {tmp_path / 'dense'}")
    words = ("--load", str(tmp_path / "dense"), "--save", str(tmp_path / "new"))
    succeeded("upcycle", *words, "--num-experts", str(E))
    before, after = (
        vars(read_common_state(find_checkpoint(tmp_path / name).folder)["args"])
        for name in ("dense", "new")
    )
    names = model_attributes() | tokenizer_attributes() | {"make_vocab_size_divisible_by"}
    different = {name for name in names if before.get(name) != after.get(name)}
    assert different == {"num_experts", "moe_layer_freq", "moe_ffn_hidden_size"}
