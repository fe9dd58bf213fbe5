"""DeepSpeed configurations become flags; what has no equal becomes a note, never silence."""

import json

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.migration.deepspeed import Job, check_job, translate_config

WHOLE = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 50,
    "wall_clock_breakdown": True,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 2000,
            "total_num_steps": 100000,
        },
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500000000},
    "tensorboard": {"enabled": True, "output_path": "tb"},
}


def translate(tmp_path, config, job=None):
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
    return translate_config(path, job or Job())


def notes(found):
    return {note.setting: note.text for note in found.notes}


def test_a_whole_configuration(tmp_path):
    found = translate(tmp_path, WHOLE, Job(32))
    expected = {
        "--global-batch-size": "256",
        "--micro-batch-size": "4",
        "--log-interval": "50",
        "--timing-log-level": "2",
        "--optimizer": "adam",
        "--lr": "0.0003",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--adam-eps": "1e-08",
        "--weight-decay": "0.1",
        "--lr-decay-style": "linear",
        "--lr-warmup-init": "0",
        "--lr-warmup-iters": "2000",
        "--lr-decay-iters": "100000",
        "--train-iters": "100000",
        "--bf16": True,
        "--clip-grad": "1",
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
        "--ddp-bucket-size": "500000000",
        "--tensorboard-dir": "tb",
    }
    assert found.flags == expected
    assert list(notes(found)) == ["gradient_accumulation_steps"]
    assert found.argv[:2] == ["--log-interval", "50"]
    assert "--bf16" in found.argv


def test_every_key_is_a_flag_or_a_note(tmp_path):
    extra = {"elasticity": {}, "comms_logger": {}, "brand_new_setting": 1, "aio": {}}
    found = translate(tmp_path, {**WHOLE, **extra}, Job(32))
    assert extra.keys() <= notes(found).keys()
    assert "not known here" in notes(found)["brand_new_setting"]


@pytest.mark.parametrize(
    ("batch", "job", "whole", "micro"),
    [
        ({"train_batch_size": 64}, Job(8), "64", "8"),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, Job(8), "64", "2"),
        ({"train_micro_batch_size_per_gpu": 2}, Job(8), "16", "2"),
        ({"train_micro_batch_size_per_gpu": 2}, Job(8, model_parallel=4), "4", "2"),
    ],
)
def test_missing_batch_sizes_follow_from_the_others(tmp_path, batch, job, whole, micro):
    found = translate(tmp_path, {**batch, "bf16": {"enabled": True}}, job)
    assert found.flags["--global-batch-size"] == whole
    assert found.flags["--micro-batch-size"] == micro


def test_without_the_size_of_the_job_a_note_asks_for_it(tmp_path):
    found = translate(tmp_path, {"train_micro_batch_size_per_gpu": 2})
    assert "--global-batch-size" not in found.flags
    assert "say --num-nodes and --num-gpus" in notes(found)["train_batch_size"]


@pytest.mark.parametrize("steps", [None, "auto", {"warmup_num_steps": 10}], ids=str)
def test_where_no_scheduler_counts_all_steps_a_note_asks_for_them(tmp_path, steps):
    parameters = {"total_num_steps": steps} if steps == "auto" else steps
    config = {"scheduler": {"type": "WarmupDecayLR", "params": parameters}} if steps else {}
    found = translate(tmp_path, config)
    assert "--train-iters" not in found.flags
    assert "has no number of steps" in notes(found)["train_iters"]
    assert "add --train-iters N" in notes(found)["train_iters"]


def test_deepspeeds_defaults_are_written_out(tmp_path):
    found = translate(tmp_path, {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert found.flags["--clip-grad"] == "0"  # Megatron's default is 1
    assert found.flags["--weight-decay"] == "0"
    assert found.flags["--adam-beta2"] == "0.999"
    assert "fp32" in notes(found)["precision"]


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        (0, set()),
        (1, {"--use-distributed-optimizer"}),
        (2, {"--use-distributed-optimizer", "--use-megatron-fsdp", "optim_grads"}),
        (3, {"--use-distributed-optimizer", "--use-megatron-fsdp", "optim_grads_params"}),
    ],
)
def test_each_zero_stage_has_its_optimizer_sharding(tmp_path, stage, flags):
    found = translate(tmp_path, {"zero_optimization": {"stage": stage, "overlap_comm": False}})
    words = set(found.argv)
    kinds = {"--use-distributed-optimizer", "--use-megatron-fsdp", "optim_grads"}
    assert words & (kinds | {"optim_grads_params"}) == flags
    assert ("--overlap-grad-reduce" in words) is False


