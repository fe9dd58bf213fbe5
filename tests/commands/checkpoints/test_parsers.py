"""What the parsers name without importing the code behind is what that code knows."""

from megatron_switch.checkpoint.convert.architectures import model_types
from megatron_switch.checkpoint.convert.conversion import DTYPES
from megatron_switch.checkpoint.reshard.pipeline_placement import PLACEMENT_FLAGS
from megatron_switch.commands.checkpoints.parsers import (
    DTYPE_NAMES,
    MODEL_TYPES,
    RESHARD_SIZES,
    reshard_parser,
)
from megatron_switch.layout.sizes import FLAGS


def test_types_of_numbers_and_models():
    assert tuple(DTYPES) == DTYPE_NAMES
    assert model_types() == MODEL_TYPES


def test_flags_of_the_layout():
    assert all(FLAGS[name] == f"--{flag}" for flag, name in RESHARD_SIZES.items())
    options = ["--load", "a", "--save", "b"]
    for flag in PLACEMENT_FLAGS.values():
        options += [flag, "1"]
    own = reshard_parser().parse_args(options)
    assert [str(getattr(own, name)) for name in PLACEMENT_FLAGS] == ["1"] * len(PLACEMENT_FLAGS)
