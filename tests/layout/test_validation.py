"""Legal layouts are returned; of illegal ones every broken rule is shown, with suggestions."""

import pytest

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_rules import LayoutConstraints
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.validation import validate_layout, virtual_stages

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


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1),
        Sizes(8, ep=8),
        Sizes(8, tp=2, ep=2, etp=1),
        Sizes(64, tp=8, ep=8, etp=1),  # 4 query groups divide TP 8
        Sizes(32, tp=2, pp=4, ep=2, cp=2, vp=3),
        Sizes(8, tp=4, ep=8, etp=1),  # EP is no factor of the dense grid
    ],
)
def test_a_layout_that_fits_is_returned(sizes):
    layout = validate_layout(sizes, LayoutConstraints(**MODEL))
    assert isinstance(layout, Layout)
    assert layout == Layout.of(sizes)


def test_a_dense_model_needs_no_sequence_parallelism():
    sizes = Sizes(8, tp=2, pp=2)
    given = LayoutConstraints(**{**MODEL, "num_experts": None, "sequence_parallel": False})
    assert validate_layout(sizes, given) == Layout.of(sizes)


def test_what_is_not_given_is_not_checked():
    sizes = Sizes(28, tp=7, pp=2, vp=5)
    assert validate_layout(sizes, LayoutConstraints()) == Layout.of(sizes)


def test_a_last_group_of_micro_batches_may_be_smaller_but_not_than_the_stages():
    sizes = Sizes(2, pp=2, vp=2)
    given = LayoutConstraints(micro_batch_size=1, global_batch_size=5, chunk_group=3)
    assert validate_layout(sizes, given) == Layout.of(sizes)


def test_every_broken_rule_is_told_at_once():
    given = LayoutConstraints(**{**MODEL, "sequence_parallel": False, "global_batch_size": 100})
    with pytest.raises(LayoutError) as caught:
        validate_layout(Sizes(16, tp=2, pp=8, etp=1), given)
    rules = str(caught.value).partition("  dense grid:")[0].splitlines()
    assert [rule.split(",")[0].split(" must")[0] for rule in rules] == [
        "With experts and --tensor-model-parallel-size 2 (above 1)",
        "Layers",
    ]


def test_layers_of_a_chunk_become_chunks_of_a_stage():
    assert virtual_stages(24, 4, 2) == 3
    assert virtual_stages(24, 4, 6) == 1


@pytest.mark.parametrize(
    ("num_layers", "pp", "size", "allowed"),
    [(24, 4, 4, r"\[1, 2, 3, 6\]"), (10, 4, 1, "none"), (24, 4, 0, r"\[1, 2, 3, 6\]")],
)
def test_chunks_that_do_not_fit_name_those_that_would(num_layers, pp, size, allowed):
    with pytest.raises(
        LayoutError,
        match=rf"--num-layers is {num_layers}, --pipeline-model-parallel-size {pp} and "
        rf"--num-layers-per-virtual-pipeline-stage {size}\. Chunks .* would work: {allowed}\.",
    ):
        virtual_stages(num_layers, pp, size)


def test_a_suggestion_comes_with_the_flag_that_it_needs():
    sizes = Sizes(world_size=2, tp=3)
    given = LayoutConstraints(num_experts=4, num_attention_heads=4, seq_length=64)
    with pytest.raises(LayoutError, match="--tensor-model-parallel-size 2 --sequence-parallel"):
        validate_layout(sizes, given)


def test_context_parallelism_is_not_suggested_to_those_who_have_none():
    sizes = Sizes(world_size=4, ep=4)
    given = LayoutConstraints(num_experts=8, micro_batch_size=2, global_batch_size=4, seq_length=64)
    with pytest.raises(LayoutError, match="Set --global-batch-size to 8") as error:
        validate_layout(sizes, given)
    assert "--context-parallel-size" not in str(error.value)
