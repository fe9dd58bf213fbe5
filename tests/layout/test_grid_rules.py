"""Each rule of the two grids names the values that break it."""

import re

import pytest

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout


def message(*args, **sizes):
    """Return the text of the error that making this layout raises."""
    with pytest.raises(LayoutError) as caught:
        Layout(*args, **sizes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "sizes", "pattern"),
    [
        (
            8,
            {"tp": 3},
            r"8 ranks cannot form the dense grid: TP x CP x PP = 3 x 1 x 1 = 3 does not",
        ),
        (
            8,
            {"tp": 4, "cp": 4},
            r"dense grid: it needs at least TP x CP x PP = 4 x 4 x 1 = 16 ranks",
        ),
        (8, {"ep": 16}, r"expert grid: it needs at least ETP x EP x PP = 1 x 16 x 1 = 16 ranks"),
        (8, {"pp": 2, "ep": 8}, r"at least ETP x EP x PP = 1 x 8 x 2 = 16 ranks"),
        (24, {"tp": 2, "ep": 8, "etp": 2}, r"ETP x EP x PP = 2 x 8 x 1 = 16 does not divide 24"),
        (8, {"tp": 0}, r"at least 1, but --tensor-model-parallel-size is 0"),
        (8, {"ep": -1}, r"at least 1, but --expert-model-parallel-size is -1"),
        (0, {}, r"at least 1, but the number of ranks is 0"),
        (8, {"order": "tp-pp-dp"}, r"each of tp, cp, ep, dp and pp once, but is 'tp-pp-dp'"),
        (8, {"order": "tp-pp-dp"}, r"Use 'tp-cp-ep-dp-pp', or .*--use-tp-pp-dp-mapping"),
        (8, {"vp": 2}, r"--num-virtual-stages-per-pipeline-rank 2\) need more than one pipeline"),
        (
            16,
            {"tp": 4, "pp": 2, "ep": 2, "order": "tp-cp-ep-pp-dp"},
            r"--use-tp-pp-dp-mapping\) and 2 .* TP x CP = 4 and ETP x EP = 8\.",
        ),
    ],
)
def test_each_rule_names_its_values(world_size, sizes, pattern):
    assert re.search(pattern, message(world_size, **sizes), re.DOTALL)
