"""Layers go to the stages that Megatron's flags name, or the flag is named that is wrong."""

from argparse import Namespace

import pytest

from megatron_switch.checkpoint.reshard.pipeline_placement import Placement
from megatron_switch.errors import LayoutError


@pytest.mark.parametrize(
    ("placement", "layers", "pp", "stages"),
    [
        (Placement(), 4, 2, (0, 0, 1, 1)),
        (Placement(), 3, 1, (0, 0, 0)),
        (Placement(first=1), 3, 2, (0, 1, 1)),
        (Placement(last=1), 5, 3, (0, 0, 1, 1, 2)),
        (Placement(first=1, last=2), 7, 4, (0, 1, 1, 2, 2, 3, 3)),
        (Placement(first=1, last=2), 3, 2, (0, 1, 1)),
        (Placement(layout="Et|ttL"), 3, 2, (0, 1, 1)),
        (Placement(layout="E|t*3|L"), 3, 3, (1, 1, 1)),
        (Placement(layout="Et|t|tt|tL"), 5, 2, (0, 1, 0, 0, 1)),  # two chunks on each stage
    ],
)
def test_each_layer_has_its_stage(placement, layers, pp, stages):
    assert placement.stages(layers, pp) == stages


@pytest.mark.parametrize(
    ("placement", "layers", "pp", "message"),
    [
        (
            Placement(),
            3,
            2,
            r"3 layers .* 2 pipeline stages\. .*--decoder-first-pipeline-num-",
        ),
        (
            Placement(first=2),
            5,
            3,
            r"3 layers cannot .* 2 .* beside --decoder-first-.* 2\.",
        ),
        (
            Placement(first=1, last=1),
            3,
            2,
            r"3 layers .* 2 pipeline .* got --dec.* 1 and --dec.* 1\.",
        ),
        (
            Placement(first=9),
            3,
            2,
            r"The 3 layers .* got --decoder-first-pipeline-num-layers 9",
        ),
        (
            Placement(last=1),
            3,
            1,
            r"One .* got --decoder-last-.* 1\. .* --pipeline-model-parallel-s",
        ),
        (
            Placement(layout="Et|tL"),
            3,
            2,
            r"--pipeline-model-parallel-layout Et\|tL .* place 3",
        ),
        (
            Placement(layout="Ett|tx"),
            3,
            2,
            r"Invalid layer character: x .* Write E for the",
        ),
        (Placement(layout="Et|ttL"), 3, 4, r"does not place 3 layers on 4 stages"),
        (
            Placement(first=3),
            3,
            2,
            r"3 layers .* at least one onto each, got --decoder-f.* 3\.",
        ),
        (
            Placement(first=1, last=2),
            3,
            3,
            r"3 layers .* 3 pipeline .* got --dec.* 1 and --dec",
        ),
        (
            Placement(layout="Et|ttL"),
            3,
            1,
            r"makes 2 chunks of one pipeline stage, .* Set --pip",
        ),
        (
            Placement(first=1, layout="Et|ttL"),
            3,
            2,
            r"leave out --decoder-first-pipeline-num-",
        ),
    ],
)
def test_what_does_not_go_onto_the_stages_names_its_flag(placement, layers, pp, message):
    with pytest.raises(LayoutError, match=message):
        placement.stages(layers, pp)


def test_arguments_say_one_placement_and_no_other():
    args = Namespace(
        decoder_first_pipeline_num_layers=1,
        num_virtual_stages_per_pipeline_rank=2,
        account_for_loss_in_pipeline_split=True,
    )
    assert Placement.of(args) == Placement(first=1)
    Placement(layout="Et|ttL").write_to(args)
    assert Placement.of(args) == Placement(layout="Et|ttL")
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.account_for_loss_in_pipeline_split is False
