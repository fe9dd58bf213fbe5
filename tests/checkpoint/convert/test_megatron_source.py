"""Arguments of a checkpoint are taken as they are, or refused by name, whatever they hold."""

from argparse import Namespace

import pytest
from support import hf_models
from support.converted import imported

from megatron_switch.checkpoint.convert import megatron_source
from megatron_switch.checkpoint.convert.architectures import describe_export
from megatron_switch.checkpoint.convert.megatron_source import open_weights, stored_args
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.errors import CheckpointError, SwitchError

VALUES = [None, True, 0, -1, 10**30, 0.5, float("nan"), "", "x", [], [1], {}, b"x"]
FAMILIES = ("llama", "qwen2_moe", "switch_transformers")


class _Spy(Namespace):
    """Remembers which of its attributes are read."""

    def __getattribute__(self, name):
        if not name.startswith("_"):
            super().__getattribute__("__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


@pytest.fixture(scope="module", params=FAMILIES)
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hf_models.save(folder / "hf", request.param)
    return find_checkpoint(imported(folder / "hf", folder / "megatron"))


def exported(found, args):
    """Plan an export as far as it depends on arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_source, "read_common_state", lambda folder: {"args": args})
        args = stored_args(found)
    source, others, _ = open_weights(found, args)
    model = describe_export(args, wanted="auto", vocab_size=None)
    model.name_map.check_megatron(source, others)
    return model.config("float32")


def test_no_stored_value_ends_in_a_traceback(found):
    args = _Spy(**vars(stored_args(found)))
    expected = exported(found, args)
    values = {name: value for name, value in vars(args).items() if name != "_read"}
    for name in vars(args)["_read"] & values.keys():
        for value in VALUES:
            try:
                exported(found, Namespace(**{**values, name: value}))
            except SwitchError:
                continue
        rest = {key: value for key, value in values.items() if key != name}
        try:
            exported(found, Namespace(**rest))
        except SwitchError:
            continue
    assert exported(found, Namespace(**values)) == expected


@pytest.mark.parametrize("name", ["num_layers", "num_experts"])
def test_numbers_that_the_tensors_have_no_room_for_are_answered_at_once(found, name):
    args = Namespace(**{**vars(stored_args(found)), name: 10**9})
    with pytest.raises(CheckpointError, match=r"need more than the [\d,]+ numbers that its"):
        exported(found, args)
