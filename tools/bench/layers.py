"""The layers that are compared: ours, Megatron-Core's, Hugging Face's and DeepSpeed's.

Each builder takes the problem of one rank, and gives its layer the problem's weights without a
copy. On the CPU Megatron-Core's layer asks for CUDA streams and a current device;
:func:`cpu_answers` gives them for the length of a measurement, without a function mode that would
slow every call of torch.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from torch import Tensor, nn

from bench.candidate import Candidate, FeedForward, GateOnly, share_weights
from bench.problem import DTYPES, Problem
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation.device import Stream
from megatron_switch.emulation.gloo import with_sizes_as_lists
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.moe.switch_mlp import switch_mlp_spec
from megatron_switch.upstream.patching import Patch, applied

_NO_GPU = "there is no CUDA device to ask"


@contextmanager
def cpu_answers() -> Iterator[None]:
    """Answer what Megatron-Core's layer asks of a GPU, for the length of a ``with`` block."""
    current = Stream()
    answers = {
        "current_device": lambda: torch.device("cpu"),
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: current,
    }
    patches = [Patch(f"torch.cuda:{name}", _NO_GPU, answer) for name, answer in answers.items()]
    sizes = Patch(
        "torch.distributed:all_to_all_single",
        "gloo takes split sizes as lists only",
        wrapper=with_sizes_as_lists,
    )
    with applied([*patches, sizes]):
        yield


def build_ours(problem: Problem, dispatch: str) -> Candidate:
    """Return the Switch layer of this project, with the statistics that it keeps in training."""
    sizes = problem.sizes
    switch = SwitchConfig(dispatch=dispatch, capacity=sizes.capacity, min_capacity=0)
    layer = switch_mlp_spec(switch, seed=1)(
        config=_config(problem), pg_collection=process_groups(sizes.world), is_mtp_layer=False
    )
    layer.set_layer_number(1)
    set_moe_metrics_tracker(SwitchMetricsTracker((1,), sizes.experts))
    layer.router.weight.data = problem.router_ED
    experts = layer.experts
    if sizes.without_experts:
        layer.experts = GateOnly()
        wi, wo = [], []
    elif hasattr(experts, "linear_fc1"):
        wi, wo = _grouped_weights(experts, problem)
    else:
        experts.weight1.data, experts.weight2.data = problem.wi_eFD, problem.wo_eDF
        wi, wo = [experts.weight1], [experts.weight2]
    return Candidate(
        f"ours, {dispatch}",
        lambda x_TD: layer(x_TD.unsqueeze(1))[0].squeeze(1),
        "first come",
        layer.router.weight,
        wi,
        wo,
        router_module=layer.router,
        expert_modules=[layer.experts],
    )


def build_megatron(problem: Problem, *, padded: bool) -> Candidate:
    """Return Megatron-Core's ``MoELayer`` with the all-to-all dispatcher."""
    sizes = problem.sizes
    config = _config(
        problem,
        moe_expert_capacity_factor=sizes.capacity_factor,
        moe_pad_expert_input_to_capacity=padded,
        moe_token_drop_policy="probs",
        moe_router_load_balancing_type="none",
    )
    engine = sizes.device == "cuda" and HAVE_TE
    spec = get_moe_module_spec(engine, sizes.experts, moe_grouped_gemm=engine)
    layer = spec(config=config, pg_collection=process_groups(sizes.world))
    layer.set_layer_number(1)
    layer.router.weight.data = problem.router_ED
    wi: list[Tensor] = []
    wo: list[Tensor] = []
    if sizes.without_experts:
        layer.experts = GateOnly()
    elif engine:
        wi, wo = _grouped_weights(layer.experts, problem)
    else:
        experts = layer.experts.local_experts
        wi = share_weights((each.linear_fc1.weight for each in experts), problem.wi_eFD)
        wo = share_weights((each.linear_fc2.weight for each in experts), problem.wo_eDF)
    return Candidate(
        f"Megatron-Core, {'padded' if padded else 'not padded'}",
        lambda x_TD: layer(x_TD.unsqueeze(1))[0].squeeze(1),
        "probability",
        layer.router.weight,
        wi,
        wo,
        router_module=layer.router,
        expert_modules=[layer.experts],
        differs="drops the least probable",
    )


