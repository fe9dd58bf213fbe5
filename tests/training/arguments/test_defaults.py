"""Defaults that follow from device and installed packages, and flags that contradict them."""

import importlib.machinery
import sys

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.arguments import defaults
from megatron_switch.training.arguments.defaults import fill_defaults, has_apex


@pytest.fixture
def installed(monkeypatch):
    """Say which packages can be found, whatever is installed here."""

    def only(*names):
        def find(name):
            return importlib.machinery.ModuleSpec(name, None) if name in names else None

        monkeypatch.setattr(defaults, "find_spec", find)
        monkeypatch.setattr(defaults, "has_apex", lambda: "apex" in names)

    only()
    return only


def test_layers_with_experts_are_every_second_from_the_second(sparse_line):
    line = sparse_line()
    fill_defaults(line, "cpu")
    assert line.args.moe_layer_freq == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("flags", "factor"),
    [
        ("--switch-recipe megatron", -1.0),
        ("--switch-recipe megatron --moe-expert-capacity-factor 1.5", 1.5),
        (
            "--switch-recipe megatron --moe-expert-capacity-factor 1.5 "
            "--switch-eval-capacity-factor 3",
            3.0,
        ),
        ("--moe-expert-capacity-factor 1.5", 2.0),
    ],
)
def test_megatrons_recipe_has_one_capacity_factor_for_both(sparse_line, flags, factor):
    line = sparse_line(flags)
    fill_defaults(line, "cpu")
    assert line.args.switch_eval_capacity_factor == factor


@pytest.mark.parametrize("action", ["raise", "skip", "ignore"])
def test_megatrons_search_for_nan_is_off_where_steps_are_skipped(sparse_line, action):
    line = sparse_line(f"--switch-nonfinite {action}")
    told = fill_defaults(line, "cpu")
    assert line.args.check_for_nan_in_loss_and_grad == (action != "skip")
    assert ("--no-check-for-nan-in-loss-and-grad" in told) == (action == "skip")


@pytest.mark.parametrize(("given", "kept"), [("[1,0,0,1]", [1, 0, 0, 1]), ("2", 2), ("1", 1)])
def test_a_given_pattern_is_kept(sparse_line, given, kept):
    line = sparse_line(f"--moe-layer-freq {given}")
    fill_defaults(line, "cpu")
    assert line.args.moe_layer_freq == kept


def test_a_dense_model_has_no_pattern(dense_line):
    line = dense_line()
    fill_defaults(line, "cpu")
    assert line.args.moe_layer_freq == 1


def test_on_the_cpu_what_needs_a_gpu_is_off(sparse_line, installed):
    line = sparse_line()
    report = fill_defaults(line, "cpu")
    args = line.args
    assert (args.distributed_backend, args.num_workers, args.transformer_impl) == (
        "gloo",
        0,
        "local",
    )
    off = "apply_rope_fusion masked_softmax_fusion gradient_accumulation_fusion bias_gelu_fusion"
    off += " bias_swiglu_fusion bias_dropout_fusion create_attention_mask_in_dataloader"
    assert [name for name in off.split() if getattr(args, name)] == []
    assert args.no_persist_layer_norm
    assert report[:3] == (
        "--distributed-backend gloo",
        "--num-workers 0",
        "--transformer-impl local",
    )
    assert "--no-rope-fusion" in report


def test_what_is_given_or_already_so_is_not_reported(sparse_line, installed):
    line = sparse_line("--num-workers 3 --transformer-impl local --no-rope-fusion")
    report = fill_defaults(line, "cpu")
    assert line.args.num_workers == 3
    words = " ".join(report)
    assert not any(word in words for word in ("num-workers", "transformer-impl", "rope"))


def test_gpu_with_transformer_engine_keeps_megatrons_defaults(sparse_line, installed):
    installed("transformer_engine")
    line = sparse_line()
    assert fill_defaults(line, "cuda") == ("--moe-grouped-gemm",)
    assert (line.args.transformer_impl, line.args.distributed_backend) == (
        "transformer_engine",
        "nccl",
    )
    assert line.args.apply_rope_fusion