def test_an_offloaded_optimizer_goes_to_the_host(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    zero["offload_param"] = {"device": "nvme"}
    found = translate(tmp_path, {"zero_optimization": zero})
    assert found.flags["--optimizer-offload-fraction"] == "0.5"
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"} <= found.flags.keys()
    assert "--use-megatron-fsdp" not in found.flags
    assert "Stage 3 is not translated" in notes(found)["zero_optimization.stage"]
    assert "Offload to nvme has no equal" in notes(found)["zero_optimization.offload_param"]
    none = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}
    assert "--optimizer-cpu-offload" not in translate(tmp_path, none).flags


def test_a_loss_scale_is_dynamic_or_static(tmp_path):
    dynamic = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}
    found = translate(tmp_path, {"fp16": dynamic})
    assert found.flags["--initial-loss-scale"] == "4096"
    assert found.flags["--loss-scale-window"] == "500"
    assert "--loss-scale" not in found.flags
    static = translate(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}})
    assert static.flags["--loss-scale"] == "128"
    assert "--initial-loss-scale" not in static.flags


def test_auto_is_hugging_faces(tmp_path):
    found = translate(
        tmp_path, {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "fp16": {}}
    )
    assert "--bf16" not in found.flags
    assert "filled in by Hugging Face" in notes(found)["bf16.enabled"]


def test_what_adam_is_not(tmp_path):
    config = {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1, "freeze_step": 9}},
        "scheduler": {"type": "OneCycle", "params": {}},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    }
    found = translate(tmp_path, config)
    assert {
        "optimizer.type",
        "optimizer.params.freeze_step",
        "scheduler.type",
        "activation_checkpointing.cpu_checkpointing",
    } <= notes(found).keys()
    assert found.flags["--recompute-granularity"] == "full"
    assert "--distribute-saved-activations" in found.flags


@pytest.mark.parametrize(
    ("config", "job", "message"),
    [
        ('{\n  "fp16": {\n}', Job(), r"DeepSpeed file .* is not JSON: line 3"),
        ({"train_batch_size": "64"}, Job(), r"line 2, key 'train_batch_size': expected a whole"),
        (
            {"train_batch_size": 0},
            Job(),
            r"key 'train_batch_size': expected a whole number, 1 or more, found 0",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "big"}}},
            Job(),
            r"line 5, key 'optimizer.params.lr': expected a finite number, found \"big\"",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            Job(),
            r"key 'optimizer.params.betas': expected two numbers",
        ),
        ({"optimizer": {"params": {}}}, Job(), r"lacks the key 'type' in 'optimizer'"),
        (
            {"zero_optimization": {"stage": 4}},
            Job(),
            r"line 3, key 'zero_optimization.stage': ZeRO",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            Job(),
            r"key 'fp16': both fp16 and bf16 are enabled",
        ),
        ({"train_batch_size": 60}, Job(8), r"60 is no multiple of 1 accumulation steps x 8"),
        (
            {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8},
            Job(),
            r"line 2, key 'train_batch_size': 60 is no multiple of 8 a micro-batch, on however",
        ),
        (
            {**WHOLE, "train_batch_size": 100},
            Job(),
            r"100 is no multiple of 4 a micro-batch x 2 accumulation steps, on however many ranks",
        ),
        (
            {**WHOLE, "train_batch_size": 96},
            Job(32),
            r"key 'train_batch_size': 96 is not 4 a micro-batch x 2 accumulation steps x 32",
        ),
    ],
)
def test_mistakes_are_told_with_line_and_key(tmp_path, config, job, message):
    with pytest.raises(ConfigError, match=message):
        translate(tmp_path, config, job)


def test_all_three_batch_sizes_say_how_many_ranks_there_are(tmp_path):
    found = translate(tmp_path, {**WHOLE, "train_batch_size": 96})
    assert (
        "4 a micro-batch x 2 accumulation steps on 12 data-parallel"
        in (notes(found)["train_batch_size"])
    )
    assert found.flags["--global-batch-size"] == "96"


def test_model_parallel_ranks_divide_the_job():
    check_job(Job(8, 4))
    with pytest.raises(ConfigError, match=r"--model-parallel-size 3 does not divide 8 ranks"):
        check_job(Job(8, 3))
