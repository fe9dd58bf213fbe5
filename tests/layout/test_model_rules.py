"""Each rule refuses what breaks it, says why, and accepts its own suggestions."""

import re

import pytest

from megatron_switch.errors import LayoutError
from megatron_switch.layout.model_rules import LayoutConstraints
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.validation import validate_layout

MODEL = {
    "num_experts": 64,
    "num_layers": 12,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "ffn_hidden_size": 1024,
    "moe_ffn_hidden_size": 1024,
    "padded_vocab_size": 51200,
    "seq_length": 1024,
    "sequence_parallel": True,
    "micro_batch_size": 4,
    "global_batch_size": 512,
}


BROKEN = {
    "world size": (Sizes(12, ep=8), {}, [r"12 ranks cannot form the expert grid"]),
    "EP above the world": (Sizes(8, ep=16), {}, [r"expert grid: it needs at least .* 16 ranks"]),
    "experts over EP": (
        Sizes(24, ep=12),
        {"global_batch_size": 480},
        [
            r"64 experts cannot be shared evenly by 12 expert-parallel ranks \(4 would be left",
            r"--expert-model-parallel-size must be one of \[1, 2, 4, 8, 16, 32, 64\]",
            r"--expert-model-parallel-size 8  \(DP 24, EDP 3\)",
        ],
    ),
    "EP without experts": (
        Sizes(8, ep=2),
        {"num_experts": None},
        [r"--expert-model-parallel-size 2 spreads .* the model has none", r"Set --num-experts"],
    ),
    "sequence parallel": (
        Sizes(8, tp=2, ep=2),
        {"sequence_parallel": False},
        [
            r"With experts and --tensor-model-parallel-size 2 .* sequence parallelism is required",
            r"Add --sequence-parallel\.",
            r"--tensor-model-parallel-size 1",
        ],
    ),
    "expert bias over ETP": (
        Sizes(8, tp=2),
        {"add_bias_linear": True},
        [
            r"Experts with a bias .* --expert-tensor-parallel-size is 2 \(which is "
            r"--tensor-model-parallel-size unless given\)",
            r"--disable-bias-linear, or set --expert-tensor-parallel-size 1",
            r"\n  --expert-tensor-parallel-size 1  \(DP 4, EDP 8\)",
        ],
    ),
    "expert width over ETP": (
        Sizes(9, etp=3),
        {"global_batch_size": None},
        [
            r"--moe-ffn-hidden-size is 1024 and --expert-tensor-parallel-size is 3 \(as given\)",
            r"multiple of 3, or set --expert-tensor-parallel-size 1",
        ],
    ),
    "heads over TP": (
        Sizes(8, tp=4, etp=1),
        {"num_attention_heads": 6, "num_query_groups": None},
        [
            r"--num-attention-heads is 6 and --tensor-model-parallel-size is 4",
            r"one of \[1, 2, 3, 6\] as --tensor-model-parallel-size",
            r"\n  --tensor-model-parallel-size 2",
        ],
    ),
    "query groups over TP": (
        Sizes(8, tp=4, etp=1),
        {"num_attention_heads": 24, "num_query_groups": 6},
        [r"--num-query-groups is 6 and --tensor-model-parallel-size is 4", r"\[1, 2, 3, 6\]"],
    ),
    "dense width over TP": (
        Sizes(8, tp=4, etp=1),
        {"ffn_hidden_size": 1022},
        [r"--ffn-hidden-size is 1022 and --tensor-model-parallel-size is 4", r"multiple of 4"],
    ),
    "vocabulary over TP": (
        Sizes(8, tp=4, etp=1),
        {"padded_vocab_size": 50258},
        [
            r"it has 50258 rows and --tensor-model-parallel-size is 4",
            r"--make-vocab-size-divisible-by to a multiple of 4",
        ],
    ),
    "layers over PP": (
        Sizes(8, pp=8),
        {},
        [
            r"--num-layers is 12 and there are 8 stages x 1 chunks = 8",
            r"--num-layers to 8 or 16, or place layers unevenly",
            r"\n  --pipeline-model-parallel-size 4",
        ],
    ),
    "layers over PP x VP": (
        Sizes(8, pp=4, vp=2),
        {},
        [
            r"4 stages x 2 chunks = 8",
            r"\n  --num-virtual-stages-per-pipeline-rank 3  \(DP 2, EDP 2\)",
        ],
    ),
    "VP without overlap": (
        Sizes(8, pp=2, vp=2),
        {"overlap_p2p": False},
        [r"more than two stages, but --pipeline-model-parallel-size is 2", r"Omit --no-overlap"],
    ),
    "sequence over TP x CP": (
        Sizes(8, tp=4, cp=2, etp=1),
        {"seq_length": 1020},
        [r"--seq-length is 1020 and TP x CP is 8", r"--seq-length to 1016 or 1024"],
    ),
    "sequence over CP": (
        Sizes(8, cp=8),
        {"seq_length": 6, "sequence_parallel": False},
        [r"--seq-length is 6 and CP is 8", r"--seq-length to 8\."],
    ),
    "sequence over 2 x CP": (
        Sizes(8, cp=4),
        {"seq_length": 1020},
        [r"--seq-length is 1020 and 2 x CP is 8", r"--seq-length to 1016 or 1024"],
    ),
    "stages of a T5": (
        Sizes(8, pp=2),
        {"one_stage": True},
        [r"on one pipeline stage, but --pipeline-model-parallel-size is 2\. Set --pipe.* 1\."],
    ),
    "context parallelism of plain attention": (
        Sizes(8, cp=2),
        {"whole_sequences": True},
        [
            r"needs Transformer Engine's attention, .*, but --context-parallel-size is 2\.",
            r"Use --transformer-impl transformer_engine, or set --context-parallel-size 1\.",
        ],
    ),
    "batch over DP": (
        Sizes(8),
        {"global_batch_size": 100},
        [
            r"--global-batch-size is 100 and micro-batch x DP is 4 x 8 = 32",
            r"--global-batch-size to 96 or 128, or change --micro-batch-size",
        ],
    ),
    "VP without enough micro-batches": (
        Sizes(8, pp=4, vp=3),
        {"global_batch_size": 8},
        [r"makes 1 micro-batches and --pipeline-model-parallel-size is 4", r"to 32 or more"],
    ),
    "VP with micro-batches left over": (
        Sizes(8, pp=4, vp=3),
        {"global_batch_size": 8 * 9},
        [
            r"take 4 micro-batches at a time .*, --pipeline-model-parallel-size unless given",
            r"at least as many as the 4 stages, but --global-batch-size 72 makes 9 micro-batches: "
            r"1 would be left over\.",
            r"--global-batch-size to 64 or 96",
        ],
    ),
    "VP with a group of micro-batches below PP": (
        Sizes(8, pp=4, vp=3),
        {"global_batch_size": 8 * 12, "chunk_group": 3},
        [r"at most all, but --microbatch-group-size-.* is 3, .*-size 4 and .* 12 micro", r"Omit"],
    ),
    "VP with a group of more micro-batches than there are": (
        Sizes(8, pp=4, vp=3),
        {"global_batch_size": 8 * 12, "chunk_group": 13},
        [r"-stage is 13, ", r"Omit --microbatch-group-size-per-virtual-pipeline-stage\."],
    ),
    "capacity over EP": (
        Sizes(8, tp=4, ep=2, etp=1),
        {"capacity_group": "ep"},
        [
            r"ETP x EP is 1 x 2 and TP x CP is 4 x 1",
            r"--switch-capacity-group microbatch",
            r"\n  --expert-model-parallel-size 4",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_says_what_is_wrong_and_what_to_set(name):
    sizes, changes, patterns = BROKEN[name]
    with pytest.raises(LayoutError) as caught:
        validate_layout(sizes, LayoutConstraints(**{**MODEL, **changes}))
    text = str(caught.value)
    for pattern in [r"dense grid:  TP", r"expert grid: ETP", *patterns]:
        assert re.search(pattern, text), f"{pattern}\nis not in\n{text}"


@pytest.mark.parametrize("name", BROKEN)
def test_suggestions_satisfy_every_rule_and_not_only_the_broken_one(name):
    sizes, changes, _ = BROKEN[name]
    given = LayoutConstraints(**{**MODEL, **changes})
    with pytest.raises(LayoutError) as caught:
        validate_layout(sizes, given)
    flags = {
        "--tensor-model-parallel-size": "tp",
        "--context-parallel-size": "cp",
        "--pipeline-model-parallel-size": "pp",
        "--expert-model-parallel-size": "ep",
        "--expert-tensor-parallel-size": "etp",
        "--num-virtual-stages-per-pipeline-rank": "vp",
    }
    for line in str(caught.value).partition("Nearest legal settings:")[2].splitlines():
        named = {flags[flag]: int(size) for flag, size in re.findall(r"(--\S+) (\d+)", line)}
        ranks = re.search(r"(\d+) ranks instead of", line)
        if ranks:
            named["world_size"] = int(ranks[1])
        if named:
            validate_layout(sizes.changed(**named), given)
