"""A Switch layer spread over ranks, and the undivided layer that it must equal.

Every rank draws the whole problem from one seed, so it knows what the others hold and what the
reference says; then it works on its own part only.

Shape letters:

    M  micro-batches, one a data-parallel rank    B, S  sequences, positions    D  model
    E  experts    F  expert hidden width    T  tokens of this rank's part of one micro-batch
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_switch.moe.experts import GroupedExperts
from megatron_switch.moe.reference import switch_layer
from megatron_switch.moe.routing import RoutedTokens, SwitchRouting, route
from megatron_switch.moe.sequence_shards import SequenceShards

B, S, D, FF, E = 2, 8, 6, 8, 4


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; expert-data and data parallelism take the rest of the world."""

    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __str__(self) -> str:
        return f"world{self.world}-tp{self.tp}-cp{self.cp}-ep{self.ep}-etp{self.etp}"


def each_layout(layouts: Iterable[Layout]) -> pytest.MarkDecorator:
    """Run a test once in every layout; those of more ranks than the machine has cores are slow."""
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(layout, id=str(layout), marks=[pytest.mark.slow] * (layout.world > 2))
            for layout in layouts
        ],
    )


def switch_config(layout: Layout, **changes: Any) -> TransformerConfig:
    """Return a configuration of one Switch layer in float64 on the CPU."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": 2,
        "ffn_hidden_size": FF,
        "moe_ffn_hidden_size": FF,
        "num_moe_experts": E,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "activation_func": F.relu,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1,
    }
    return TransformerConfig(**{**settings, **changes})


def start_groups(layout: Layout) -> ProcessGroupCollection:
    """Build Megatron's process groups on the ranks of ``run_ranks``."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,  # second ones, for what runs beside NCCL
    )
    return ProcessGroupCollection.use_mpu_process_groups()


@dataclass(frozen=True)
class Problem:
    """What all ranks together compute, the same on every rank."""

    x_MBSD: Tensor
    out_grad_MBSD: Tensor
    router_ED: Tensor
    wi_EFD: Tensor
    wo_EDF: Tensor
    capacity: int
    by_sequence: bool
    padding_MBS: Tensor
    gated: bool = False

    @classmethod
    def draw(cls, num_microbatches: int, capacity: int, **changes: Any) -> "Problem":
        """Draw tokens and weights; about one token in eight is padding."""
        random = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        gated = changes.get("gated", False)
        problem = cls(
            x_MBSD=normal(num_microbatches, B, S, D),
            out_grad_MBSD=normal(num_microbatches, B, S, D),
            router_ED=normal(E, D),
            wi_EFD=normal(E, FF * (2 if gated else 1), D),
            wo_EDF=normal(E, D, FF),
            capacity=capacity,
            by_sequence=False,
            padding_MBS=torch.rand(num_microbatches, B, S, generator=random) < 0.125,
        )
        return replace(problem, **changes)

    @property
    def group_T(self) -> Tensor:
        """Capacity group of every token of a whole micro-batch."""
        sequence_T = torch.arange(B).repeat_interleave(S)
        return sequence_T if self.by_sequence else torch.zeros_like(sequence_T)

    def activation(self, hidden_F: Tensor) -> Tensor:
        """Return the reference's activation of one token."""
        if not self.gated:
            return F.relu(hidden_F)
        gate_F, linear_F = hidden_F.chunk(2)
        return F.silu(gate_F) * linear_F

    def reference(self) -> dict[str, Tensor]:
        """Return output and gradients of the undivided layer; weights' summed over M."""
        leaves = [self.x_MBSD, self.router_ED, self.wi_EFD, self.wo_EDF]
        x_MBSD, router_ED, wi_EFD, wo_EDF = (leaf.clone().requires_grad_() for leaf in leaves)
        outputs = [
            switch_layer(
                x_BSD.flatten(0, 1),
                router_ED,
                wi_EFD,
                wo_EDF,
                capacity=self.capacity,
                activation=self.activation,
                group_T=self.group_T,
                padding_T=padding_BS.flatten(),
            ).view_as(x_BSD)
            for x_BSD, padding_BS in zip(x_MBSD, self.padding_MBS, strict=True)
        ]
        y_MBSD = torch.stack(outputs)
        y_MBSD.backward(self.out_grad_MBSD)
        return {
            "y": y_MBSD.detach(),
            "x": x_MBSD.grad,
            "router": router_ED.grad,
            "wi": wi_EFD.grad,
            "wo": wo_EDF.grad,
        }


