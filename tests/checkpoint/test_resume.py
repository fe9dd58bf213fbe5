"""A run that stops and resumes is the run that did not stop.

In the same layout every bit of weights, moments and step is equal, with dropout on. In
another layout the state that was loaded is equal bit by bit as well, and what is trained
from there on agrees with the uninterrupted run to 1e-5 in norm, tensor by tensor, in
fp32; bf16 rounds differently in another layout, so there the loaded state is compared.

The rows cover every pair of (optimizer, precision, change of layout).
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoint import stock_resume

from megatron_switch.checkpoint.contents import read_common_state
from megatron_switch.checkpoint.files import TRACKER, find_checkpoint
from megatron_switch.testing.checkpoints import compare_checkpoints

SAVED, LAST = 3, 5
TOLERANCE = 1e-5
# Neither the learning rate nor its change may vanish at the last iteration.
COMMON = f"--train-iters {LAST} --lr-decay-iters 50 --save-interval {SAVED}"
OPTIMIZER = {
    "plain": "",
    "distributed": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    "buckets": "--use-distributed-optimizer",  # state in the order of one layout's buffers
}
PRECISION = {"fp32": "", "bf16": "--bf16"}


@dataclass(frozen=True)
class Layout:
    """Ranks, and the flags that arrange them."""

    ranks: int
    flags: str


EP2 = Layout(2, "--expert-model-parallel-size 2")
LAYOUTS = {
    "same": EP2,
    "other EP": Layout(2, ""),
    "other PP": Layout(4, f"--pipeline-model-parallel-size 2 {EP2.flags}"),
    "other TP": Layout(
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        f"{EP2.flags}",
    ),
    "first stage without experts": Layout(
        2, "--pipeline-model-parallel-size 2 --moe-layer-freq [0,1]"
    ),
    "last stage without experts": Layout(
        2, "--pipeline-model-parallel-size 2 --moe-layer-freq [1,0]"
    ),
}
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the folder of a run to the end, which also saved on its way; one run for each kind."""
    folders: dict[tuple[int, str], Path] = {}

    def run(layout: Layout, flags: str) -> Path:
        key = (layout.ranks, f"{layout.flags} {flags}")
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("uninterrupted")
            stock_resume.train(layout.ranks, f"{key[1]} --save {folders[key]}")
        return folders[key]

    return run


@pytest.mark.parametrize(
    ("optimizer", "precision", "change"),
    [
        ("plain", "fp32", "same"),
        ("distributed", "bf16", "same"),
        ("buckets", "fp32", "same"),
        ("plain", "bf16", "first stage without experts"),
        ("plain", "bf16", "last stage without experts"),
        ("distributed", "fp32", "first stage without experts"),
        ("buckets", "bf16", "first stage without experts"),
    ],
)
def test_the_same_layout_resumes_bit_equal(uninterrupted, tmp_path, optimizer, precision, change):
    layout = LAYOUTS[change]
    flags = f"{COMMON} {OPTIMIZER[optimizer]} {PRECISION[precision]} {DROPOUT}"
    expected = uninterrupted(layout, flags)
    command = f"{layout.flags} {flags} --save {tmp_path}"
    stock_resume.train(layout.ranks, f"{command} --exit-interval {SAVED}")
    assert find_checkpoint(tmp_path).iteration == SAVED
    os.link(tmp_path / TRACKER, tmp_path / "tracker before")
    stock_resume.train(layout.ranks, f"{command} --load {tmp_path}")

    found = find_checkpoint(tmp_path)
    assert (found.iteration, found.message) == (LAST, None)
    assert compare_checkpoints(iteration(expected, LAST), found.folder) == []
    assert optimizer_record(iteration(expected, LAST)) == optimizer_record(found.folder)
    # A tracker written in place would have changed under its other name too.
    assert (tmp_path / "tracker before").read_text() == str(SAVED)


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [("distributed", "other EP"), ("plain", "other PP"), ("plain", "other TP")],
)
def test_another_layout_continues_the_same_run(uninterrupted, tmp_path, optimizer, change):
    flags = f"{COMMON} {OPTIMIZER[optimizer]}"
    expected = uninterrupted(EP2, flags)
    load = f"--load {expected} --ckpt-step {SAVED} --save {tmp_path}"
    stock_resume.train(LAYOUTS[change].ranks, f"{LAYOUTS[change].flags} {flags} {load}")
    first, second = iteration(expected, LAST), iteration(tmp_path, LAST)
    assert compare_checkpoints(first, second, tolerance=TOLERANCE) == []


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [("plain", "other EP"), ("distributed", "other PP"), ("distributed", "other TP")],
)
def test_another_layout_loads_the_same_state(uninterrupted, tmp_path, optimizer, change):
    flags = f"{COMMON} {OPTIMIZER[optimizer]} {PRECISION['bf16']}"
    expected = uninterrupted(EP2, flags)
    load = f"--load {expected} --ckpt-step {SAVED}"
    save = f"--save {tmp_path} --ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}"
    stock_resume.train(LAYOUTS[change].ranks, f"{LAYOUTS[change].flags} {flags} {load} {save}")
    first, second = iteration(expected, SAVED), iteration(tmp_path / "torch_dist", SAVED)
    assert compare_checkpoints(first, second) == []


def iteration(folder: Path, number: int) -> Path:
    return folder / f"iter_{number:07d}"


def optimizer_record(folder: Path) -> str:
    """Everything of the optimizer that is no tensor, the step among it."""
    return repr(read_common_state(folder).get("optimizer"))
