"""What cannot work is refused before anything is built; what has no effect is named."""

from dataclasses import replace

import psutil
import pytest
import torch

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.training.arguments.stored_arguments import with_stored_model
from megatron_switch.training.loop.gpt_builder import resolve_dispatch
from megatron_switch.training.preflight import flags as flags_module
from megatron_switch.training.preflight.flags import check_before_megatron, check_schedule
from megatron_switch.training.preflight.layout import check_layout

GIB = 2**30


def notes(line, device="cpu"):
    args = line.args
    args.mock_data = True
    switch = resolve_dispatch(args, SwitchConfig.from_args(args), device)
    return check_before_megatron(line, switch, device)


def layout(line, ranks):
    line.args.world_size = ranks
    return check_layout(line.args, SwitchConfig.from_args(line.args))


def test_a_sound_command_line_is_not_commented_on(sparse_line, dense_line):
    assert notes(sparse_line()) == notes(dense_line()) == ()


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--moe-permute-fusion", "--moe-permute-fusion has no effect: Fuses Megatron's"),
        ("--switch-drop-order probability", "this decoder sees the future while training."),
        (
            "--switch-capacity 8 --moe-expert-capacity-factor 2",
            "--moe-expert-capacity-factor has no effect: --switch-capacity 8 is absolute.",
        ),
        (
            "--switch-capacity 8 --switch-min-capacity 1",
            "--switch-min-capacity has no effect: --switch-capacity 8 is absolute.",
        ),
        (
            "--switch-recipe megatron --switch-capacity-rounding ceil",
            "--switch-capacity-rounding has no effect: both capacity factors are negative",
        ),
        (
            "--switch-metrics-interval 5",
            "--switch-metrics-interval has no effect: there is no --switch-metrics-file",
        ),
    ],
)
def test_a_flag_without_effect_is_named(sparse_line, flags, note):
    (found,) = notes(sparse_line(flags))
    assert note in found


def test_settings_of_a_layer_that_is_not_there_are_named(dense_line):
    found = notes(dense_line("--switch-capacity 8 --switch-dispatch packed --switch-run-dir run"))
    assert found == (
        "--switch-capacity has no effect: without --num-experts every layer is dense.",
        "--switch-dispatch has no effect: without --num-experts every layer is dense.",
    )


def test_settings_that_came_from_a_checkpoint_are_not_commented_on(dense_line):
    line = dense_line()
    taken = with_stored_model(line, dense_line("--switch-capacity 8").args)
    assert "switch_capacity" in taken.stored
    assert notes(taken) == ()


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (("num_layers", "lr"), r"more flags than were given: --num-layers, --lr\. .*--switch-m"),
        (("train_iters",), r"given: --train-iters\."),
        (("seq_length", "micro_batch_size"), r"given: --seq-length, --micro-batch-size\."),
        (("hidden_size", "num_attention_heads"), r": --hidden-size, --num-attention-heads\."),
        (("max_position_embeddings",), r": --max-position-embeddings\."),
    ],
)
def test_missing_flags_are_named_together(sparse_line, drop, message):
    line = sparse_line()
    for name in drop:
        setattr(line.args, name, None)
    with pytest.raises(ConfigError, match=message):
        notes(line)


def test_samples_are_as_good_as_iterations_and_evaluation_needs_neither(sparse_line):
    line = sparse_line("--train-samples 100")
    line.args.train_iters = None
    assert notes(line) == ()
    line.args.train_samples = line.args.lr = None
    line.args.skip_train = True
    assert notes(line) == ()


@pytest.mark.parametrize("name", ["torch", "torch_dcp", "fsdp_dtensor"])
def test_a_format_that_cannot_be_loaded_again_is_not_saved(sparse_line, name):
    line = sparse_line(f"--ckpt-format {name} --save there --save-interval 1")
    with pytest.raises(ConfigError, match=f"--ckpt-format {name} .*Use --ckpt-format torch_dist"):
        notes(line)
    line.args.use_megatron_fsdp = True
    (note,) = notes(line)
    assert "cannot be resumed" in note
    line.args.save = None
    assert notes(line) == (
        "--save-interval has no effect: there is no --save and no --switch-run-dir.",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--init-method-xavier-uniform", r"cannot build .*--init-method-xavier-uniform\. Leave it"),
        ("--attention-backend local", r"--attention-backend local .*--transformer-impl local"),
        (
            "--fp32-residual-connection --bf16 --transformer-impl local",
            r"--fp32-residual-connection .*--transformer-impl transformer_engine",
        ),
        ("--multiple-validation-sets", r"--multiple-validation-sets needs --full-validation"),
        ("--non-persistent-save-interval 1", r"interval 1 .*--non-persistent-ckpt-type global"),
        (
            "--position-embedding-type rope --kv-channels 7",
            r"7 of a head's .*--kv-channels 7, --rotary-percent 1\).*even",
        ),
    ],
)
def test_what_ends_in_a_traceback_of_megatron_is_refused(sparse_line, given, message):
    with pytest.raises(ConfigError, match=message):
        notes(sparse_line(given))


