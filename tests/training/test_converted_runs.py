"""A converted model trains on in another layout, and comes back where nothing was learned.

With a learning rate too small to change any weight, four ranks load, train and save what the
conversion wrote, each its part; exported, every tensor is Hugging Face's bit by bit. With another
one the loss falls.
"""

import pytest
import torch
from safetensors.torch import load_file
from support import hf_models
from support.tiny_run import read_records, run_command, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FOUR = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1"
)
RUN = (
    "--use-checkpoint-args --micro-batch-size 2 --global-batch-size 8 --eval-iters 0 "
    "--switch-device cpu --log-interval 1 --mock-data --hidden-dropout 0 --attention-dropout 0 "
    "--switch-expert-dropout 0 --switch-override-checkpoint --use-distributed-optimizer "
    "--weight-decay 0 --clip-grad 0"
)
MODELS = {
    "qwen2_moe": ("--seq-length 16", {"vocab_size": 128}),
    "switch_transformers": ("--seq-length 32 --decoder-seq-length 16", {}),
}


def convert(*words):
    outcome = run_command("convert", *map(str, words))
    assert outcome.code == 0, outcome.screen + outcome.errors


@pytest.mark.parametrize("model_type", MODELS)
def test_it_loads_trains_saves_and_comes_back(tmp_path, model_type):
    lengths, changes = MODELS[model_type]
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    hf_models.save(hf, model_type, **changes)
    convert("hf-to-megatron", "--hf", hf, "--megatron", megatron)
    flags = f"{RUN} {lengths} {FOUR} --load {megatron}"
    trained(f"{flags} --train-iters 1 --lr 1e-30 --switch-run-dir {tmp_path / 'still'}", ranks=4)
    convert("megatron-to-hf", "--megatron", tmp_path / "still", "--hf", back)
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, back))
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert [key for key in changed if "shared_expert_gate" not in key] == []

    trained(f"{flags} --train-iters 6 --lr 1e-2 --switch-run-dir {tmp_path / 'moving'}", ranks=4)
    losses = [r["lm_loss"] for r in read_records(tmp_path / "moving" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