@dataclass(frozen=True)
class Part:
    """What one rank holds of the problem."""

    layout: Layout
    groups: ProcessGroupCollection

    @property
    def microbatch(self) -> int:
        """Index of this rank's micro-batch."""
        return parallel_state.get_data_parallel_rank()

    def of(self, values_MBS: Tensor) -> Tensor:
        """Return this rank's tokens, batch-major: shape (T, ...)."""
        shards = self.layout.tp * self.layout.cp
        positions = SequenceShards.of(
            S // shards, tensor_size=self.layout.tp, context_size=self.layout.cp
        ).positions(self.groups.tp_cp.rank())
        return values_MBS[self.microbatch][:, positions].flatten(0, 1)

    def routed(self, problem: Problem, x_TD: Tensor, router_ED: Tensor) -> RoutedTokens:
        """Route as SwitchRouter does: gates from this rank's tokens, slots of the whole group."""
        whole = route(
            problem.x_MBSD[self.microbatch].flatten(0, 1) @ problem.router_ED.t(),
            capacity=problem.capacity,
            group_T=problem.group_T,
            padding_T=problem.padding_MBS[self.microbatch].flatten(),
        )

        def mine(values_T: Tensor) -> Tensor:
            return self.of(values_T.view(B, S).expand(len(problem.x_MBSD), B, S))

        local: SwitchRouting = route(x_TD @ router_ED.t(), capacity=problem.capacity)
        token_T = torch.arange(problem.padding_MBS.numel()).view_as(problem.padding_MBS)
        return RoutedTokens(
            routing=replace(local, slot_T=mine(whole.slot_T), kept_T=mine(whole.kept_T)),
            group_T=mine(problem.group_T),
            num_groups=B if problem.by_sequence else 1,
            capacity=problem.capacity,
            key_T=self.of(token_T),
        )

    def experts(self, problem: Problem, **settings: Any) -> GroupedExperts:
        """Return this rank's experts, with its shard of the problem's weights."""
        config = switch_config(
            self.layout,
            gated_linear_unit=problem.gated,
            activation_func=F.silu if problem.gated else F.relu,
            bias_activation_fusion=False,
        )
        local = E // self.layout.ep
        experts = GroupedExperts(local, config, pg_collection=self.groups, **settings)
        with torch.no_grad():
            experts.weight1.copy_(self.shard_of_wi(problem.wi_EFD, problem.gated))
            experts.weight2.copy_(self.shard_of_wo(problem.wo_EDF))
        return experts

    def shard_of_wi(self, wi_EFD: Tensor, gated: bool) -> Tensor:
        """Return this rank's experts and its slice of their hidden width."""
        halves = self._local(wi_EFD).chunk(2 if gated else 1, dim=1)
        rank = self.groups.expt_tp.rank()
        return torch.cat([half.chunk(self.layout.etp, dim=1)[rank] for half in halves], dim=1)

    def shard_of_wo(self, wo_EDF: Tensor) -> Tensor:
        """Return this rank's experts and its slice of their hidden width."""
        return self._local(wo_EDF).chunk(self.layout.etp, dim=2)[self.groups.expt_tp.rank()]

    def _local(self, weight_E: Tensor) -> Tensor:
        return weight_E.chunk(self.layout.ep)[self.groups.ep.rank()]

    def check(
        self,
        problem: Problem,
        expected: dict[str, Tensor],
        layer: Callable[[Tensor, RoutedTokens, GroupedExperts], Tensor],
        **settings: Any,
    ) -> Tensor:
        """Run a layer on this rank's tokens; outputs and all gradients are the reference's."""
        x_TD = self.of(problem.x_MBSD).clone().requires_grad_()
        router_ED = problem.router_ED.clone().requires_grad_()
        experts = self.experts(problem, **settings)
        y_TD = layer(x_TD, self.routed(problem, x_TD, router_ED), experts)
        y_TD.backward(self.of(problem.out_grad_MBSD))

        torch.testing.assert_close(y_TD, self.of(expected["y"]))
        torch.testing.assert_close(x_TD.grad, self.of(expected["x"]))
        dist.all_reduce(router_ED.grad)
        torch.testing.assert_close(router_ED.grad, expected["router"])
        for weight in experts.parameters():
            dist.all_reduce(weight.grad, group=self.groups.expt_dp)
        expected_wi = self.shard_of_wi(expected["wi"], problem.gated)
        torch.testing.assert_close(experts.weight1.grad, expected_wi)
        torch.testing.assert_close(experts.weight2.grad, self.shard_of_wo(expected["wo"]))
        return y_TD.detach()
