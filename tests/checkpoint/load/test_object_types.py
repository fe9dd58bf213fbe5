"""Objects of a checkpoint are read only if they are plain data; nothing of others is executed."""

import argparse
import io

import numpy
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_switch.checkpoint.load.object_types import check_types
from megatron_switch.errors import CheckpointError
from megatron_switch.upstream.repairs import repaired_megatron


class RunsCode:
    def __reduce__(self):
        return (print, ("this ran",))


def stored(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_plain_data_pass_and_can_be_read_afterwards():
    state = numpy.random.RandomState(1).get_state()
    value = {"random": (3, (1, 2), None), "numpy": state, "torch": [torch.ones(2)]}
    stream = stored([value, argparse.Namespace(a=1), io.BytesIO(b"layer")])
    check_types(stream, "rng_state")
    assert torch.load(stream, weights_only=False)[0]["random"] == (3, (1, 2), None)


@pytest.mark.parametrize("value", [RunsCode(), {"inside": [RunsCode()]}], ids=["alone", "inside"])
def test_code_is_named_and_not_run(value, capsys):
    message = r"rng_state of the checkpoint .*names .*print.*who wrote it; --no-load-rng"
    with pytest.raises(CheckpointError, match=message):
        check_types(stored(value), "rng_state")
    assert capsys.readouterr().out == ""


def test_torchs_loader_refuses_it_in_a_run(capsys):
    class Item:
        class dest_index:
            fqn = "rng_state"

    with repaired_megatron(), pytest.raises(CheckpointError, match="rng_state"):
        DefaultLoadPlanner().load_bytes(Item, stored(RunsCode()))
    assert capsys.readouterr().out == ""
