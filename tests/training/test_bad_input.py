"""Every mistake that a user can make ends with one message, exit code 2, and no traceback."""

import os
import re
import resource
import shutil
from pathlib import Path

import pytest
from support.tiny_run import SPARSE, TINY, run_command, train, trained

TRACKER = "latest_checkpointed_iteration.txt"
MOCK = "--mock-data"


def refused(flags, message, *, environ=None):
    """Check that training is refused with one message, which matches."""
    environ = {"RANK": "0", **(environ or {})}
    outcome = train(flags, prepare=lambda: os.environ.update(environ))
    assert outcome.code == 2, outcome.screen + outcome.errors
    assert "Traceback" not in outcome.errors
    (text,) = [part for part in outcome.errors.split("\nmegatron-switch: ") if "error: " in part]
    text = text.removeprefix("error: ")
    assert re.search(message, text, flags=re.DOTALL), text


def ranks(number):
    return {
        "RANK": "0",
        "WORLD_SIZE": str(number),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SPARSE, r"nothing to train on: no --data-path was given.*megatron-switch prepare"),
        (f"{SPARSE} {MOCK} --switch-capcity 4", r"no flag --switch-capcity\. Did you mean"),
        (f"{SPARSE} {MOCK} --mtp-num-layers 1", r"--mtp-num-layers 1 cannot be used with Switch"),
        (f"{SPARSE} {MOCK} --moe-router-topk 2", r"--moe-router-topk must be 1 .* got 2"),
        (
            f"{SPARSE} {MOCK} --switch-dispatch padded --switch-capacity 99000000000",
            r"One padded expert buffer would be 46\.10 TiB.*--switch-capacity",
        ),
        (
            f"{SPARSE} {MOCK} --transformer-impl transformer_engine",
            r"--transformer-impl transformer_engine needs a GPU",
        ),
        (f"{SPARSE} {MOCK} --async-save", r"--async-save needs a GPU.*Leave it out"),
        (f"{SPARSE} {MOCK} --distributed-backend nccl", r"ranks talk over gloo, got .* nccl"),
        (
            f"{SPARSE} {MOCK} --moe-layer-freq [0,1]",
            r"--moe-layer-freq .* has 2 entries for 4 layers",
        ),
        (
            f"{SPARSE} {MOCK} --moe-layer-freq 0",
            r"--moe-layer-freq is a number N of at least 1, .* as in \[0,1,0,1\]; got 0\.",
        ),
        (f"{SPARSE} {MOCK} --moe-layer-freq [0,1", r"cannot be used: .* --moe-layer-freq \[0,1\]"),
        (
            f"{SPARSE} {MOCK} --group-query-attention --num-query-groups 3",
            r"--num-attention-heads is 4 and --num-query-groups 3",
        ),
        (
            f"{SPARSE} {MOCK} --swiglu --hidden-size 16",
            r"8/3 of --hidden-size wide, .* nothing for 16\. Give --ffn-hidden-size",
        ),
        (f"{SPARSE} {MOCK} --save runs", r"not how often one is written\. Add --save-interval"),
        (f"{SPARSE} {MOCK} --apply-layernorm-1p", r"--apply-layernorm-1p is set\. Leave it off"),
        (
            f"{SPARSE} {MOCK} --multi-latent-attention",
            r"does not support --multi-latent-attention with --transformer-impl local",
        ),
        (f"{SPARSE} {MOCK} --hidden-size 30", r"Megatron refuses these flags: .*hidden_size"),
        (
            f"{SPARSE} {MOCK} --tokenizer-type HuggingFaceTokenizer --tokenizer-model gone",
            r"tokenizer cannot be built from --tokenizer-type HuggingFaceTokenizer and .* gone",
        ),
        (
            f"{SPARSE} {MOCK} --tokenizer-type SentencePieceTokenizer --tokenizer-model gone",
            r"reads a model file, and --tokenizer-model gone is none",
        ),
        (f"{SPARSE} --data-path gone", r"Data path gone needs gone\.idx and gone\.bin"),
        (f"{SPARSE} {MOCK} --load gone", r"checkpoint folder gone does not exist.*--load"),
        (
            f"{SPARSE} {MOCK} --use-checkpoint-args",
            r"--use-checkpoint-args .* no checkpoint is given\. Add --load",
        ),
    ],
)
def test_a_mistake_is_refused_on_one_rank(flags, message):
    refused(flags, message)


