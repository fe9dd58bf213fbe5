"""A lower bound of a layout's step time and memory, in a few multiplications.

Never above what :mod:`megatron_switch.planner.cost.timing` and
:mod:`megatron_switch.planner.cost.memory` say of any way to train with the same sizes: arithmetic
has no padding and no recomputation, bytes no latency, micro-batches are as many and virtual stages
as fine as they can be, and of the state only what no saving removes is counted.
"""

import math
from dataclasses import dataclass, replace

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import total_parameters
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.workload import Capacity, Training
from megatron_switch.planner.cost.timing import dropped_share, micro_batch_flops
from megatron_switch.planner.hardware.cluster import Hardware


@dataclass(frozen=True, slots=True)
class _Part:
    """Dense layers, or experts, on a rank: seconds of a step, and numbers of parameters."""

    busy: float
    end: float
    held: float
    owned: float


class LowerBound:
    """Lower bounds for one model, batch and cluster."""

    def __init__(
        self,
        model: Architecture,
        training: Training,
        hardware: Hardware,
        world_size: int,
        *,
        shard: bool = True,
        offload: bool = True,
    ) -> None:
        """Add up what does not depend on the layout.

        Args:
            model: The model.
            training: Batch and capacity.
            hardware: The cluster's parts.
            world_size: GPUs.
            shard: Whether weights and gradients may be cut over their copies.
            offload: Whether the optimizer may be on the host.
        """
        self._shard, self._offload = shard, offload
        self._dense_parts: dict[tuple[int, int, int], _Part] = {}
        self._expert_parts: dict[tuple[int, int, int], _Part] = {}
        # Attributes, because they are read for each of thousands of choices.
        self._width = training.width
        self._gradient_width = 4 if training.fp32_gradients else training.width
        self._key_values = 2 * model.kv_projection_size
        self._sparse = len(model.decoder.sparse_layers)
        self._pairs = 2 * model.decoder.num_layers - self._sparse
        if model.encoder is not None:
            encoder = len(model.encoder.sparse_layers)
            self._sparse += encoder
            self._pairs += 2 * model.encoder.num_layers - encoder + model.decoder.num_layers
        self._model, self._training, self._hardware = model, training, hardware
        self._ranks, self._budget = world_size, hardware.budget
        self._parameters = total_parameters(model)
        ends = model.padded_vocab_size * model.hidden_size * model.vocabulary_matrices
        routers = len(model.decoder.sparse_layers) * model.num_experts * model.hidden_size
        self._blocks = max(0, self._parameters.dense - ends - routers)
        # The least work: one micro-batch of one sequence on one rank, which drops most.
        self._kept = 1.0 - _least_dropped(model, training)
        sequence = _one_sequence(training)
        flops = micro_batch_flops(model, Layout(1), sequence)
        self._routed = 1.0 - dropped_share(model, Layout(1), sequence)
        # Rows of an expert are rounded on each rank, which can make them fewer than the share that
        # is routed: the dropped share is left out once more, as an allowance.
        matrices = (model.fc1_parts + 1) * model.hidden_size * model.moe_ffn_hidden_size
        not_routed = training.seq_length * (1.0 - self._routed) if model.num_experts else 0.0
        flops -= 6 * self._sparse * matrices * not_routed
        self._arithmetic = flops * training.global_batch_size / world_size / hardware.flops

    def kept_tokens_per_second(self, seconds: float, dropped: float | None = None) -> float:
        """Return the tokens a second of one GPU that reach their expert, at most.

        Args:
            seconds: Least time of a step.
            dropped: Share of tokens that are dropped; None for the least of all micro-batches.
        """
        tokens = self._training.global_batch_size * self._training.seq_length
        kept = self._kept if dropped is None else 1.0 - dropped
        return tokens / seconds / self._ranks * kept

    def seconds(
        self, sizes: Sizes, *, chunks: int | None = None, micro_batches: int | None = None
    ) -> float:
        """Return the least step time of any way to train with these sizes; infinite if none fits.

        Where state fits only with the optimizer on the host, what that costs is in it.

        Args:
            sizes: Parallel sizes.
            chunks: Virtual stages of each rank; None for as many as there can be.
            micro_batches: Of a step on a rank; None for as many as there can be.
        """
        dense, expert = self._dense_part(sizes), self._expert_part(sizes)
        states = self._states(sizes, dense, expert)
        budget = self._budget
        if min(states.values()) > budget:
            return math.inf
        hardware = self._hardware
        # The bubble is smallest with micro-batches of one sequence and chunks of one layer.
        passes = (chunks or self._model.decoder.num_layers // sizes.pp) * (
            micro_batches or self._sequences(sizes)
        )
        bubble = (sizes.pp - 1) / passes
        busy = self._arithmetic + dense.busy + expert.busy
        end = dense.end + expert.end
        on_host = all(size > budget for name, size in states.items() if name != "host")
        if on_host:  # 30 bytes of the step itself, gradients down, weights up
            end += (
                (34 + self._width) * (dense.owned + expert.owned) / (hardware.host_link_gb_s * 1e9)
            )
        else:
            end += 30 * (dense.owned + expert.owned) / (hardware.hbm_gb_s * 1e9)
        return (busy * (1 + bubble) + end) * hardware.step_factor

    def least_state(self, sizes: Sizes) -> float:
        """Return the bytes of a rank's state under the greatest saving."""
        states = self._states(sizes, self._dense_part(sizes), self._expert_part(sizes))
        return min(states.values())

    def _states(self, sizes: Sizes, dense: "_Part", expert: "_Part") -> dict[str, float]:
        """Return the least bytes of a rank's state by where it is kept."""
        kept = (self._width + self._gradient_width) * (expert.held + dense.held)
        optimizer = 12.0 if self._width == 2 else 8.0
        cut = expert.owned + dense.owned
        states = {"distributed": kept + optimizer * cut}
        if self._shard and sizes.pp == 1:
            states["sharded"] = (self._width + self._gradient_width + optimizer) * cut
        if self._offload:
            states["host"] = kept
        return states

    def _dense_part(self, sizes: Sizes) -> "_Part":
        """Return what follows from TP, PP and CP, worked out once for all EP and ETP."""
        key = sizes.tp, sizes.pp, sizes.cp
        if key not in self._dense_parts:
            held, copies = self._dense_on_a_rank(sizes), self._ranks // (sizes.tp * sizes.pp)
            sequences = self._sequences(sizes)
            busy = self._tensor_seconds(sizes, sequences) + self._context_seconds(sizes, sequences)
            end = self._gradient_seconds(held, copies, sizes.tp)
            self._dense_parts[key] = _Part(busy, end, held, held / copies)
        return self._dense_parts[key]

    def _expert_part(self, sizes: Sizes) -> "_Part":
        """Return what follows from EP, ETP and PP, worked out once for all TP and CP."""
        key = sizes.ep, sizes.etp, sizes.pp
        if key not in self._expert_parts:
            parts = sizes.ep * sizes.etp * sizes.pp
            held, copies = self._parameters.expert / parts, self._ranks // parts
            busy = self._exchange_seconds(sizes) if self._model.num_experts else 0.0
            end = self._gradient_seconds(held, copies, sizes.ep * sizes.etp)
            self._expert_parts[key] = _Part(busy, end, held, held / copies)
        return self._expert_parts[key]

    def _sequences(self, sizes: Sizes) -> int:
        copies = self._ranks // (sizes.tp * sizes.pp)
        return self._training.global_batch_size // (copies // sizes.cp)

    def _dense_on_a_rank(self, sizes: Sizes) -> float:
        """Return the dense parameters of a rank, at least: without a vocabulary on every stage."""
        return self._blocks / (sizes.tp * sizes.pp)

    def _tensor_seconds(self, sizes: Sizes, sequences: int) -> float:
        if sizes.tp == 1:
            return 0.0
        tokens = sequences * self._training.seq_length / sizes.cp
        sent = 5 * self._pairs / sizes.pp * tokens * self._model.hidden_size * self._width
        return self._ring(sent * (sizes.tp - 1) / sizes.tp, sizes.tp, 1)

    def _context_seconds(self, sizes: Sizes, sequences: int) -> float:
        if sizes.cp == 1:
            return 0.0
        tokens = sequences * self._training.seq_length / sizes.cp
        one = tokens * self._key_values * self._width / sizes.tp
        inside = sizes.tp * sizes.cp <= self._hardware.gpus_per_node
        link = self._hardware.node if inside else self._hardware.network
        sent = 3 * (sizes.cp - 1) * self._model.decoder.num_layers / sizes.pp * one
        return sent / (link.alltoall_gb_s * 1e9)

    def _exchange_seconds(self, sizes: Sizes) -> float:
        members = sizes.ep * sizes.etp
        if members == 1:
            return 0.0
        model, training = self._model, self._training
        tokens = training.global_batch_size * training.seq_length / self._ranks * sizes.pp
        payload = tokens * sizes.etp * self._routed * model.hidden_size * self._width
        local = min(members, self._hardware.gpus_per_node)
        across = payload * (members - local) / members
        inside = payload * (local - 1) / members
        seconds = max(
            across / (self._hardware.network.alltoall_gb_s * 1e9),
            inside / (self._hardware.node.alltoall_gb_s * 1e9),
        )
        return 4 * self._sparse / sizes.pp * seconds

    def _gradient_seconds(self, parameters: float, copies: int, stride: int) -> float:
        if copies == 1:
            return 0.0
        sent = parameters * (self._gradient_width + self._width) * (copies - 1) / copies
        return self._ring(sent, copies, stride)

    def _ring(self, sent: float, members: int, stride: int) -> float:
        inside = members * stride <= self._hardware.gpus_per_node
        link = self._hardware.node if inside else self._hardware.network
        return sent / (link.ring_gb_s * 1e9)


def _one_sequence(training: Training) -> Training:
    return replace(
        training,
        micro_batch_size=1,
        global_batch_size=1,
        dispatch="packed",
        recompute="none",
        capacity=_bounded(training.capacity),
    )


def _bounded(capacity: Capacity) -> Capacity:
    """Return a capacity that is counted over the tokens of one rank."""
    return replace(capacity, group="microbatch") if capacity.group == "ep" else capacity


def _least_dropped(model: Architecture, training: Training) -> float:
    """Return the share of tokens dropped at least, at the largest micro-batch."""
    if not model.num_experts or training.capacity.group == "ep":
        return 0.0
    return dropped_share(model, Layout(1), replace(training, micro_batch_size=64))
