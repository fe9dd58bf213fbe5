"""A whole Switch layer spread over ranks, and what the reference says about it.

Every rank draws all micro-batches from one seed, runs ``SwitchMLP`` on its own part, and compares
that part with the loop of :mod:`megatron_switch.moe.reference`, in float64, losses included. No
weight is handed out: the layer draws its own, by seed, layer and global expert.

Shape letters:

    M  micro-batches, one a data-parallel rank    B, S  sequences, positions    D  model
    E  experts    F  expert hidden width    T  tokens of all micro-batches    G  capacity groups
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.initialization import init_expert_weight_, init_router_weight_
from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.moe.reference import switch_layer
from megatron_switch.moe.switch_mlp import SwitchMLP, switch_mlp_spec
from support.layout_case import FF, D, E, Layout, Part, S, switch_config

SEED, LAYER = 11, 3
SCALE = 6.0  # of the initial weights: gates far from 1/E, so that their gradients matter


@dataclass(frozen=True)
class Case:
    """Settings of a layer, and what its batch looks like."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    sequences: int = 2
    padding: bool = False

    def settings(self, dispatch: str) -> SwitchConfig:
        """Return the Switch settings: no least capacity, so that much is dropped."""
        plain = {"min_capacity": 0, "init_scale": str(SCALE), "dispatch": dispatch}
        return SwitchConfig(**(plain | dict(self.switch)))

    @property
    def factor(self) -> float:
        """Capacity factor while training."""
        return self.config.get("moe_expert_capacity_factor", 0.75)

    def transformer(self, layout: Layout, **changes: Any) -> Any:
        """Return Megatron's configuration."""
        config = switch_config(
            layout,
            **{"moe_expert_capacity_factor": self.factor}
            | {"moe_aux_loss_coeff": 3.0, "moe_z_loss_coeff": 2.0}
            | {"num_attention_heads": 4, "kv_channels": 1}  # asked for, not used
            | dict(self.config)
            | changes,
        )
        # Megatron's own dispatcher is built and thrown away; this one needs no CUDA stream.
        config.moe_token_dispatcher_type = "allgather"
        return config


def build_layer(
    case: Case,
    layout: Layout,
    groups: ProcessGroupCollection,
    dispatch: str = "packed",
    **changes: Any,
) -> SwitchMLP:
    """Return this rank's part of the layer, as a transformer layer would build it."""
    builder = switch_mlp_spec(case.settings(dispatch), seed=SEED)
    layer = builder(
        config=case.transformer(layout, **changes), pg_collection=groups, is_mtp_layer=False
    )
    layer.set_layer_number(LAYER)
    return layer


class Tracker(SwitchMetricsTracker):
    """Keeps the report of the last training step."""

    def __init__(self, layer_numbers: tuple[int, ...] = (LAYER,)) -> None:
        super().__init__(layer_numbers, E, on_report=self._keep)
        self._last: RoutingReport

    def _keep(self, report: RoutingReport, iteration: int) -> None:
        self._last = report

    def step(self) -> RoutingReport:
        """Report as at the end of a training step."""
        self.report(loss_scale=1.0, iteration=1)
        return self._last


def new_tracker() -> Tracker:
    """Make an empty tracker the active one."""
    tracker = Tracker()
    set_moe_metrics_tracker(tracker)
    return tracker


