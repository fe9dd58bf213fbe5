"""A run that stops and resumes is the run that did not stop.

In the same layout every bit of weights, moments and metrics is equal, with dropout, jitter
and expert dropout on. In another layout the state that was loaded is equal bit by bit too,
and what is trained from there agrees with the uninterrupted run to 1e-5 in norm, tensor
by tensor, in fp32; bf16 rounds differently in another layout, so there the loaded state is
compared. (Without biases: that of the keys has no gradient, and Adam makes steps of noise.)

The rows cover every pair of (optimizer, precision, change of layout). The distributed
optimizer has several buckets, as every model of a useful size has.
"""

import gc
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.stock_run import train_stock
from support.tiny_run import OF_THE_CLOCK, SPARSE, TINY, read_records, trained

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import TRACKER, find_checkpoint
from megatron_switch.emulation.launch import import_megatron
from megatron_switch.testing.checkpoints import compare_checkpoints, compare_tensors, load_tensors

pytestmark = pytest.mark.slow

SAVED, LAST = 3, 5
TOLERANCE = 1e-5
# Neither the learning rate nor its change may vanish at the last iteration.
COMMON = (
    f"{SPARSE} --train-iters {LAST} --lr-decay-iters 50 --save-interval {SAVED} "
    "--disable-bias-linear --moe-input-jitter-eps 0.01 --switch-expert-dropout 0.1 "
    "--moe-z-loss-coeff 1e-3"
)
# Megatron draws dropout for each rank; ours is drawn for each token.
DROPOUT, NO_DROPOUT = (f"--hidden-dropout {p} --attention-dropout {p}" for p in (0.1, 0))
DISTRIBUTED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 3000"
)
OPTIMIZER = {"plain": "", "distributed": DISTRIBUTED}
PRECISION = {"fp32": "", "bf16": "--bf16"}


class Layout(NamedTuple):
    """Ranks, and the flags that arrange them."""

    ranks: int
    flags: str


EP2 = Layout(2, "--expert-model-parallel-size 2")
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "same": EP2,
    "other EP": Layout(2, ""),
    "other PP": Layout(4, f"{PP2} {EP2.flags}"),
    "other TP": Layout(
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        + EP2.flags,
    ),
    "first stage without experts": Layout(2, f"{PP2} --moe-layer-freq [0,0,0,1]"),
    "last stage without experts": Layout(2, f"{PP2} --moe-layer-freq [0,1,0,0]"),
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_collect():
    """Spare forked runs the garbage collection of what they inherit: half of their time."""
    import_megatron()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Train to the end, saving on the way, once for each kind of run; return its folder."""
    folders: dict[tuple[int, str], Path] = {}

    def run(layout: Layout, flags: str) -> Path:
        key = (layout.ranks, f"{layout.flags} {flags}")
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("uninterrupted") / "run"
            trained(f"{key[1]} --switch-run-dir {folders[key]}", ranks=layout.ranks)
        return folders[key]

    return run


@pytest.mark.parametrize(
    ("optimizer", "precision", "change"),
    [("plain", "fp32", "same"), ("distributed", "bf16", "last stage without experts")],
)
def test_a_run_that_stops_and_resumes(data, uninterrupted, tmp_path, optimizer, precision, change):
    layout = LAYOUTS[change]
    flags = f"{COMMON} {data} {DROPOUT} {OPTIMIZER[optimizer]} {PRECISION[precision]}"
    expected = uninterrupted(layout, flags)
    command = f"{flags} {layout.flags} --switch-run-dir {tmp_path / 'run'}"
    trained(f"{command} --exit-interval {SAVED}", ranks=layout.ranks)
    folder = tmp_path / "run" / "checkpoints"
    assert find_checkpoint(folder).iteration == SAVED
    os.link(folder / TRACKER, tmp_path / "tracker before")
    trained(command, ranks=layout.ranks)

    found = find_checkpoint(folder)
    assert (found.iteration, found.message) == (LAST, None)
    assert compare_checkpoints(iteration(expected, LAST), found.folder) == []
    assert optimizer_record(iteration(expected, LAST)) == optimizer_record(found.folder)
    assert metrics(tmp_path / "run") == metrics(expected)
    # A tracker written in place would have changed under its other name too.
    assert (tmp_path / "tracker before").read_text() == str(SAVED)


@pytest.mark.parametrize(
    ("optimizer", "precision", "change"),
    [
        ("plain", "bf16", "same"),
        ("distributed", "fp32", "same"),
        ("distributed", "bf16", "same"),
        ("plain", "fp32", "last stage without experts"),
        ("plain", "bf16", "first stage without experts"),
        ("plain", "bf16", "last stage without experts"),
        ("distributed", "fp32", "first stage without experts"),
    ],
)
def test_the_same_layout_continues_bit_equal(
    data, uninterrupted, tmp_path, optimizer, precision, change
):
    layout = LAYOUTS[change]
    dropout = NO_DROPOUT if change == "same" else DROPOUT  # one run less: others need it too
    flags = f"{COMMON} {data} {dropout} {OPTIMIZER[optimizer]} {PRECISION[precision]}"
    expected = uninterrupted(layout, flags)
    load = f"--load {expected / 'checkpoints'} --ckpt-step {SAVED} --switch-run-dir {tmp_path}"
    trained(f"{flags} {layout.flags} {load}", ranks=layout.ranks)

    first, second = iteration(expected, LAST), iteration(tmp_path, LAST)
    assert compare_checkpoints(first, second) == []
    assert optimizer_record(first) == optimizer_record(second)
    assert metrics(tmp_path) == metrics(expected)[SAVED:]


@pytest.mark.parametrize("change", ["other EP", "other PP", "other TP"])
@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_another_layout_continues_the_same_run(data, uninterrupted, tmp_path, optimizer, change):
    flags = f"{COMMON} {data} {NO_DROPOUT} {OPTIMIZER[optimizer]}"
    expected = uninterrupted(EP2, flags)
    load = f"--load {expected / 'checkpoints'} --ckpt-step {SAVED}"
    layout = LAYOUTS[change]
    trained(f"{flags} {layout.flags} {load} --switch-run-dir {tmp_path}", ranks=layout.ranks)
    first, second = iteration(expected, LAST), iteration(tmp_path, LAST)
    assert compare_checkpoints(first, second, tolerance=TOLERANCE) == []


@pytest.mark.parametrize("change", ["other EP", "other PP", "other TP"])
@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_another_layout_loads_the_same_state(data, uninterrupted, tmp_path, optimizer, change):
    flags = f"{COMMON} {data} {NO_DROPOUT} {OPTIMIZER[optimizer]} {PRECISION['bf16']}"
    expected = uninterrupted(EP2, flags)
    load = f"--load {expected / 'checkpoints'} --ckpt-step {SAVED}"
    save = f"--save {tmp_path} --ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}"
    layout = LAYOUTS[change]
    trained(f"{flags} {layout.flags} {load} {save}", ranks=layout.ranks)
    first, second = iteration(expected, SAVED), tmp_path / "torch_dist" / f"iter_{SAVED:07d}"
    assert compare_checkpoints(first, second) == []


def iteration(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"iter_{number:07d}"


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return what a run recorded, but for how fast it was."""
    records = read_records(run / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name not in OF_THE_CLOCK}
        for record in records
    ]


