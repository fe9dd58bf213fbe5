"""Grouped, batched and sequential experts read one another's checkpoints, expert by expert.

Batched experts are ours, sequential ones Megatron's in plain torch, grouped ones Megatron's with
Transformer Engine. The last need Transformer Engine to compute, but not to say how they are stored:
the two functions that name their weights are taken from Megatron's source and run on modules that
hold weights under Transformer Engine's names (``weight0``, ``weight1``, ...).
"""

import ast
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import TEGroupedMLP
from support.layout_case import FF, D, E, Layout, Part, Problem, start_groups

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.upstream.repairs import repaired_megatron

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

PREFIX = "decoder.layers.3.mlp.experts."
BACKENDS = ("batched", "sequential", "grouped")


def method_of_megatron(class_name, name):
    """Return a method of a class that Megatron defines only where Transformer Engine is there."""
    tree = ast.parse(Path(transformer_engine.__file__).read_text(encoding="utf-8"))
    (owner,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == class_name)
    (function,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)
    names = dict(vars(transformer_engine))
    exec(compile(ast.Module([function], []), transformer_engine.__file__, "exec"), names)
    return names[name]


class GroupedLinear(torch.nn.Module):
    """Weights under Transformer Engine's names; how they are stored is Megatron's code."""

    _sharded = method_of_megatron("TEGroupedLinear", "_sharded_state_dict_grouped")

    def __init__(self, weights, groups, tp_dim):
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight.clone()))
        self.num_gemms, self.use_bias, self._tp_dim = len(weights), False, tp_dim
        self._pg_collection = SimpleNamespace(
            ep=groups.ep, expt_dp=groups.expt_dp, expt_dp_gtp_remat=groups.expt_dp
        )
        self._tp_group = groups.expt_tp

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass

    def _split_extra_state(self, state):
        return [None] * self.num_gemms

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        axes = {f"{index}.weight": self._tp_dim for index in range(self.num_gemms)}
        return self._sharded(axes, prefix, sharded_offsets, metadata)


class GroupedMLP(torch.nn.Module):
    """Both matrices; the module that holds them stores them with Megatron's code."""

    sharded_state_dict = TEGroupedMLP.sharded_state_dict

    def __init__(self, wi, wo, part, config):
        super().__init__()
        self.linear_fc1 = GroupedLinear(wi, part.groups, 0)
        self.linear_fc2 = GroupedLinear(wo, part.groups, 1)
        self.config, self.num_local_experts = config, len(wi)
        self.tp_group, self.ep_group = part.groups.expt_tp, part.groups.ep

    def weights(self, index):
        name = f"weight{index}"
        return getattr(self.linear_fc1, name), getattr(self.linear_fc2, name)


def build(backend, part, problem):
    """Return the experts of this rank and a function that gives both matrices of one of them."""
    ours = part.experts(problem)
    wi, wo = part.shard_of_wi(problem.wi_EFD, problem.gated), part.shard_of_wo(problem.wo_EDF)
    if backend == "batched":
        return ours, lambda index: (ours.weight1[index], ours.weight2[index])
    if backend == "grouped":
        grouped = GroupedMLP(wi, wo, part, ours.config)
        return grouped, grouped.weights
    sequential = LocalSpecProvider().grouped_mlp_modules(False)(
        len(wi), ours.config, pg_collection=part.groups
    )
    for index, expert in enumerate(sequential.local_experts):
        expert.linear_fc1.weight.data.copy_(wi[index])
        expert.linear_fc2.weight.data.copy_(wo[index])
    return sequential, lambda index: (
        sequential.local_experts[index].linear_fc1.weight,
        sequential.local_experts[index].linear_fc2.weight,
    )


def digest(weights):
    content = hashlib.sha256()
    for weight in weights:
        content.update(weight.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


def sharded(experts, part):
    metadata = {"dp_cp_group": part.groups.dp_cp}
    return experts.sharded_state_dict(PREFIX, (), metadata)


@pytest.mark.slow
def test_every_backend_reads_what_every_other_wrote(tmp_path):
    run_ranks(_save, 4, Layout(4, ep=2, etp=2), tmp_path)
    run_ranks(_load, 2, Layout(2, ep=2), tmp_path)
    run_ranks(_load, 1, Layout(1), tmp_path)


def _problems():
    return [Problem.draw(1, capacity=1, gated=gated) for gated in (False, True)]


def _save(rank, layout, folder):
    part = Part(layout, start_groups(layout))
    with cuda_on_cpu(), repaired_megatron():
        for problem in _problems():
            for backend in BACKENDS:
                path = folder / f"{backend}-{problem.gated}"
                path.mkdir(exist_ok=True)
                torch.distributed.barrier()
                experts, _ = build(backend, part, problem)
                dist_checkpointing.save(sharded(experts, part), str(path))


def _load(rank, layout, folder):
    part = Part(layout, start_groups(layout))
    with cuda_on_cpu(), repaired_megatron():
        for problem in _problems():
            _, expected = build("grouped", part, problem)
            count = E // layout.ep
            digests = [digest(expected(index)) for index in range(count)]
            assert len(set(digests)) == count  # or a mixed-up expert would not show
            for writer in BACKENDS:
                for reader in BACKENDS:
                    experts, weights = build(reader, part, problem)
                    with torch.no_grad():
                        for parameter in experts.parameters():
                            parameter.zero_()
                    state = sharded(experts, part)
                    path = str(folder / f"{writer}-{problem.gated}")
                    loaded = dist_checkpointing.load(state, path)
                    model = {key.removeprefix(PREFIX): value for key, value in loaded.items()}
                    model = {k: v for k, v in model.items() if not k.startswith("common")}
                    experts.load_state_dict(model, strict=reader != "grouped")
                    found = [digest(weights(index)) for index in range(count)]
                    assert found == digests, f"{reader} experts read what {writer} experts wrote"


def test_names_of_transformer_engines_weights_are_those_of_the_source():
    """The stand-in has the parameters that Megatron's code looks for, and no others."""
    source = Path(transformer_engine.__file__).read_text(encoding="utf-8")
    assert 'indexed_name = f"{param_name}{gemm_idx}"' in source
    weights = [torch.zeros(FF, D)] * 3
    groups = SimpleNamespace(ep=None, expt_dp=None, expt_tp=None)
    linear = GroupedLinear(weights, groups, 0)
    assert [name for name, _ in linear.named_parameters()] == ["weight0", "weight1", "weight2"]