@pytest.mark.parametrize(
    ("given", "other", "why"),
    [
        ("--activation-func-clamp-value 1", "--swiglu", "not gated"),
        ("--glu-linear-offset 1", "--quick-geglu", "not gated"),
        ("--num-query-groups 2", "--group-query-attention", "no --group-query-attention"),
        ("--rope-scaling-factor 32", "--use-rope-scaling", "no --use-rope-scaling"),
    ],
)
def test_a_setting_of_what_the_model_lacks_is_noted(sparse_line, given, other, why):
    (note,) = notes(sparse_line(given))
    assert note.startswith(f"{given.split()[0]} has no effect: ")
    assert why in note
    assert notes(sparse_line(f"{given} {other} --ffn-hidden-size 64")) == ()


def test_a_batch_that_would_not_grow_is_refused(sparse_line):
    with pytest.raises(ConfigError, match=r"got 2 2 8: .*--step-batch-size-schedule"):
        notes(sparse_line("--rampup-batch-size 2 2 8"))


def test_megatron_fsdp_with_pipeline_stages_is_refused(sparse_line):
    message = r"no pipeline stages: .* --use-megatron-fsdp and --pipeline-model-parallel-size 2\."
    with pytest.raises(ConfigError, match=message):
        notes(sparse_line("--use-megatron-fsdp --pipeline-model-parallel-size 2"))
    assert notes(sparse_line("--use-megatron-fsdp")) == ()


def test_megatron_fsdp_with_an_optimizer_on_the_host_is_refused(sparse_line):
    message = r"gradients of Megatron-FSDP.* --use-megatron-fsdp and --optimizer-cpu-offload\."
    with pytest.raises(ConfigError, match=message):
        notes(sparse_line("--use-megatron-fsdp --optimizer-cpu-offload"))


def test_an_optimizer_of_a_package_that_is_not_there_is_refused(sparse_line, monkeypatch):
    monkeypatch.setattr(flags_module, "HAVE_EMERGING_OPTIMIZERS", False)
    assert notes(sparse_line("--optimizer adam")) == notes(sparse_line("--optimizer sgd")) == ()
    with pytest.raises(ConfigError, match=r"--optimizer muon is part of .*pip install emerging"):
        notes(sparse_line("--optimizer muon"))
    monkeypatch.setattr(flags_module, "HAVE_EMERGING_OPTIMIZERS", True)
    assert notes(sparse_line("--optimizer muon")) == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--switch-capacity 1000000000",
            r"would be 476\.84 GiB: 4 experts x 1000000000 slots x 32 elements of 4 bytes over 1 "
            r"ranks; this device has 16\.00 GiB\. Lower .*--switch-capacity",
        ),
        ("--switch-capacity 1000000000 --bf16", r"would be 238\.42 GiB: .* of 2 bytes"),
        (
            "--moe-expert-capacity-factor 1e9 --micro-batch-size 40000000",
            r"would be 305\.18 GiB: 4 experts x 640000000 slots",
        ),
    ],
)
def test_a_capacity_beyond_all_memory_is_refused_with_its_size(
    sparse_line, monkeypatch, flags, message
):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=16 * GIB))
    with pytest.raises(ConfigError, match=message):
        notes(sparse_line(f"{flags} --switch-dispatch padded"))
    assert notes(sparse_line(f"{flags} --switch-dispatch packed")) == ()


def test_the_memory_of_a_gpu_counts_on_a_gpu(sparse_line, monkeypatch):
    class Device:
        total_memory = 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
    with pytest.raises(ConfigError, match=r"this device has 1\.00 MiB"):
        notes(sparse_line("--switch-capacity 100000"), "cuda")


def test_the_layout_is_that_of_the_flags(sparse_line):
    line = sparse_line(
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2"
    )
    grid = layout(line, 8)
    assert (grid.tp, grid.pp, grid.dp, grid.ep, grid.etp, grid.edp) == (2, 2, 2, 2, 1, 2)


