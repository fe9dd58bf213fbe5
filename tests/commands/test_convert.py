"""What the flags of convert offer is what the converter has."""

from megatron_switch.checkpoint.convert.architectures import model_types
from megatron_switch.checkpoint.convert.conversion import DTYPES
from megatron_switch.commands.convert import DTYPE_NAMES, MODEL_TYPES


def test_types_of_numbers_and_models_are_the_converters():
    assert tuple(DTYPES) == DTYPE_NAMES
    assert model_types() == MODEL_TYPES