def test_gpu_without_transformer_engine_takes_torch_and_compiled_fusions(sparse_line, installed):
    line = sparse_line()
    report = fill_defaults(line, "cuda")
    assert line.args.transformer_impl == "local"
    assert line.args.bias_gelu_fusion
    assert line.args.bias_dropout_fusion
    assert "--no-gradient-accumulation-fusion" in report
    assert "--no-persist-layer-norm" in report


def test_gpu_with_apex_keeps_what_apex_computes(sparse_line, installed):
    installed("apex", "fused_weight_gradient_mlp_cuda")
    line = sparse_line()
    fill_defaults(line, "cuda")
    assert line.args.gradient_accumulation_fusion
    assert not line.args.no_persist_layer_norm
    installed("apex")  # built without its extensions
    line = sparse_line()
    fill_defaults(line, "cuda")
    assert not line.args.gradient_accumulation_fusion


def test_a_mask_that_is_reset_comes_from_the_data_set(sparse_line):
    line = sparse_line("--reset-attention-mask")
    assert "attention mask from the data set" in fill_defaults(line, "cpu")
    assert line.args.create_attention_mask_in_dataloader


def test_an_optimizer_on_the_host_needs_no_engine(sparse_line):
    line = sparse_line("--optimizer-cpu-offload --use-precision-aware-optimizer")
    fill_defaults(line, "cuda")
    assert line.args.use_precision_aware_optimizer


@pytest.mark.parametrize(
    ("device", "flags", "message"),
    [
        (
            "cuda",
            "--transformer-impl transformer_engine",
            r"needs Transformer Engine, which is not installed\. .*'megatron-switch\[te\]'",
        ),
        (
            "cpu",
            "--transformer-impl transformer_engine",
            r"--transformer-impl transformer_engine needs a GPU, and this run is on the CPU",
        ),
        (
            "cuda",
            "--use-precision-aware-optimizer",
            r"--use-precision-aware-optimizer needs Transformer Engine, .*'megatron-switch\[te\]'",
        ),
        (
            "cpu",
            "--use-precision-aware-optimizer",
            r"--use-precision-aware-optimizer needs a GPU, .*'megatron-switch\[te\]'",
        ),
        (
            "cpu",
            "--distributed-backend nccl",
            r"On the CPU ranks talk over gloo, got --distributed-backend nccl\. Leave",
        ),
        ("cpu", "--async-save", r"--async-save needs a GPU, .*Leave it out"),
        ("cpu", "--fp8-format e4m3", r"--fp8-format needs a GPU"),
        ("cpu", "--cuda-graph-impl local", r"--cuda-graph-impl needs a GPU"),
        ("cpu", "--use-megatron-fsdp", r"--use-megatron-fsdp needs a GPU"),
        ("cpu", "--optimizer-cpu-offload", r"--optimizer-cpu-offload needs a GPU"),
        ("cpu", "--tp-comm-overlap", r"--tp-comm-overlap needs a GPU"),
        ("cpu", "--profile", r"--profile needs a GPU"),
    ],
)
def test_a_flag_that_cannot_hold_here_is_refused(sparse_line, installed, device, flags, message):
    with pytest.raises(ConfigError, match=message):
        fill_defaults(sparse_line(flags), device)


@pytest.fixture
def a_package_apex(monkeypatch, tmp_path):
    """Put a package named apex, with the given parts, first on the path."""

    def make(*parts):
        for folder in (tmp_path / "apex", *(tmp_path / "apex" / part for part in parts)):
            folder.mkdir()
            text = "raise RuntimeError('imported')" if folder.name == "apex" else ""
            (folder / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "apex", raising=False)

    return make


def test_pypis_apex_is_told_apart_without_being_imported(a_package_apex, sparse_line):
    a_package_apex("interfaces", "lib")
    with pytest.raises(ConfigError, match=r"not NVIDIA's Apex.*pip uninstall apex.*optional"):
        fill_defaults(sparse_line(), "cpu")


@pytest.mark.parametrize("part", ["optimizers", "normalization"])
def test_nvidias_apex_is_known_by_its_parts(a_package_apex, part):
    a_package_apex(part)
    assert has_apex()


def test_without_a_package_apex_there_is_no_apex(monkeypatch):
    monkeypatch.setattr(defaults, "find_spec", lambda name: None)
    assert not has_apex()