def test_both_ways_to_ask_for_virtual_stages_are_the_same(sparse_line):
    flags = "--pipeline-model-parallel-size 2"
    for way in (
        "--num-layers-per-virtual-pipeline-stage 1",
        "--num-virtual-stages-per-pipeline-rank 2",
    ):
        assert layout(sparse_line(f"{flags} {way}"), 2).vp == 2


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (3, "--expert-model-parallel-size 3", r"4 experts cannot be shared evenly by 3"),
        (
            6,
            "--tensor-model-parallel-size 4 --sequence-parallel",
            r"(?s)6.*TP.*CP.*PP.*DP.*ETP.*EP.*EDP",
        ),
        (2, "--tensor-model-parallel-size 2", r"sequence parallelism is required.*Add --seq"),
        (
            3,
            "--tensor-model-parallel-size 3 --sequence-parallel --seq-length 18",
            r"heads must be a multiple of TP, but --num-attention-heads is 4",
        ),
        (2, "--pipeline-model-parallel-size 2 --num-layers 3", r"Layers must be a multiple of PP"),
        (1, "--global-batch-size 7", r"--global-batch-size is 7 and micro-batch x DP is 2 x 1"),
        (
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
            "--switch-capacity-group ep",
            r"ETP x EP must be a multiple of TP x CP.*--switch-capacity-group microbatch",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_explained(sparse_line, ranks, flags, message):
    with pytest.raises(LayoutError, match=message):
        layout(sparse_line(flags), ranks)


def test_another_megatron_is_refused(sparse_line, monkeypatch):
    from megatron_switch.errors import UpstreamError
    from megatron_switch.upstream import version

    monkeypatch.setattr(version, "version", lambda _: "0.18.0")
    with pytest.raises(UpstreamError, match=r"0\.19\.2, but 0\.18\.0 is installed.*pip install"):
        notes(sparse_line())


def test_settings_are_checked_as_resolved(sparse_line):
    line = sparse_line()
    line.args.mock_data = True
    switch = replace(SwitchConfig.from_args(line.args), drop_order="probability", dispatch="packed")
    assert len(check_before_megatron(line, switch, "cpu")) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--full-validation", r"Add --multiple-validation-sets to --full-validation"),
        (
            "--full-validation --multiple-validation-sets --test-data-path gone",
            r"cannot evaluate test data .* Leave --test-data-path out",
        ),
        ("--sft", r"--sft asks for samples of another form .* --reset-attention-mask"),
        ("--dataloader-inter-document-masking", r"--dataloader-inter-document-masking asks for"),
        ("--fim-data", r"--fim-data asks for samples of another form"),
    ],
)
def test_data_that_would_be_read_otherwise_are_refused(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        notes(sparse_line(flags))


def test_expert_dropout_names_whose_experts_compute(sparse_line):
    (note,) = notes(sparse_line("--switch-expert-dropout 0.4"))
    assert note == (
        "--switch-expert-dropout 0.4: Transformer Engine's experts have no dropout, so the experts "
        "are plain torch's, which is slower."
    )
    assert notes(sparse_line("--switch-expert-dropout 0.4 --transformer-impl local")) == ()


def test_a_captured_iteration_cannot_be_looked_into(sparse_line):
    flags = "--cuda-graph-impl full_iteration"
    (note,) = notes(sparse_line(flags))
    assert "this is --switch-nonfinite ignore" in note
    assert notes(sparse_line(f"{flags} --switch-nonfinite ignore")) == ()
    with pytest.raises(ConfigError, match=r"cannot be left out: got --switch-nonfinite skip"):
        notes(sparse_line(f"{flags} --switch-nonfinite skip"))


def given(sparse_line, flags):
    """Arguments as validation leaves them."""
    args = sparse_line(flags).args
    args.lr_warmup_iters = args.lr_warmup_iters or 0
    args.lr_warmup_samples = args.lr_warmup_samples or 0
    if "--train-samples" in flags:
        args.train_iters = None
    return args


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr-warmup-iters 3",
        "--lr-warmup-iters 4 --lr-decay-iters 5",
        "--lr-warmup-fraction 0.9",
        "--lr-warmup-samples 15 --train-samples 16",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2",
        "--min-lr 1e-3",
        "--lr-warmup-iters 9 --skip-train",
    ],
)
def test_a_schedule_that_megatron_accepts_passes(sparse_line, flags):
    check_schedule(given(sparse_line, flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-warmup-iters 4", r"--lr-warmup-iters 4 leaves nothing of its 4 iters .*--train-it"),
        ("--lr-warmup-iters 2 --lr-decay-iters 2", r"--lr-warmup-iters 2 .* 2 iters"),
        ("--lr-warmup-fraction 1.0", r"--lr-warmup-fraction 1\.0 leaves nothing of its 4 iters"),
        (
            "--lr-warmup-samples 16 --train-samples 16",
            r"--lr-warmup-samples 16 leaves nothing of its 16 samples .*--lr-decay-samples",
        ),
        ("--min-lr 1", r"above --lr, which is 0\.001, but --min-lr is 1\. Lower it"),
        ("--lr-warmup-init 0.5", r"--lr, which is 0\.001, but --lr-warmup-init is 0\.5"),
        ("--lr-decay-style WSD", r"Add --lr-wsd-decay-iters\."),
    ],
)
def test_a_schedule_that_megatron_asserts_against_is_refused(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        check_schedule(given(sparse_line, flags))