@pytest.mark.parametrize(
    ("number", "flags", "message"),
    [
        (3, "--expert-model-parallel-size 3", r"4 experts cannot be shared evenly by 3.*1, 2, 4"),
        (
            6,
            "--tensor-model-parallel-size 4 --sequence-parallel",
            r"TP.*CP.*PP.*DP.*ETP.*EP.*EDP",
        ),
        (2, "--tensor-model-parallel-size 2", r"is required.*Add --sequence-parallel"),
        (
            3,
            "--tensor-model-parallel-size 3 --sequence-parallel",
            r"heads must be a multiple of TP, but --num-attention-heads is 4",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(number, flags, message):
    refused(f"{SPARSE} {MOCK} {flags}", message, environ=ranks(number))


@pytest.mark.parametrize(
    ("device", "environ", "message"),
    [
        ("cuda", {}, r"--switch-device cuda needs a GPU that torch can use, and there is none"),
        (
            "auto",
            {"CUDA_VISIBLE_DEVICES": "0"},
            r"present or promised \(CUDA_VISIBLE_DEVICES=0\) but torch cannot use it",
        ),
        ("auto", {"SLURM_GPUS": "8"}, r"present or promised \(SLURM_GPUS=8\)"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(monkeypatch, device, environ, message):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(f"{SPARSE} {MOCK} --switch-device {device}", message, environ=environ)


@pytest.fixture
def damaged(data, tmp_path):
    """Copy the data set, and return its prefix."""
    prefix = Path(data.split()[1])
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", tmp_path)
    return tmp_path / prefix.name


@pytest.mark.parametrize(
    ("suffix", "message"),
    [(".bin", r"corpus\.bin is truncated"), (".idx", r"corpus\.idx is damaged: it is truncated")],
)
def test_truncated_data_are_refused(damaged, suffix, message):
    path = Path(f"{damaged}{suffix}")
    path.write_bytes(path.read_bytes()[:-100])
    refused(f"{SPARSE} --data-path {damaged} --split 1,0,0", message)


def test_what_only_the_first_rank_sees_ends_the_others_in_silence(damaged):
    Path(f"{damaged}.bin").write_bytes(b"")
    outcome = train(f"{SPARSE} --data-path {damaged}", ranks=2)
    (line,) = outcome.errors.strip().splitlines()
    assert re.search(r"error: .*corpus\.bin is truncated", line)
    assert outcome.code == 2


def test_data_of_another_tokenizer(data):
    refused(f"{SPARSE} {data} --vocab-size 50", r"the tokenizer has only \d+ tokens")


def test_a_folder_that_is_no_run(data, tmp_path):
    (tmp_path / "thesis.tex").touch()
    refused(f"{SPARSE} {data} --switch-run-dir {tmp_path}", r"not empty and holds no run\.json")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_the_first_rank_speaks_where_all_see_the_same():
    outcome = train(f"{SPARSE} {MOCK} --moe-router-topk 2", ranks=2)
    assert outcome.code == 2
    assert outcome.errors.count("error") == 1
    assert "Traceback" not in outcome.errors


def test_help_and_a_wrong_command_name_what_there_is():
    outcome = run_command("train", "--help")
    assert outcome.code == 0
    assert "--switch-eval-capacity-factor" in outcome.screen
    outcome = run_command("trian")
    assert outcome.code == 2
    assert "invalid choice: 'trian'" in outcome.errors


@pytest.fixture
def saved(one_rank, tmp_path):
    """Copy the checkpoints of a run of four iterations; return the flags that load them."""
    flags, run = one_rank("0101")
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    return flags.split(" --load")[0], tmp_path / "checkpoints"


def half_written(folder):
    (folder / ".metadata").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 6 --moe-layer-freq [0,1,0,1,0,1]", r"of another model:.*--num-layers: 4 in"),
        ("--num-experts 8", r"of another model:.*--num-experts: 4 in the checkpoint, 8 now"),
        ("--train-iters 9", r"schedule differs.*--train-iters: 4 in .*9 now.*--override-opt_param"),
        ("--lr 1e-2", r"--lr: 0\.001 in the checkpoint, 0\.01 now.*--override-opt_param-scheduler"),
        ("--switch-min-capacity 1", r"differ from the checkpoint's:.*--switch-min-capacity: 4 in"),
        ("--ckpt-step 9", r"--ckpt-step 9 asks for .*does not exist\. Complete .*iter_0000004"),
    ],
)
def test_a_checkpoint_of_something_else(saved, flags, message):
    words, checkpoints = saved
    refused(f"{words} --load {checkpoints} {flags}", message)


@pytest.mark.slow
def test_a_folder_without_a_whole_checkpoint(saved):
    words, checkpoints = saved
    for folder in checkpoints.glob("iter_*"):
        half_written(folder)
    refused(f"{words} --load {checkpoints}", r"no complete checkpoint\. .*iter_0000004")
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()
    message = r"holds no checkpoint: .*is missing\. There is no iter_\* folder either"
    refused(f"{words} --load {checkpoints}", message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / TRACKER).write_text(""),
            "is empty. Continuing from iter_0000004",
        ),
        (lambda folder: (folder / TRACKER).unlink(), "is missing. Continuing from iter_0000004"),
        (
            lambda folder: half_written(folder / "iter_0000004"),
            "Continuing from iter_0000003, the newest complete one.",
        ),
    ],
    ids=["empty tracker", "no tracker", "half-written"],
)
def test_damage_that_leaves_a_whole_checkpoint_is_said_and_overcome(saved, damage, message):
    words, checkpoints = saved
    damage(checkpoints)
    outcome = trained(f"{words} --load {checkpoints} --eval-iters 0")
    assert message in outcome.screen
    assert "successfully loaded checkpoint" in outcome.screen


@pytest.mark.slow
def test_the_model_may_come_from_the_checkpoint(data, saved, tmp_path):
    _, checkpoints = saved
    flags = f"--use-checkpoint-args --load {checkpoints} --ckpt-step 2 {data} --switch-device cpu"
    training = "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3"
    more = "--use-distributed-optimizer --eval-iters 0 --split 80,10,10"
    outcome = trained(f"{flags} {training} {more}")
    assert "4 layers (sparse 2, 4; dense 1, 3), width 32, 4 experts" in outcome.screen
    assert "router z-loss x 0.001" in outcome.screen


@pytest.mark.slow
def test_a_job_that_always_loads_what_it_saves_starts_from_new_weights_once(data, tmp_path):
    folder = tmp_path / "checkpoints"
    flags = f"{TINY} {data} --save {folder} --load {folder} --save-interval 2"
    first = trained(f"{flags} --exit-interval 2")
    assert f"{folder} holds no checkpoint yet: training starts from new weights." in first.screen
    again = trained(flags)
    assert "loaded checkpoint" in again.screen
    assert "new weights" not in again.screen


def test_a_refused_run_leaves_no_trace(tmp_path):
    places = {
        "--save": tmp_path / "save",
        "--switch-run-dir": tmp_path / "run",
        "--tensorboard-dir": tmp_path / "board" / "below",
        "--switch-metrics-file": tmp_path / "metrics" / "file.jsonl",
    }
    flags = " ".join(f"{flag} {place}" for flag, place in places.items())
    outcome = train(f"{SPARSE} --data-path gone {flags}", ranks=2)
    assert outcome.code == 2
    assert "Data path gone needs gone.idx" in outcome.errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_splits_that_are_not_read_need_no_document(data):
    prefix = data.split()[1]
    flags = f"{SPARSE} --data-path {prefix} --split 9990,5,5"
    outcome = trained(f"{flags} --eval-iters 0 --train-iters 1")
    assert "iteration        1/" in outcome.screen
    refused(f"{flags} --eval-iters 1", r"400 documents, and --split 9990,5,5 leaves none for")


@pytest.mark.slow
def test_an_index_of_samples_that_cannot_be_kept_is_explained(data):
    refused(f"{SPARSE} {data} --data-cache-path /proc/none", r"order of samples.*--data-cache-path")


def test_a_model_that_no_memory_holds_is_refused_before_it_is_built():
    refused(f"{SPARSE} {MOCK} --num-experts 1000000000", r"weights alone would be 59\.\d\d TiB")


def limit_files(num_bytes):
    """Let writes to a file end there, as on a disk that is full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_does_not_fit_is_explained_and_the_one_before_loads(
    data, tmp_path, ranks
):
    flags = f"{TINY} {data} --save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 1"
    trained(f"{flags} --exit-interval 1", ranks=ranks)
    failed = train(flags, ranks=ranks, prepare=limit_files(100_000))
    assert failed.code == 2, failed.errors
    assert failed.errors.count("megatron-switch: error") == 1
    assert re.search(
        rf"The checkpoint {tmp_path}/run/iter_0000002 could not be written: it needs over "
        r"[\d.]+ [KM]iB, and the disk had room for .* limit on the size of files .*--save.* "
        r"iter_0000001 is complete: the run continues from it\.",
        failed.errors,
        flags=re.DOTALL,
    )
    again = trained(f"{flags} --exit-interval 2", ranks=ranks)
    assert "at iteration 1" in again.screen
    assert "successfully saved checkpoint from iteration       2" in again.screen


@pytest.mark.slow
def test_a_checkpoint_with_damage_inside_is_named(saved):
    words, checkpoints = saved
    (file,) = (checkpoints / "iter_0000004").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[100:300] = bytes(200)
    file.write_bytes(content)
    refused(f"{words} --load {checkpoints}", r"iter_0000004 is damaged: its files have their sizes")
