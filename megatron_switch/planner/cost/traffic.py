"""Bytes that a rank sends, and how long that takes, for every kind of communication in a step.

    all-to-all    tokens to experts and back, twice forward and twice backward in a sparse layer,
                  and gates beside them; payload R x D elements, R the rows of a rank's experts
    slots         padded dispatch where TP x CP > 1: tokens of a capacity group are gathered,
                  outputs reduce-scattered
    tensor        all-gather and reduce-scatter around attention and dense layers, five forward
                  and backward, because the gather is repeated for the weight's gradient
    context       keys and values go round the ranks that share a sequence: forward once, backward
                  twice, as their gradients go round too
    pipeline      hidden states and their gradients between stages
    gradients     reduce-scatter of gradients and all-gather of weights over copies, once a step
                  (fully sharded: weights twice and gradients once a micro-batch, behind compute)

An all-to-all over nodes is a flat one in this project. Its time is that of the slower of its two
parts, inside and across nodes, where a sender serves one peer after another. A two-level one would
go over the node first and then across, with messages as many times larger; it is shown for
comparison. One network card a GPU is the ceiling of both.

Source of the counts: Megatron-Core 0.19.2 and ``moe.dispatcher``; of the links: see
:mod:`megatron_switch.planner.hardware.cluster`.
"""

from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import GroupSpread
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.activations import (
    extreme_stages,
    layers_of_stage,
    rows_of_experts,
)
from megatron_switch.planner.hardware.cluster import Hardware


@dataclass(frozen=True)
class Transfer:
    """One kind of communication of one rank in a step.

    Attributes:
        name: What it is.
        calls: Collectives in a step.
        inside: Bytes sent to ranks of the same node in a step.
        across: Bytes sent to other nodes in a step.
        seconds: Time of all of them, not overlapped.
        spread: Where the group runs.
    """

    name: str
    calls: int
    inside: float
    across: float
    seconds: float
    spread: GroupSpread


@dataclass(frozen=True)
class AllToAll:
    """One all-to-all of a rank.

    Attributes:
        payload: Bytes handed over, those for the rank itself included.
        inside: Of them, to other ranks of the node.
        across: Of them, to other nodes.
        flat: Seconds as one exchange.
        two_level: Seconds as one inside nodes and one across.
    """

    payload: float
    inside: float
    across: float
    flat: float
    two_level: float


def all_to_all(payload: float, spread: GroupSpread, hardware: Hardware) -> AllToAll:
    """Return bytes and time of one all-to-all of ``payload`` bytes a rank."""
    members, local = spread.members, spread.per_node
    inside = payload * (local - 1) / members
    across = payload * (members - local) / members
    node, network = hardware.node, hardware.network
    if members == 1:
        return AllToAll(payload, 0.0, 0.0, 0.0, 0.0)
    inside_s = inside / (node.alltoall_gb_s * 1e9) + (local - 1) * node.peer_us * 1e-6
    if members == local:
        seconds = inside_s + node.alltoall_latency_us * 1e-6
        return AllToAll(payload, inside, 0.0, seconds, seconds)
    bandwidth, peer = network.alltoall_gb_s * 1e9, network.peer_us * 1e-6
    across_s = across / bandwidth + (members - local) * peer
    flat = max(inside_s, across_s) + network.alltoall_latency_us * 1e-6
    latencies = (node.alltoall_latency_us + network.alltoall_latency_us) * 1e-6
    nodes = members / local
    two_level = (
        payload * (local - 1) / local / (node.alltoall_gb_s * 1e9)
        + payload * (nodes - 1) / nodes / bandwidth
        + (nodes - 1) * peer
        + latencies
    )
    return AllToAll(payload, inside, across, flat, two_level)


def ring_seconds(num_bytes: float, calls: int, spread: GroupSpread, hardware: Hardware) -> float:
    """Return the time of ring collectives that send ``num_bytes`` a rank in all."""
    link = hardware.node if spread.nodes == 1 else hardware.network
    return num_bytes / (link.ring_gb_s * 1e9) + calls * link.ring_latency_us * 1e-6


