"""``megatron-switch from-deepspeed`` prints a launch line that the training command accepts."""

import json
import shlex

import pytest

from megatron_switch.cli import main
from megatron_switch.training.arguments.parser import parse_command_line

CONFIG = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "fp16": {"enabled": True, "hysteresis": 4},
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 1000000,
        "offload_optimizer": {"device": "cpu"},
    },
    "activation_checkpointing": {"partition_activations": True},
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True, "project": "two words"},
    "flops_profiler": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}
JOB = "--num-nodes 2 --num-gpus 8 --model-parallel-size 2 --num_experts 64 --expert_parallel_size 8"


def run(capsys, tmp_path, config, words):
    path = tmp_path / "ds config.json"
    path.write_text(json.dumps(config, indent=2))
    code = main(["from-deepspeed", str(path), *words.split()])
    return code, capsys.readouterr()


@pytest.mark.slow
def test_the_launch_line_is_accepted_by_training(capsys, tmp_path):
    code, printed = run(capsys, tmp_path, CONFIG, JOB)
    assert code == 0
    line = printed.out.split("\n\n")[0].replace("\\\n", "")
    words = shlex.split(line)
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    start = words.index("train") + 1
    args = parse_command_line(words[start:-1]).args
    assert (args.global_batch_size, args.micro_batch_size) == (256, 16)
    assert (args.num_experts, args.expert_model_parallel_size) == (64, 8)
    assert (args.tensor_model_parallel_size, args.sequence_parallel) == (2, True)
    assert (args.fp16, args.hysteresis, args.clip_grad) == (True, 4, 0.5)
    assert args.use_distributed_optimizer
    assert args.optimizer_cpu_offload
    assert not args.use_megatron_fsdp  # which does not go with the line above
    assert args.wandb_project == "two words"
    assert args.lr_decay_style == "cosine"
    assert args.train_iters == args.lr_decay_iters == 1000
    assert args.switch_capacity_rounding == "ceil"


def test_notes_stand_below(capsys, tmp_path):
    code, printed = run(capsys, tmp_path, {**CONFIG, "aio": {}}, f"{JOB} --k 2")
    assert code == 0
    notes = [line for line in printed.out.splitlines() if line.startswith("# ")]
    assert any(line.startswith("# aio: ") for line in notes)
    assert any(line.startswith("# k: Top-2 has no equal") for line in notes)


def test_a_mistake_ends_with_its_message(capsys, tmp_path):
    code, printed = run(capsys, tmp_path, {"train_batch_size": "x"}, JOB)
    assert code == 2
    assert "line 2, key 'train_batch_size': expected a whole number" in printed.err
