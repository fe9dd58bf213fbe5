"""Defaults that follow from other flags, from the device and from what is installed.

Megatron's own defaults assume Transformer Engine, Apex and NCCL. Each rule here turns one of them
to what works where they are absent, unless its flag was given; a given flag that cannot work is a
:class:`ConfigError`. What was changed is returned, to be reported in one line.
"""

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.errors import ConfigError
from megatron_switch.flags.known_flags import shown_flag
from megatron_switch.training.arguments.parser import CommandLine
from megatron_switch.training.arguments.t5 import fill_t5


def fill_defaults(line: CommandLine, device: Literal["cuda", "cpu"]) -> tuple[str, ...]:
    """Set the defaults that depend on other values, in place.

    Args:
        line: The parsed command line; its namespace is changed.
        device: Where the run happens.

    Returns:
        What was set, as flags, for the report.

    Raises:
        ConfigError: An explicit flag needs something that is not here.
    """
    set_here = _Setter(line)
    if line.args.switch_arch == "t5":
        fill_t5(line)
    if line.args.num_experts:
        _fill_model(line)
        if line.args.switch_nonfinite == "skip":  # Megatron's check would end the run
            set_here("check_for_nan_in_loss_and_grad", False, "--no-check-for-nan-in-loss-and-grad")
    if line.args.skip_train and line.args.train_iters is None and not line.args.train_samples:
        line.args.train_iters = 0  # Megatron multiplies with it to size the data
    if device == "cpu":
        _fill_cpu(line, set_here)
    have_apex = has_apex()
    have_te = device == "cuda" and find_spec("transformer_engine") is not None
    if not have_te:
        _refuse_engine(line, device)
        _fill_local(line, set_here, fused=have_apex and device == "cuda")
    elif line.args.transformer_impl == "transformer_engine" and line.args.num_experts:
        set_here("moe_grouped_gemm", True, "--moe-grouped-gemm")
    guarded = line.args.num_experts and line.args.switch_nonfinite != "ignore"
    if line.args.save is None and not guarded:
        # Megatron's search for a fault behind NaN saves a checkpoint and leaves an exit code; with
        # no place to save it ends in a TypeError, and without the search in what was not finite.
        set_here("rerun_mode", "disabled", "--rerun-mode disabled (no --save)")
    if line.args.reset_attention_mask:  # the dataset must build the mask it resets
        set_here("create_attention_mask_in_dataloader", True, "attention mask from the data set")
    return tuple(set_here.report)


def has_apex() -> bool:
    """Return whether NVIDIA's Apex is installed.

    Raises:
        ConfigError: The unrelated package of that name from PyPI is installed instead.
    """
    spec = find_spec("apex")
    if spec is None:
        return False
    # Looked for as files: importing a package of unknown origin could do anything.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / part).exists() for folder in folders for part in _PARTS_OF_APEX):
        raise ConfigError(
            "The installed package 'apex' is not NVIDIA's Apex: it has neither apex.optimizers nor "
            "apex.normalization. PyPI's apex is an unrelated project; run 'pip uninstall apex'. "
            "NVIDIA's Apex is optional and is built from source."
        )
    return True


_PARTS_OF_APEX = ("optimizers", "normalization")


class _Setter:
    """Sets attributes that were not given on the command line, and remembers them."""

    def __init__(self, line: CommandLine) -> None:
        self._line = line
        self.report: list[str] = []

    def __call__(self, name: str, value: object, shown: str) -> None:
        if name not in self._line.settled and getattr(self._line.args, name) != value:
            setattr(self._line.args, name, value)
            self.report.append(shown)


def _fill_model(line: CommandLine) -> None:
    args: Namespace = line.args
    if "moe_layer_freq" not in line.settled and args.num_layers is not None:
        # An integer frequency N means layers 0, N, 2N, ... to Megatron; Switch starts at 1.
        args.moe_layer_freq = Stack.switch(args.num_layers).layer_freq
    if args.switch_recipe == "megatron" and "switch_eval_capacity_factor" not in line.settled:
        # Megatron has one factor, for evaluation too; None drops nothing.
        given = args.moe_expert_capacity_factor
        args.switch_eval_capacity_factor = -1.0 if given is None else given


def _fill_cpu(line: CommandLine, set_here: _Setter) -> None:
    if "distributed_backend" in line.explicit and line.args.distributed_backend != "gloo":
        raise ConfigError(
            f"On the CPU ranks talk over gloo, got --distributed-backend "
            f"{line.args.distributed_backend}. Leave the flag out, or use --switch-device cuda."
        )
    set_here("distributed_backend", "gloo", "--distributed-backend gloo")
    # Loader processes would cost 0.2 GB each and gain nothing where compute is on the CPU too.
    set_here("num_workers", 0, "--num-workers 0")
    for name in _NOT_ON_CPU:
        if getattr(line.args, name) not in (None, False, "none", []):
            raise ConfigError(
                f"{shown_flag(name)} needs a GPU, and this run is on the CPU (--switch-device). "
                "Leave it out."
            )


_NOT_ON_CPU = (
    "fp8",
    "fp4",
    "async_save",
    "cuda_graph_impl",
    "tp_comm_overlap",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "optimizer_cpu_offload",
    "profile",
)


def _refuse_engine(line: CommandLine, device: Literal["cuda", "cpu"]) -> None:
    needs_engine = {
        "--transformer-impl transformer_engine": "transformer_impl" in line.explicit
        and line.args.transformer_impl == "transformer_engine",
        # Megatron demands it with an optimizer on the host, which is torch's own.
        "--use-precision-aware-optimizer": line.args.use_precision_aware_optimizer
        and not line.args.optimizer_cpu_offload,
    }
    flag = next((flag for flag, is_set in needs_engine.items() if is_set), None)
    if flag is None:
        return
    missing = (
        "a GPU, and this run is on the CPU (--switch-device); where there is one, the engine "
        "comes with pip install 'megatron-switch[te]'. Leave"
    )
    if device == "cuda":
        missing = (
            "Transformer Engine, which is not installed. Install it with pip install "
            "'megatron-switch[te]', or leave"
        )
    raise ConfigError(f"{flag} needs {missing} the flag out to use what torch has.")


def _fill_local(line: CommandLine, set_here: _Setter, *, fused: bool) -> None:
    set_here("transformer_impl", "local", "--transformer-impl local")
    set_here("apply_rope_fusion", False, "--no-rope-fusion")
    set_here("masked_softmax_fusion", False, "--no-masked-softmax-fusion")
    if not fused or find_spec("fused_weight_gradient_mlp_cuda") is None:
        set_here("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion")
    if not fused:
        set_here("no_persist_layer_norm", True, "--no-persist-layer-norm")
    if line.args.distributed_backend == "gloo":  # these three are compiled by torch's Inductor
        set_here("bias_gelu_fusion", False, "--no-bias-gelu-fusion")
        set_here("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion")
        set_here("bias_dropout_fusion", False, "--no-bias-dropout-fusion")
