"""Predicted memory equals what a real step of the real program has alive, to a few per cent."""

import os
from dataclasses import replace
from pathlib import Path

import megatron.training.training as megatron_training
import pytest
import torch.distributed as dist
from bench.memory import LiveBytes
from support.planned_model import MODEL, TRAINING
from support.tiny_run import trained

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.memory import predict

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8 "
    "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --vocab-size 1023 --tokenizer-type NullTokenizer --mock-data "
    "--train-iters 2 --lr 1e-3 --switch-device cpu --eval-iters 0 --num-experts 8"
)
CASES = {
    "dense": ("", {"num_experts": 0, "decoder": Stack(2)}, {}),
    "padded, bf16": ("--switch-dispatch padded --bf16", {}, {"precision": "bf16"}),
    "packed, gated": (
        "--switch-dispatch packed --swiglu",
        {"gated_linear_unit": True},
        {"dispatch": "packed"},
    ),
    "experts recomputed": (
        "--switch-dispatch padded --recompute-granularity selective --recompute-modules moe",
        {},
        {"recompute": "selective", "recompute_modules": ("moe",)},
    ),
    "all recomputed": (
        "--switch-dispatch padded --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        {},
        {"recompute": "full"},
    ),
    "RMSNorm, dropout": (
        "--switch-dispatch padded --normalization RMSNorm --hidden-dropout 0.1",
        {"normalization": "RMSNorm"},
        {"hidden_dropout": 0.1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_real_step_has_as_much_alive_as_predicted(name, tmp_path):
    words, model, training = CASES[name]
    flags = FLAGS.replace(" --num-experts 8", "") if model.get("num_experts") == 0 else FLAGS
    record = tmp_path / "peak"
    trained(f"{flags} {words}", prepare=lambda: _measure_steps(record))
    measured = int(Path(f"{record}0").read_text())
    memory = predict(replace(MODEL, **model), Layout(1), Training(**(TRAINING | training)))
    assert memory.total == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_every_rank_of_a_cut_model_has_as_much_alive_as_predicted(tmp_path):
    # Tensor, sequence and expert parallelism at once, experts whole, on two pipeline stages.
    words = (
        "--num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer --switch-dispatch padded"
    )
    record = tmp_path / "peak"
    trained(f"{FLAGS} {words}", ranks=4, prepare=lambda: _measure_steps(record))
    model = replace(MODEL, decoder=Stack(4, (1, 3)))
    layout = Layout(4, tp=2, pp=2, ep=2, etp=1)
    training = Training(**(TRAINING | {"sharding": "distributed"}))
    for rank in range(4):
        stage = layout.coordinates(rank).pp
        memory = predict(model, layout, training, stage=stage)
        measured = int(Path(f"{record}{rank}").read_text())
        assert memory.total == pytest.approx(measured, rel=0.05), rank


def _measure_steps(record: Path) -> None:
    """Write the peak of each step, the last one's in the end, to a file of the rank."""
    live = LiveBytes()
    step = megatron_training.train_step

    def measured_step(*args, **kwargs):
        live.peak = live.now
        result = step(*args, **kwargs)
        Path(f"{record}{dist.get_rank()}").write_text(str(live.peak))
        return result

    megatron_training.train_step = measured_step
    os.environ["OMP_NUM_THREADS"] = "1"
    live.__enter__()  # for the rest of this process, which the run ends
