"""GPU, network card and NUMA node of each rank of a host, read from sysfs.

Local rank ``i`` uses the ``i``-th visible GPU, in the order of PCI addresses. Its nearest network
card shares the longest path of the PCI tree with it; equally near cards are assigned round-robin,
so that on common nodes every GPU has its own. A rank is bound correctly if its allowed CPU cores
are those of the GPU's NUMA node.

Only files are read: no driver, no GPU library.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.errors import ConfigError

_SYSFS = Path("/sys")
_GPU_CLASSES = ("0x0302", "0x0300")  # 3D controller, VGA controller
_NVIDIA = "0x10de"


@dataclass(frozen=True)
class PciDevice:
    """A PCI device.

    Attributes:
        name: ``mlx5_0``, or the PCI address of a GPU.
        address: PCI address.
        numa_node: NUMA node, -1 if unknown.
        tree: PCI addresses from the root bridge down to the device.
    """

    name: str
    address: str
    numa_node: int
    tree: tuple[str, ...]


@dataclass(frozen=True)
class Binding:
    """Devices of one local rank.

    Attributes:
        local_rank: Rank on this host.
        gpu: Its GPU.
        card: Its network card; None if the host has none.
        processors: CPU cores of the GPU's NUMA node, in the kernel's list format.
    """

    local_rank: int
    gpu: PciDevice
    card: PciDevice | None
    processors: str


def read_bindings(
    sysfs: Path = _SYSFS, environment: Mapping[str, str] = os.environ
) -> list[Binding]:
    """Return the devices of each local rank of this host.

    Args:
        sysfs: Mount point of sysfs.
        environment: ``CUDA_VISIBLE_DEVICES`` and ``NCCL_IB_HCA`` are read.

    Raises:
        ConfigError: If there is no GPU, or a selected one does not exist.
    """
    gpus = _visible(_gpus(sysfs), environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        raise ConfigError(
            f"No NVIDIA GPU found in {sysfs / 'bus/pci/devices'}. Run this on a compute node: srun "
            "--nodes 1 --gpus-per-node 8 megatron-switch check-binding."
        )
    cards = _nearest_cards(gpus, _cards(sysfs, environment.get("NCCL_IB_HCA", "")))
    return [
        Binding(rank, gpu, card, _processors(sysfs, gpu.numa_node))
        for rank, (gpu, card) in enumerate(zip(gpus, cards, strict=True))
    ]


def affinity_warning(binding: Binding, allowed: set[int]) -> str:
    """Return a warning about the CPU affinity of a rank; empty if it is correct.

    Args:
        binding: Devices of the rank.
        allowed: CPU cores of the process, from ``os.sched_getaffinity``.
    """
    if binding.gpu.numa_node < 0:
        return ""
    near = numbers_in(binding.processors)
    outside = allowed - near
    if not outside:
        return ""
    return (
        f"may run on {len(outside)} CPU cores outside its GPU's NUMA node; start it "
        f"with numactl --cpunodebind={binding.gpu.numa_node} --membind={binding.gpu.numa_node}"
    )


def numbers_in(listed: str) -> set[int]:
    """Return the numbers of a kernel list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _gpus(sysfs: Path) -> list[PciDevice]:
    folder = sysfs / "bus/pci/devices"
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        is_gpu = _text(path / "class").startswith(_GPU_CLASSES)
        if is_gpu and _text(path / "vendor") == _NVIDIA:
            found.append(_device(path.name, path))
    return found


def _cards(sysfs: Path, wanted: str) -> list[PciDevice]:
    """Return the network cards, filtered by ``NCCL_IB_HCA`` if it is set."""
    folder = sysfs / "class/infiniband"
    cards = [
        _device(path.name, path / "device")
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
    ]
    names = [name.split(":")[0] for name in wanted.lstrip("^=").split(",") if name]
    if not names:
        return cards
    exact = wanted.startswith("=") or wanted.startswith("^=")

    def is_named(card: PciDevice) -> bool:
        return any(card.name == name if exact else card.name.startswith(name) for name in names)

    return [card for card in cards if is_named(card) != wanted.startswith("^")]


def _device(name: str, path: Path) -> PciDevice:
    resolved = path.resolve()
    tree = tuple(part for part in resolved.parts if ":" in part)
    numa = _text(path / "numa_node")
    return PciDevice(name, resolved.name, int(numa) if numa.lstrip("-").isdigit() else -1, tree)


def _nearest_cards(gpus: Sequence[PciDevice], cards: Sequence[PciDevice]) -> list[PciDevice | None]:
    used = dict.fromkeys((card.name for card in cards), 0)
    chosen: list[PciDevice | None] = []
    for gpu in gpus:
        if not cards:
            chosen.append(None)
            continue
        card = max(cards, key=lambda card: (*_nearness(gpu, card), -used[card.name]))
        used[card.name] += 1
        chosen.append(card)
    return chosen


def _nearness(gpu: PciDevice, card: PciDevice) -> tuple[int, int]:
    """Return the length of the shared PCI path, and whether the NUMA node is shared."""
    shared = 0
    for mine, other in zip(gpu.tree, card.tree, strict=False):
        if mine != other:
            break
        shared += 1
    return shared, int(gpu.numa_node == card.numa_node)


def _visible(gpus: list[PciDevice], visible: str | None) -> list[PciDevice]:
    if visible is None:
        return gpus
    chosen = []
    for name in filter(None, visible.split(",")):
        if not name.isdigit():
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES contains '{name}', but sysfs identifies GPUs by index only. "
                "Use indices."
            )
        if int(name) >= len(gpus):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES contains GPU {name}, but this host has {len(gpus)}."
            )
        chosen.append(gpus[int(name)])
    return chosen


def _processors(sysfs: Path, numa_node: int) -> str:
    if numa_node < 0:
        return _text(sysfs / "devices/system/cpu/online")
    return _text(sysfs / f"devices/system/node/node{numa_node}/cpulist")


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""
