"""Routing statistics as sums, which add up over micro-batches, ranks and layers.

A layer's statistics are one row of sums. Rows are added, never averaged, until the very end, so
that a logged value is the effective value in every layout: the losses are recorded as this rank's
*share* (their sum over the ranks of a micro-batch is the loss), everything else as counts, the
micro-batches themselves included.

Counts are of tokens before any drop, padding excluded. The sweep counts the tokens that *would* be
dropped at other capacity factors; slots are numbered before capacity is applied, so it is exact and
costs one comparison per factor.

Shape letters:

    L  layers with experts    E  experts    F  factors of the sweep
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_switch.moe.routing import SwitchRouting

CAPACITY_FACTOR_SWEEP = (1.0, 1.1, 1.2, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Capacity factors at which the tokens that would be dropped are counted."""

_WIDTHS = (2, 3, len(CAPACITY_FACTOR_SWEEP))
"""Columns: both losses; micro-batches, tokens, dropped tokens; the sweep. Then the experts."""


def row_width(num_experts: int) -> int:
    """Return the number of columns of a row of statistics."""
    return sum(_WIDTHS) + num_experts


def not_finite(rows: Tensor) -> Tensor:
    """Return for each row whether a router saw infinity or NaN: bool, on the rows' device.

    Args:
        rows: Sums of rows of statistics, shape (L, row_width(E)).
    """
    z_loss_L = rows[:, 1]  # a sum of squared logsumexps
    return ~z_loss_L.isfinite()


def statistics_row(
    routing: SwitchRouting,
    *,
    balance_share: Tensor,
    z_share: Tensor,
    sweep_capacities: tuple[int, ...],
    counts_micro_batch: bool,
) -> Tensor:
    """Return one micro-batch's sums on this rank: float64, shape (row_width(E),).

    Args:
        routing: The router's decision, with slots counted over the whole capacity group.
        balance_share: This rank's share of the load-balancing loss, coefficient not applied.
        z_share: This rank's share of the router z-loss, coefficient not applied.
        sweep_capacities: Capacity at each factor of :data:`CAPACITY_FACTOR_SWEEP`.
        counts_micro_batch: Whether this rank counts the micro-batch; of the ranks that share one,
            one does.
    """
    losses = torch.stack([balance_share.detach().double(), z_share.detach().double()])
    tokens = routing.tokens_per_expert_E.sum()
    counts = torch.stack(
        [torch.full_like(tokens, counts_micro_batch), tokens, tokens - routing.kept_T.sum()]
    )
    sweep = torch.stack([(routing.slot_T >= capacity).sum() for capacity in sweep_capacities])
    return torch.cat([losses, counts, sweep, routing.tokens_per_expert_E])


