"""What the planner predicts is what a rehearsal needs, within 5 %, in every kind of layout.

The planner is asked about the kernels that a rehearsal has (the CPU's): a GPU's differ in dropout,
in norms and in the optimizer's step, and the planner says by how much. Packed dispatch, which no
rehearsal can have, is watched in a real run of one rank.
"""

import shlex

import pytest
from support.observed_run import observed, rehearsed

from megatron_switch.architecture.model_flags import capacity_of, model_from_flags
from megatron_switch.flags.argv import flags_of_argv
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.memory import predict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DENSE = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --vocab-size 8192 --position-embedding-type "
    "rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --bf16 "
    "--use-distributed-optimizer --tokenizer-type NullTokenizer --mock-data --train-iters 10 "
    "--lr 1e-3 --eval-iters 0 --clip-grad 1e-4 --micro-batch-size 2"
)
SPARSE = f"{DENSE} --num-experts 8"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LAYOUTS = {
    "dense": (DENSE, {"world_size": 4}),
    "dense-tp": (DENSE, {"world_size": 4, "tp": 2}),
    "padded": (SPARSE, {"world_size": 8, "ep": 8}),
    "padded-tp": (SPARSE, {"world_size": 8, "tp": 2, "ep": 4, "etp": 1}),
    "pp-first": (SPARSE, {"world_size": 8, "pp": 2, "ep": 4}),
    "pp-last": (SPARSE, {"world_size": 8, "pp": 2, "ep": 4}),
    "recompute": (f"{SPARSE} {FULL}", {"world_size": 4, "ep": 4}),
    "untied": (f"{SPARSE} --untie-embeddings-and-output-weights", {"world_size": 4, "ep": 2}),
}
FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
MICRO_BATCHES = 4


def flags_of(base, sizes):
    words = [f"{flag} {sizes[axis]}" for axis, flag in FLAGS.items() if axis in sizes]
    words += ["--sequence-parallel"] if sizes.get("tp", 1) > 1 else []
    batch = 2 * MICRO_BATCHES * sizes["world_size"] // (sizes.get("tp", 1) * sizes.get("pp", 1))
    return f"{base} {' '.join(words)} --global-batch-size {batch}"


def predicted(flags, sizes, *, stage=0, dispatch="padded"):
    values = flags_of_argv(shlex.split(flags))
    training = Training(
        seq_length=int(values["seq-length"]),
        micro_batch_size=2,
        global_batch_size=int(values["global-batch-size"]),
        precision="bf16",
        dispatch=dispatch,
        capacity=capacity_of(values),
        sharding="distributed",
        recompute="full" if "recompute-granularity" in values else "none",
        device="cpu",
        rotary=True,
    )
    return predict(model_from_flags(values), Layout(**sizes), training, stage=stage)


def agree(report, memory):
    """The whole within 5 %, and so is what is kept from step to step, part by part."""
    state = report.state_bytes
    for part, bytes_ in (("dense", memory.dense), ("expert", memory.expert)):
        assert state[f"{part} weights"] == bytes_.weights
        for kind, size in (("gradients", bytes_.gradients), ("optimizer", bytes_.optimizer)):
            assert state[f"{part} {kind}"] == pytest.approx(size, rel=0.01, abs=65536)
    assert memory.total == pytest.approx(report.peak, rel=0.05)


@pytest.mark.parametrize("name", LAYOUTS)
def test_prediction_agrees_with_the_rehearsal(name):
    base, sizes = LAYOUTS[name]
    flags = flags_of(base, sizes)
    last = name.endswith("last")
    rank = sizes["world_size"] - 1 if last else 0
    (report,) = rehearsed(flags, world_size=sizes["world_size"], ranks=[rank])
    agree(report, predicted(flags, sizes, stage=int(last)))


def test_prediction_of_packed_tokens_agrees_with_a_real_run():
    """A router that has learned nothing may drop some, so that every expert has room for all."""
    flags = (
        f"{SPARSE} --switch-dispatch packed --moe-expert-capacity-factor 8 --hidden-size 256 "
        "--ffn-hidden-size 1024 --seq-length 256 --max-position-embeddings 256 "
        "--global-batch-size 4"
    )
    (report,) = observed(flags)
    agree(report, predicted(flags, {"world_size": 1}, dispatch="packed"))