def optimizer_record(folder: Path) -> str:
    """Everything of the optimizer that is no tensor, its step among it."""
    return repr(read_common_state(folder).get("optimizer"))


NORM = re.compile(r"pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_")
"""The norm before the experts, by either name; here every layer has experts."""
STOCK_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-layer-freq 1"
)


@pytest.mark.parametrize("engine_names", [True, False], ids=["engine", "plain"])
def test_a_checkpoint_of_stock_megatron_loads(data, tmp_path, engine_names):
    """Its weights and moments arrive bit by bit, whatever the layouts, and it trains on."""
    stock = tmp_path / "stock"
    flags = f"--train-iters 4 --save-interval 4 {OPTIMIZER['distributed']} --save {stock}"
    flags += f" {EP2.flags} --dist-ckpt-optim-fully-reshardable"
    train_stock(2, flags, engine_names=engine_names)
    flags = f"{TINY} {STOCK_MODEL} {data} {OPTIMIZER['distributed']} --load {stock}"
    save = f"--save {tmp_path} --ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}"
    outcome = trained(f"{flags} --save-interval 4 {save}")
    assert outcome.screen.count("written by stock Megatron") == 1
    assert "--switch-min-capacity 4" in outcome.screen
    first, second = stock / "iter_0000004", tmp_path / "torch_dist" / "iter_0000004"
    before, after = (
        {NORM.sub("norm", k): v for k, v in load_tensors(f).items()} for f in (first, second)
    )
    assert compare_tensors(before, after) == []
    outcome = trained(f"{flags} --train-iters 5 --override-opt_param-scheduler")
    assert "iteration        5/       5" in outcome.screen


def test_state_in_bucket_order_resumes_in_its_own_layout(tmp_path):
    """Stock Megatron's default form of the distributed optimizer's state, repaired."""
    flags = f"{EP2.flags} --train-iters {LAST} --lr-decay-iters 50 --save-interval {SAVED}"
    flags += f" {OPTIMIZER['distributed']}"
    train_stock(2, f"{flags} --save {tmp_path / 'whole'}")
    load = f"--load {tmp_path / 'whole'} --ckpt-step {SAVED}"
    train_stock(2, f"{flags} {load} --save {tmp_path / 'resumed'}")
    first, second = (tmp_path / name / f"iter_{LAST:07d}" for name in ("whole", "resumed"))
    assert compare_checkpoints(first, second) == []