@dataclass(frozen=True)
class Oracle:
    """The undivided layer: all micro-batches in one loop over tokens, in float64."""

    case: Case
    num_microbatches: int
    per_exchange: int = 1
    """Micro-batches of one expert-parallel group."""

    @cached_property
    def x_MBSD(self) -> Tensor:
        return self._normal(1, D)

    @cached_property
    def out_grad_MBSD(self) -> Tensor:
        return self._normal(2, D)

    @cached_property
    def padding_MBS(self) -> Tensor | None:
        """About one token in four; of the second sequence, all."""
        if not self.case.padding:
            return None
        padding_MBS = self._normal(3, 1).squeeze(-1) < -0.7
        padding_MBS[:, 1] = True
        return padding_MBS

    def _normal(self, seed: int, width: int) -> Tensor:
        shape = (self.num_microbatches, self.case.sequences, S, width)
        random = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Draw the whole layer's weights, as every rank does its own part."""
        router = torch.empty(E, D, dtype=torch.float64)
        init_router_weight_(router, seed=SEED, layer_number=LAYER, scale=SCALE)
        wi, wo = torch.empty(E, FF, D).double(), torch.empty(E, D, FF).double()
        whole = {"seed": SEED, "layer_number": LAYER, "scale": SCALE, "gated": False}
        for e in range(E):
            place = {"expert": e, "shard": 0, "num_shards": 1, "init_method": None}
            init_expert_weight_(wi[e], matrix="fc1", **place, **whole)
            init_expert_weight_(wo[e], matrix="fc2", **place, **whole)
        return {"router": router, "wi": wi, "wo": wo}

    @cached_property
    def group_T(self) -> Tensor:
        """Capacity group of every token of all micro-batches."""
        sequences = self.num_microbatches * self.case.sequences
        sequence_T = torch.arange(sequences).repeat_interleave(S)
        kind = self.case.switch.get("capacity_group", "microbatch")
        if kind == "sequence":
            return sequence_T
        micro_batch_T = sequence_T // self.case.sequences
        return micro_batch_T // self.per_exchange if kind == "ep" else micro_batch_T

    def capacity_at(self, factor: float) -> int:
        """Return the slots per expert and group."""
        settings = self.case.settings("packed")
        return expert_capacity(
            int((self.group_T == 0).sum()),
            E,
            factor,
            min_capacity=settings.min_capacity,
            rounding=settings.capacity_rounding,
        )

    @property
    def capacity(self) -> int:
        """Slots per expert and group in training."""
        return self.case.switch.get("capacity") or self.capacity_at(self.case.factor)

    @cached_property
    def padding_T(self) -> Tensor:
        if self.padding_MBS is None:
            return torch.zeros_like(self.group_T, dtype=torch.bool)
        return self.padding_MBS.flatten()

    @cached_property
    def _probs_TE(self) -> Tensor:
        logits_TE = self.x_MBSD.flatten(0, 2) @ self.weights["router"].t()
        return logits_TE.softmax(dim=1)

    @cached_property
    def rank_T(self) -> Tensor:
        """Place in the order in which tokens get slots."""
        if self.case.switch.get("drop_order") != "probability":
            return torch.arange(len(self.group_T))
        return self._probs_TE.amax(dim=1).argsort(descending=True, stable=True).argsort()

    @cached_property
    def slot_T(self) -> list[int]:
        """Slot of each token, -1 for padding."""
        taken: dict[tuple[int, int], int] = {}
        expert, group = self._probs_TE.argmax(dim=1).tolist(), self.group_T.tolist()
        slots = [-1] * len(group)
        for token in self.rank_T.argsort().tolist():
            if not self.padding_T[token]:
                key = (group[token], expert[token])
                slots[token] = taken.get(key, 0)
                taken[key] = slots[token] + 1
        return slots

    def losses(self, probs_TE: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return balance and z-loss of every micro-batch, by their formulas."""
        tokens = self.case.sequences * S
        by_sequence = self.case.switch.get("capacity_group") == "sequence"
        balance, z = [], []
        for start in range(0, len(probs_TE), tokens):
            mine = slice(start, start + tokens)
            real_T = ~self.padding_T[mine]
            parts = []
            for part in torch.arange(tokens).split(S if by_sequence else tokens):
                probs = probs_TE[mine][part][real_T[part]]
                if len(probs):
                    chosen = torch.bincount(probs.argmax(dim=1), minlength=E) / len(probs)
                    parts.append(E * (chosen * probs.mean(dim=0)).sum())
            balance.append(torch.stack(parts).mean())
            z.append(logits_TE[mine][real_T].logsumexp(dim=1).square().mean())
        return torch.stack(balance), torch.stack(z)

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Return outputs, losses, and gradients of both, weights' summed over micro-batches."""
        x_TD = self.x_MBSD.flatten(0, 2).requires_grad_()
        leaves = {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}
        router_ED = leaves["router"]
        order = self.rank_T.argsort()
        y_TD = switch_layer(
            x_TD[order],
            router_ED,
            leaves["wi"],
            leaves["wo"],
            capacity=self.capacity,
            group_T=self.group_T[order],
            padding_T=self.padding_T[order],
        )[self.rank_T]
        logits_TE = x_TD @ router_ED.t()
        balance_M, z_M = self.losses(logits_TE.softmax(dim=1), logits_TE)
        config = self.case.transformer(Layout(1))
        loss_M = config.moe_aux_loss_coeff * balance_M + config.moe_z_loss_coeff * z_M
        if config.calculate_per_token_loss:
            loss_M = loss_M * (~self.padding_T).view(self.num_microbatches, -1).sum(dim=1)
        (y_TD.flatten().dot(self.out_grad_MBSD.flatten()) + loss_M.sum()).backward()
        return {
            "y": y_TD.detach().view_as(self.x_MBSD),
            "x": x_TD.grad.view_as(self.x_MBSD),
            "balance": balance_M.detach(),
            "z": z_M.detach(),
            **{name: leaf.grad for name, leaf in leaves.items()},
        }

    def check_report(self, report: RoutingReport, repeats: int = 1) -> None:
        """Compare what the log says with the whole batch, seen ``repeats`` times."""
        torch.testing.assert_close(report.balance_loss_L[0], self.expected["balance"].mean())
        torch.testing.assert_close(report.z_loss_L[0], self.expected["z"].mean())
        slot_T = torch.tensor(self.slot_T)
        real = int((slot_T >= 0).sum())
        assert report.tokens_L.tolist() == [real * repeats]
        assert report.dropped_L.tolist() == [int((slot_T >= self.capacity).sum()) / real]
        over = [int((slot_T >= self.capacity_at(factor)).sum()) for factor in CAPACITY_FACTOR_SWEEP]
        assert report.sweep_dropped_LF.tolist() == [[number / real for number in over]]
        chosen = self._probs_TE.argmax(dim=1)[~self.padding_T]
        load = torch.bincount(chosen, minlength=E).double() / real
        assert report.load_LE.tolist() == [load.tolist()]


@dataclass(frozen=True)
class WholeMicroBatch(Part):
    """One micro-batch, undivided, on a rank that works alone."""

    index: int = 0

    @classmethod
    def alone(cls, index: int) -> "WholeMicroBatch":
        """Return the part of a rank that shares nothing; every rank must call."""
        mine, _ = dist.new_subgroups(1)
        names = ("tp", "cp", "tp_cp", "tp_dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp")
        groups = ProcessGroupCollection(**dict.fromkeys(names, mine))
        return cls(Layout(1), groups, index)

    @property
    def microbatch(self) -> int:
        """Index of the micro-batch."""
        return self.index


def run_part(layer: SwitchMLP, oracle: Oracle, part: Part) -> dict[str, Tensor]:
    """Run forward and backward on one rank's tokens; weights' gradients are accumulated."""

    def hidden(values_MBSD: Tensor) -> Tensor:
        rows = part.of(values_MBSD)
        return rows.view(oracle.case.sequences, -1, *rows.shape[1:]).transpose(0, 1).contiguous()

    hidden_SBD = hidden(oracle.x_MBSD).requires_grad_()
    padding_MBS = oracle.padding_MBS
    mask_BS = None if padding_MBS is None else hidden(padding_MBS).t().contiguous()
    out_SBD, bias = layer(hidden_SBD, padding_mask=mask_BS)
    assert bias is None
    out_SBD.backward(hidden(oracle.out_grad_MBSD))
    return {
        "y": out_SBD.detach().transpose(0, 1).flatten(0, 1),
        "x": hidden_SBD.grad.transpose(0, 1).flatten(0, 1),
    }


def summed_gradients(layer: SwitchMLP, part: Part) -> dict[str, Tensor]:
    """Return the weights' gradients as Megatron sums them over ranks."""
    gradients = {
        "router": layer.router.weight.grad,
        "wi": layer.experts.weight1.grad,
        "wo": layer.experts.weight2.grad,
    }
    dist.all_reduce(gradients["router"])
    for name in ("wi", "wo"):
        dist.all_reduce(gradients[name], group=part.groups.expt_dp)
    return gradients


def check_against(oracle: Oracle, layer: SwitchMLP, part: Part) -> None:
    """Run a rank's part; everything it computes and logs is the reference's."""
    tracker = new_tracker()
    actual = run_part(layer, oracle, part)
    actual |= summed_gradients(layer, part)
    expected = oracle.expected
    parts = {
        "y": part.of(expected["y"]),
        "x": part.of(expected["x"]),
        "router": expected["router"],
        "wi": part.shard_of_wi(expected["wi"], gated=False),
        "wo": part.shard_of_wo(expected["wo"]),
    }
    for name, value in parts.items():
        torch.testing.assert_close(
            actual[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )
    dropped = torch.tensor(oracle.slot_T).view(oracle.x_MBSD.shape[:3])
    dropped = (dropped < 0) | (dropped >= oracle.capacity)
    # Not merely close to zero: the residual passes a dropped token on as it is.
    assert torch.equal(~actual["y"].bool().any(dim=1), part.of(dropped))
    oracle.check_report(tracker.step())
