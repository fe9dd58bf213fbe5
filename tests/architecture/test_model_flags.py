"""Models as flags: named models, files of flags, and the flags of a command line."""

import pytest

from megatron_switch.architecture.model_flags import (
    capacity_of,
    model_names,
    read_model,
)
from megatron_switch.errors import ConfigError


def test_every_named_model_is_listed():
    assert {"switch-base-128", "switch-large-128", "switch-xxl-128", "switch-c-2048"} < set(
        model_names()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"switch-capacity-group": "rank"}, r"--switch-capacity-group is .* got rank"),
        ({"switch-capacity-rounding": "up"}, r"--switch-capacity-rounding is .* got up"),
        (
            {"moe-expert-capacity-factor": "x"},
            r"--moe-expert-capacity-factor takes a finite number",
        ),
    ],
)
def test_what_cannot_be_a_capacity(flags, message):
    with pytest.raises(ConfigError, match=message):
        capacity_of(flags)


def test_an_unknown_model_lists_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"--model .* gpt-9 is neither\. Models are gpt-1\.6t"):
        read_model("gpt-9")
    path = tmp_path / "model.json"
    path.write_text('{\n  "num-layers": \n}')
    with pytest.raises(ConfigError, match=r"model file .* is not JSON: line 3"):
        read_model(str(path))
