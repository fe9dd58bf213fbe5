"""The start-up text holds the values in force, whatever set them."""

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.logs.banner import banner
from megatron_switch.training.loop.global_state import validate
from megatron_switch.training.loop.gpt_builder import resolve_dispatch
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.utils.units import count_text


@pytest.fixture
def text_of(monkeypatch):
    """Return the start-up text of a parsed command line on a number of ranks."""

    def text(line, ranks=1, ranks_per_node=8):
        args = line.args
        args.world_size = ranks
        set_here = fill_defaults(line, "cpu")
        switch = resolve_dispatch(args, SwitchConfig.from_args(args), "cpu")
        layout = check_layout(args, switch)
        validate(args)
        args.padded_vocab_size = 1024
        return banner(
            args,
            switch,
            layout,
            device="cpu",
            ranks_per_node=ranks_per_node,
            set_here=set_here,
            log_text="run/log: all output",
        )

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as validate() may set it
    return text


def line_of(text, label):
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return line.removeprefix(label).strip()


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("model", ["4 layers", "sparse 2, 4", "dense 1, 3", "width 32", "4 experts"]),
        ("routing", ["recipe switch", "1.25 training", "2.0 evaluation", "floor", "at least 4"]),
        ("routing", ["microbatch", "first come", "packed dispatch"]),
        ("losses", ["balancing x 0.01", "z-loss x 0.0", "jitter 0.0", "expert dropout 0.0"]),
        ("precision", ["dense layers fp32", "router fp32", "gradients summed in fp32"]),
        ("device", ["cpu", "1 rank", "plain torch"]),
        ("set to suit", ["--distributed-backend gloo", "--num-workers 0"]),
        ("log", ["run/log: all output"]),
    ],
)
def test_a_line_shows_the_values_in_force(text_of, sparse_line, label, values):
    line = line_of(text_of(sparse_line()), label)
    assert [value for value in values if value not in line] == [], line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--switch-recipe hf", "recipe hf; capacity 64 slots an expert, counted over each seq"),
        ("--switch-recipe hf", "load balancing x 0.001, router z-loss x 0.001"),
        ("--switch-recipe hf", "jitter 0.01"),
        ("--switch-recipe hf --moe-z-loss-coeff 0.5", "router z-loss x 0.5"),
        ("--switch-recipe flaxformer", "2.0 evaluation, round, at least 4"),
        ("--switch-recipe megatron", "factor none (dropless) training, none (dropless) evaluation"),
        ("--switch-recipe megatron", "probability; packed dispatch"),
        ("--switch-capacity 12", "capacity 12 slots an expert"),
        ("--switch-dispatch padded", "padded dispatch"),
        ("--moe-pad-expert-input-to-capacity", "padded dispatch"),
        ("--switch-expert-dropout 0.2", "expert dropout 0.2"),
        ("--bf16", "experts and dense layers bf16, router fp32, gradients summed in fp32"),
        ("--fp16 --grad-reduce-in-bf16", "layers fp16, router fp32, gradients summed in fp16"),
        ("--moe-layer-freq 1", "sparse 1, 2, 3, 4; dense none"),
        ("--moe-layer-freq 2", "sparse 1, 3; dense 2, 4"),
        ("--num-layers 24", "sparse 2, 4, ..., 24; dense 1, 3, ..., 23"),
    ],
)
def test_a_setting_is_shown(text_of, sparse_line, flags, words):
    assert words in text_of(sparse_line(flags))


def test_a_dense_model_has_no_routing(text_of, dense_line):
    text = text_of(dense_line())
    assert "all 4 dense" in line_of(text, "model")
    assert "experts" not in line_of(text, "model") + line_of(text, "precision")
    assert "routing" not in text
    assert "No experts: every layer is dense." in text


def test_parameters_in_all_active_and_on_a_rank(text_of, sparse_line):
    # 1024 rows of 32, 16 positions, the final norm; per layer attention with bias and two norms.
    embedding, norm = 1024 * 32 + 16 * 32, 2 * 32
    attention = 4 * 32 * 32 + 4 * 32 + 2 * norm
    dense_mlp, expert, router = 2 * 32 * 128 + 128 + 32, 2 * 32 * 128, 4 * 32
    total = embedding + norm + 4 * attention + 2 * dense_mlp + 2 * (4 * expert + router)
    active = total - 2 * 3 * expert
    text = text_of(sparse_line())
    shown = f"{count_text(total)} in all, {count_text(active)} active for a token, "
    assert line_of(text, "parameters") == f"{shown}{count_text(total)} on a rank"
    spread = text_of(sparse_line("--expert-model-parallel-size 4"), ranks=4)
    assert line_of(spread, "parameters") == f"{shown}{count_text(active)} on a rank"


def test_stages_that_differ_are_a_range_and_uneven_ones_are_left_to_megatron(text_of, sparse_line):
    flags = "--pipeline-model-parallel-size 2"
    pattern = f"{flags} --moe-layer-freq [0,0,1,1]"
    text = line_of(text_of(sparse_line(pattern), ranks=2), "parameters")
    least, most = text.split(", ")[-1].removesuffix(" on a rank").split(" to ")
    assert float(least[:-1]) < float(most[:-1])
    uneven = f"{flags} --decoder-first-pipeline-num-layers 1"
    text = text_of(sparse_line(uneven), ranks=2)
    assert line_of(text, "parameters").endswith("active for a token")


def test_the_table_counts_nodes_by_ranks_of_this_host(text_of, sparse_line):
    text = text_of(sparse_line("--expert-model-parallel-size 4"), ranks=4, ranks_per_node=2)
    rows = [row.split() for row in text.splitlines() if row.strip()[:1].isdigit()]
    assert [row[1] for row in rows[:4]] == ["0", "0", "1", "1"]
    assert "4 experts over EP 4, 1 on a rank" in text


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("", "modules of Transformer Engine"),
        (
            "--switch-expert-dropout 0.1",
            "modules of Transformer Engine, experts of plain torch (--switch-expert-dropout)",
        ),
        ("--switch-expert-dropout 0.1 --transformer-impl local",
         "modules of plain torch (no Transformer Engine)"),
    ],
)  # fmt: skip
def test_whose_modules_compute_is_shown(sparse_line, flags, modules):
    args = sparse_line(flags).args
    args.world_size, args.padded_vocab_size = 4, 1024
    switch = SwitchConfig.from_args(args)
    args.moe_layer_freq = [0, 1, 0, 1]
    text = banner(
        args,
        switch,
        check_layout(args, switch),
        device="cuda",
        ranks_per_node=8,
        set_here=(),
        log_text="log",
    )
    assert line_of(text, "device") == f"cuda, 4 ranks, {modules}"