class Traffic:
    """Communication of one rank in one layout; the sums over a step."""

    def __init__(
        self, model: Architecture, layout: Layout, training: Training, hardware: Hardware
    ) -> None:
        """Keep the inputs; everything is computed by the methods.

        ``parameters`` and ``sparse_layers`` are then those of a rank of the fullest stage.
        """
        self._model, self._layout, self._training = model, layout, training
        self._hardware = hardware
        self._micro_batches = training.micro_batches(layout)
        # Stages may hold different numbers of sparse layers; the fullest sets the pace.
        numbers = extreme_stages(model, layout.pp, layout.vp)
        stages = [layers_of_stage(model, layout.pp, layout.vp, number) for number in numbers]
        self.sparse_layers = max(stage.sparse for stage in stages)
        self._dense = max(stage.dense for stage in stages)
        self._layers = stages[0].total
        counts = [stage_parameters(model, layout, number) for number in numbers]
        self.parameters = max(counts, key=lambda count: count.total)
        if model.encoder is not None:
            self.sparse_layers += len(model.encoder.sparse_layers)
            self._dense += model.encoder.num_dense
            # Attention to the encoder is one more in each layer of the decoder.
            self._layers += model.encoder.num_layers + model.decoder.num_layers
        self._elements = training.width * model.hidden_size

    def exchange(self) -> AllToAll:
        """Return one all-to-all of tokens."""
        rows = rows_of_experts(self._model, self._layout, self._training)
        return all_to_all(
            rows * self._elements, self._hardware.expert_spread(self._layout), self._hardware
        )

    def per_micro_batch(self) -> list[Transfer]:
        """Return what a micro-batch sends on one stage, as sums over the step."""
        found = [self._tensor(), self._context(), self._pipeline()]
        if self._model.num_experts:
            found.append(self._all_to_all())
            if self._training.dispatch == "padded":
                found.append(self._slots())
        return [transfer for transfer in found if transfer.spread.members > 1]

    def per_step(self) -> list[Transfer]:
        """Return what is sent once a step, or behind compute where state is fully sharded."""
        count = self.parameters
        found = [self._gradients("dense gradients", count.dense, "dp", "cp")]
        if count.expert:
            found.append(self._gradients("expert gradients", count.expert, "edp"))
        return [transfer for transfer in found if transfer.spread.members > 1]

    def _all_to_all(self) -> Transfer:
        spread = self._hardware.expert_spread(self._layout)
        tokens = self.exchange()
        rows = tokens.payload / self._elements
        gates = all_to_all(4.0 * rows, spread, self._hardware)
        again = self._training.recompute == "full" or self._training.recomputes("moe")
        times = self.sparse_layers * self._micro_batches
        # Tokens go to experts and back, forward and backward; gates one way in each. What is
        # computed again repeats the exchanges of forward.
        rounds, gate_rounds = (6, 3) if again else (4, 2)
        return Transfer(
            "all-to-all",
            times * (rounds + gate_rounds),
            times * (rounds * tokens.inside + gate_rounds * gates.inside),
            times * (rounds * tokens.across + gate_rounds * gates.across),
            times * (rounds * tokens.flat + gate_rounds * gates.flat),
            spread,
        )

    def _slots(self) -> Transfer:
        spread = self._hardware.spread(self._layout, "tp", "cp")
        again = self._training.recompute == "full" or self._training.recomputes("moe")
        calls = (6 if again else 4) * self.sparse_layers * self._micro_batches
        tokens = self._training.rank_tokens(self._layout) * (spread.members - 1)
        return self._ring("slots", calls, tokens * self._elements, spread)

    def _tensor(self) -> Transfer:
        spread = self._hardware.spread(self._layout, "tp")
        pairs = self._layers + self._dense  # every layer has attention, dense ones an MLP too
        rounds = 7 if self._training.recompute == "full" else 5
        calls = rounds * pairs * self._micro_batches
        whole = self._training.seq_length * self._training.micro_batch_size // self._layout.cp
        one = whole * self._elements * (spread.members - 1) / spread.members
        if not self._training.sequence_parallel:  # all-reduces, two forward and two backward
            calls, one = calls * 2 // 5, 2 * one
        return self._ring("tensor", calls, one, spread)

    def _context(self) -> Transfer:
        spread = self._hardware.spread(self._layout, "cp")
        calls = 3 * (spread.members - 1) * self._layers * self._micro_batches
        training, layout = self._training, self._layout
        tokens = training.seq_length * training.micro_batch_size / layout.cp
        one = tokens * 2 * self._model.kv_projection_size * training.width / layout.tp
        link = self._hardware.node if spread.nodes == 1 else self._hardware.network
        sent = calls * one
        seconds = sent / (link.alltoall_gb_s * 1e9) + calls * link.alltoall_latency_us * 1e-6
        inside = sent if spread.nodes == 1 else 0.0
        return Transfer("context", calls, inside, sent - inside, seconds, spread)

    def _pipeline(self) -> Transfer:
        spread = self._hardware.spread(self._layout, "pp")
        calls = 2 * self._layout.vp * self._micro_batches
        one = self._training.rank_tokens(self._layout) * self._elements
        inside = self._hardware.gpus_per_node >= 2 * self._layout.dense.strides["pp"]
        link = self._hardware.node if inside else self._hardware.network
        seconds = calls * (one / (link.alltoall_gb_s * 1e9) + link.alltoall_latency_us * 1e-6)
        sent = calls * one
        return Transfer("pipeline", calls, sent * inside, sent * (not inside), seconds, spread)

    def _gradients(self, name: str, parameters: int, *axes: str) -> Transfer:
        spread, training = self._hardware.spread(self._layout, *axes), self._training
        copies = spread.members
        gradient = 4 if training.fp32_gradients else training.width
        element, calls = gradient + training.width, 2
        if training.sharding == "replicated":
            element = 2 * gradient
        elif training.sharding == "fully_sharded":
            element = (gradient + 2 * training.width) * self._micro_batches
            calls = 3 * self._micro_batches
        return self._ring(name, calls, parameters * element * (copies - 1) / copies / calls, spread)

    def _ring(self, name: str, calls: int, one: float, spread: GroupSpread) -> Transfer:
        seconds = ring_seconds(calls * one, calls, spread, self._hardware)
        sent = calls * one
        inside = sent if spread.nodes == 1 else 0.0
        return Transfer(name, calls, inside, sent - inside, seconds, spread)
