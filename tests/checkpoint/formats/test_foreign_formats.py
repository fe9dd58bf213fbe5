"""Formats of other programs are recognised by the names of their files."""

import pytest

from megatron_switch.checkpoint.formats.foreign_formats import (
    DEEPSPEED,
    HUGGING_FACE,
    LEGACY,
    format_by_names,
)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mp_rank_00"], LEGACY),
        (["global_step10", "mp_rank_00"], DEEPSPEED),
        (["config.json", "model-00001-of-00002.safetensors"], HUGGING_FACE),
        (["config.json", "pytorch_model.bin"], HUGGING_FACE),
        (["config.json"], None),
        (["model.safetensors"], None),
        ([], None),
    ],
)
def test_names_of_files_say_the_format(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    assert format_by_names(tmp_path) is expected