def build_hugging_face(problem: Problem) -> Candidate:
    """Return transformers' ``SwitchTransformersSparseMLP``, which knows one rank only."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersSparseMLP,
    )

    sizes = problem.sizes
    config = SwitchTransformersConfig(
        d_model=sizes.width,
        d_ff=sizes.ffn,
        num_experts=sizes.experts,
        expert_capacity=sizes.capacity,
        dense_act_fn="relu",
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        router_bias=False,
        router_dtype="float32",
    )
    with torch.device("meta"):  # its weights are not drawn, nor allocated
        layer = SwitchTransformersSparseMLP(config)
    layer.router.classifier.weight = nn.Parameter(problem.router_ED)
    for number in range(sizes.experts):
        name = f"expert_{number}"
        if sizes.without_experts:
            layer.experts[name] = nn.Identity()
        else:
            layer.experts[name].wi.weight = nn.Parameter(problem.wi_eFD[number])
            layer.experts[name].wo.weight = nn.Parameter(problem.wo_eDF[number])
    experts = list(layer.experts.values())
    named = [] if sizes.without_experts else experts
    return Candidate(
        "Hugging Face",
        lambda x_TD: layer(x_TD.unsqueeze(0)).squeeze(0),
        "first come",
        layer.router.classifier.weight,
        [each.wi.weight for each in named],
        [each.wo.weight for each in named],
        router_module=layer.router,
        expert_modules=experts,
    )


def build_deepspeed(problem: Problem) -> Candidate:
    """Return DeepSpeed's ``MOELayer`` with its top-1 gate, without random token selection."""
    # Else it looks for an accelerator, and warns where there is none.
    os.environ.setdefault("DS_ACCELERATOR", problem.device.type)
    import deepspeed.comm
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    sizes = problem.sizes
    if sizes.world > 1:  # on the CPU it compiles a shared-memory operator, which is not used
        deepspeed.comm.init_distributed(verbose=False, auto_mpi_discovery=False)
    gate = TopKGate(
        sizes.width,
        sizes.experts,
        capacity_factor=sizes.capacity_factor,
        min_capacity=0,
        use_rts=False,
    ).to(problem.device)
    gate.wg.weight.data = problem.router_ED
    experts = Experts(nn.Identity(), sizes.local_experts)
    if not sizes.without_experts:
        pairs = zip(problem.wi_eFD, problem.wo_eDF, strict=True)
        experts.deepspeed_experts = nn.ModuleList(FeedForward(wi, wo) for wi, wo in pairs)
    layer = MOELayer(gate, experts, "bench", sizes.world, sizes.local_experts)
    layer._set_ep_group(process_groups(sizes.world).ep)
    own = [] if sizes.without_experts else list(experts.deepspeed_experts)
    return Candidate(
        "DeepSpeed",
        lambda x_TD: layer(x_TD, None),
        "any",
        gate.wg.weight,
        [each.wi for each in own],
        [each.wo for each in own],
        router_module=gate,
        expert_modules=[experts],
        differs="drops in no promised order",
    )


PACKAGES = {"Hugging Face": "transformers", "DeepSpeed": "deepspeed"}
"""What a layer needs beside this project."""

ONE_RANK = ("Hugging Face", "plain torch")
"""Layers that know no expert parallelism."""

BUILDERS: dict[str, Callable[[Problem], Candidate]] = {
    "ours, packed": lambda problem: build_ours(problem, "packed"),
    "ours, padded": lambda problem: build_ours(problem, "padded"),
    "Megatron-Core, not padded": lambda problem: build_megatron(problem, padded=False),
    "Megatron-Core, padded": lambda problem: build_megatron(problem, padded=True),
    "Hugging Face": build_hugging_face,
    "DeepSpeed": build_deepspeed,
}


def missing_package(name: str) -> str | None:
    """Return what to install for a layer, or None where it is installed."""
    package = PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: pip install -e '.[bench]'"


@cache
def process_groups(world: int) -> ProcessGroupCollection:
    """Return Megatron's groups, with all ranks in one expert-parallel group."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=world,
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def _config(problem: Problem, **changes: Any) -> TransformerConfig:
    sizes = problem.sizes
    on_gpu = sizes.device == "cuda"
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": sizes.width,
        "num_attention_heads": 1,
        "ffn_hidden_size": 8 if sizes.without_experts else sizes.ffn,
        "moe_ffn_hidden_size": 8 if sizes.without_experts else sizes.ffn,
        "num_moe_experts": sizes.experts,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": on_gpu and HAVE_TE,
        "add_bias_linear": False,
        "activation_func": F.relu,
        "params_dtype": DTYPES[sizes.dtype],
        "bf16": sizes.dtype == "bfloat16",
        "perform_initialization": False,
        "use_cpu_initialization": not on_gpu,
        "transformer_impl": "transformer_engine" if on_gpu and HAVE_TE else "local",
        "expert_model_parallel_size": sizes.world,
    }
    return TransformerConfig(**(settings | changes))


def _grouped_weights(experts: Any, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """Give Transformer Engine's grouped linear layers the weights; return their parameters."""
    numbers = range(problem.sizes.local_experts)
    first = (getattr(experts.linear_fc1, f"weight{number}") for number in numbers)
    second = (getattr(experts.linear_fc2, f"weight{number}") for number in numbers)
    return share_weights(first, problem.wi_eFD), share_weights(second, problem.wo_eDF)
