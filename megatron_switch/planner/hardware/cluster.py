"""What a cluster is made of: memory, arithmetic, links; presets, and files of the same keys.

Numbers of presets are peak figures of data sheets and bandwidths that collective libraries are
known to achieve. Latencies, the efficiency of matrix products and the size of a leaf switch are
assumptions, so that every predicted time is an estimate until
:mod:`megatron_switch.planner.hardware.link_fit` has fitted links to measurements of the cluster
itself.

Memory and bandwidth are decimal (1 GB is 1e9 bytes); bandwidth is what one GPU sends in one
direction. One network card a GPU is the ceiling of an all-to-all across nodes.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import GroupSpread, group_spread
from megatron_switch.utils.fields import Fields

_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class Link:
    """How GPUs reach one another.

    Attributes:
        ring_gb_s: What one GPU sends in all-reduce, all-gather and reduce-scatter (NCCL's bus
            bandwidth), 1e9 bytes a second.
        ring_latency_us: What such a collective takes on top of its bytes.
        alltoall_gb_s: The same in an all-to-all, and from one GPU to another.
        alltoall_latency_us: What an all-to-all takes on top of its bytes.
        peer_us: What each further peer of an all-to-all costs the sender.
    """

    ring_gb_s: float
    ring_latency_us: float
    alltoall_gb_s: float
    alltoall_latency_us: float
    peer_us: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster's node, and how nodes are joined.

    Attributes:
        name: Preset or file.
        gpu: Description of the GPU.
        gpus_per_node: GPUs that share the fast link.
        nodes_per_leaf: Nodes under one leaf switch.
        memory_gb: Memory of a GPU, 1e9 bytes.
        reserved_gb: Of that, what context, communicators and fragmentation take.
        peak_tflops: Dense bf16 arithmetic of a GPU, 1e12 operations a second.
        gemm_efficiency: Share of the peak that matrix products achieve.
        hbm_gb_s: Bandwidth of a GPU's memory.
        node: Link inside a node.
        network: Link between nodes, for each GPU.
        host_link_gb_s: Between a GPU and its host's memory, in one direction.
        host_memory_gb: Memory of a node's host.
        numa_nodes: Memory domains of a node's host.
        fitted: Whether links were fitted to measurements.
        step_factor: Measured over predicted step time, 1.0 until a step was measured.
    """

    name: str
    gpu: str
    gpus_per_node: int
    nodes_per_leaf: int
    memory_gb: float
    reserved_gb: float
    peak_tflops: float
    gemm_efficiency: float
    hbm_gb_s: float
    node: Link
    network: Link
    host_link_gb_s: float
    host_memory_gb: float
    numa_nodes: int
    fitted: bool = False
    step_factor: float = 1.0

    @property
    def budget(self) -> int:
        """Bytes of a GPU that tensors may take."""
        return round((self.memory_gb - self.reserved_gb) * 1e9)

    @property
    def flops(self) -> float:
        """Operations a second that matrix products achieve on one GPU."""
        return self.peak_tflops * 1e12 * self.gemm_efficiency

    def spread(self, layout: Layout, *axes: str) -> GroupSpread:
        """Return where the group of rank 0 along ``axes`` runs."""
        return group_spread(layout, axes, self.gpus_per_node, self.nodes_per_leaf)

    def expert_spread(self, layout: Layout) -> GroupSpread:
        """Return where the group runs over which the all-to-all of tokens goes."""
        return self.spread(layout, "etp", "ep")

    def spreads(self, layout: Layout) -> dict[str, GroupSpread]:
        """Return where the groups of rank 0 run, by their axes in capitals."""
        axes = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
        found = {axis.upper(): self.spread(layout, axis) for axis in axes}
        return {**found, "ETP x EP": self.expert_spread(layout)}


def preset_names() -> list[str]:
    """Return the names that :func:`load_hardware` knows."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def load_hardware(name: str, *, gpus_per_node: int | None = None) -> Hardware:
    """Return the hardware of a preset or of a JSON file.

    Args:
        name: Name of a preset, or path of a file.
        gpus_per_node: Instead of the file's.

    Raises:
        ConfigError: If there is no such preset or file, or the file is malformed; with line and
            key.
    """
    path = _PRESETS / f"{name}.json"
    if name not in preset_names():
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"--hardware names a preset or a JSON file, and {name} is neither. Presets are "
                f"{', '.join(preset_names())}; a file has the keys of these."
            )
    hardware = _from_file(Fields.read(path, "hardware file"), name)
    return hardware if gpus_per_node is None else replace(hardware, gpus_per_node=gpus_per_node)


def hardware_as_json(hardware: Hardware) -> dict[str, object]:
    """Return the content of a file that :func:`load_hardware` reads as ``hardware``."""
    values: dict[str, object] = {}
    for field in fields(hardware):
        value = getattr(hardware, field.name)
        if field.name != "name":
            values[field.name] = vars(value) if isinstance(value, Link) else value
    return values


_MOST_GPUS = 1024
_COUNTS = ("gpus_per_node", "nodes_per_leaf", "numa_nodes")
_AMOUNTS = ("memory_gb", "peak_tflops", "hbm_gb_s", "host_link_gb_s", "host_memory_gb")


def _from_file(file: Fields, name: str) -> Hardware:
    file.only([field.name for field in fields(Hardware) if field.name != "name"])
    counts = {key: file.integer(key) for key in _COUNTS}
    if counts["gpus_per_node"] > _MOST_GPUS:
        raise file.error("gpus_per_node", f"is at most {_MOST_GPUS}, the GPUs of a fast link.")
    amounts: dict[str, Any] = {key: file.number(key, above=0) for key in _AMOUNTS}
    efficiency = file.number("gemm_efficiency", above=0)
    if efficiency > 1:
        raise file.error(
            "gemm_efficiency", f"is a share of the peak, at most 1, found {efficiency}."
        )
    reserved = file.number("reserved_gb", least=0)
    if reserved >= amounts["memory_gb"]:
        raise file.error("reserved_gb", f"leaves nothing of memory_gb {amounts['memory_gb']:g}.")
    return Hardware(
        name=name,
        gpu=file.text("gpu"),
        gemm_efficiency=efficiency,
        reserved_gb=reserved,
        node=_link(file.inner("node")),
        network=_link(file.inner("network")),
        fitted=file.flag("fitted", False),
        step_factor=file.number("step_factor", 1.0, least=0),
        **counts,
        **amounts,
    )


def _link(file: Fields) -> Link:
    file.only([field.name for field in fields(Link)])
    return Link(
        ring_gb_s=file.number("ring_gb_s", above=0),
        alltoall_gb_s=file.number("alltoall_gb_s", above=0),
        ring_latency_us=file.number("ring_latency_us", least=0),
        alltoall_latency_us=file.number("alltoall_latency_us", least=0),
        peer_us=file.number("peer_us", least=0),
    )