@dataclass(frozen=True)
class RoutingReport:
    """Routing of all sparse layers over one training step or one evaluation."""

    layer_numbers: tuple[int, ...]
    """1-based numbers of the layers with experts; an encoder's come first."""
    balance_loss_L: Tensor
    """Load-balancing loss of each layer, coefficient not applied; balanced = 1.0."""
    z_loss_L: Tensor
    """Router z-loss of each layer, coefficient not applied."""
    tokens_L: Tensor
    """Tokens routed."""
    dropped_L: Tensor
    """Fraction of tokens that found no slot."""
    sweep_dropped_LF: Tensor
    """Fraction that would find no slot at each factor of :data:`CAPACITY_FACTOR_SWEEP`."""
    load_LE: Tensor
    """Fraction of a layer's tokens that chose each expert; rows sum to 1 where tokens came."""
    encoder_layers: int = 0
    """Layers of the encoder, sparse or not; 0 where there is one stack."""

    @classmethod
    def of(
        cls, rows: Tensor, layer_numbers: tuple[int, ...], *, encoder_layers: int = 0
    ) -> "RoutingReport":
        """Turn summed rows into means and fractions.

        Args:
            rows: Sums over all ranks and micro-batches: float64 on CPU, (L, row_width(E)).
            layer_numbers: 1-based number of each row's layer.
            encoder_layers: Layers of the encoder, which are numbered first.
        """
        num_experts = rows.shape[1] - sum(_WIDTHS)
        losses, counts, sweep, load = torch.split(rows, [*_WIDTHS, num_experts], dim=1)
        micro_batches, tokens, dropped = counts.unbind(dim=1)
        losses = losses / micro_batches.clamp(min=1.0)[:, None]
        divisor = tokens.clamp(min=1.0)  # a layer may have seen nothing
        return cls(
            layer_numbers=layer_numbers,
            balance_loss_L=losses[:, 0],
            z_loss_L=losses[:, 1],
            tokens_L=tokens,
            dropped_L=dropped / divisor,
            sweep_dropped_LF=sweep / divisor[:, None],
            load_LE=load / divisor[:, None],
            encoder_layers=encoder_layers,
        )

    def stacks(self) -> dict[str, "RoutingReport"]:
        """Return the reports of encoder and decoder; nothing where there is one stack."""
        if not self.encoder_layers:
            return {}
        numbers = torch.tensor(self.layer_numbers)
        masks = {
            "encoder": numbers <= self.encoder_layers,
            "decoder": numbers > self.encoder_layers,
        }
        return {name: self._of_layers(mask_L) for name, mask_L in masks.items() if mask_L.any()}

    def _of_layers(self, mask_L: Tensor) -> "RoutingReport":
        picked = {
            field.name: getattr(self, field.name)[mask_L]
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        numbers = torch.tensor(self.layer_numbers)[mask_L]
        return replace(self, **picked, layer_numbers=tuple(numbers.tolist()), encoder_layers=0)

    def layer_names(self) -> tuple[str, ...]:
        """Return a name for each layer; like Megatron's they count from 0, in each stack anew."""
        depth = self.encoder_layers
        if not depth:
            return tuple(f"layer_{number - 1}" for number in self.layer_numbers)
        return tuple(
            f"encoder_layer_{number - 1}"
            if number <= depth
            else f"decoder_layer_{number - depth - 1}"
            for number in self.layer_numbers
        )

    @property
    def balance_loss(self) -> float:
        """Mean load-balancing loss over layers."""
        return self.balance_loss_L.mean().item()

    @property
    def z_loss(self) -> float:
        """Mean router z-loss over layers."""
        return self.z_loss_L.mean().item()

    @property
    def dropped(self) -> float:
        """Mean fraction of dropped tokens over layers."""
        return self.dropped_L.mean().item()

    @property
    def load_ratio_L(self) -> Tensor:
        """Busiest expert's tokens over the mean expert's, for each layer."""
        return self.load_LE.amax(dim=1) * self.load_LE.shape[1]

    @property
    def load_ratio(self) -> float:
        """The worst layer's busiest expert over its mean expert; balanced = 1.0."""
        return self.load_ratio_L.max().item()

    @property
    def experts_below_half(self) -> int:
        """Experts, over all layers, that got less than half their fair share."""
        return int((self.load_LE < 0.5 / self.load_LE.shape[1]).sum())

    @property
    def dead_experts(self) -> int:
        """Experts, over all layers, that no token chose."""
        return int((self.load_LE == 0).sum())

    def scalars(self) -> dict[str, float]:
        """Return the values that are logged each iteration, by name.

        With two stacks those of each follow, under names that begin with the stack's.
        """
        whole = self._scalars()
        for stack, report in self.stacks().items():
            whole |= {f"{stack}_{name}": value for name, value in report._scalars().items()}
        return whole

    def _scalars(self) -> dict[str, float]:
        return {
            "load_balancing_loss": self.balance_loss,
            "z_loss": self.z_loss,
            "dropped": self.dropped,
            "expert_load_max_over_mean": self.load_ratio,
            "experts_below_half": float(self.experts_below_half),
            "dead_experts": float(self.dead_experts),
        }

    def per_layer(self) -> dict[str, list[float]]:
        """Return the values that are logged for each sparse layer, by name, in layer order."""
        return {
            "load_balancing_loss": self.balance_loss_L.tolist(),
            "z_loss": self.z_loss_L.tolist(),
            "dropped": self.dropped_L.tolist(),
            "expert_load_max_over_mean": self.load_ratio_L.tolist(),
        }
