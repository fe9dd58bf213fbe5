"""GPU, network card and memory domain of each rank, from a sysfs made for the test."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.launch.binding import affinity_warning, numbers_in, read_bindings


def pci(root, address, *, bridges, kind, numa, vendor="0x10de"):
    """Make a PCI device under a chain of bridges, and the link that the bus has to it."""
    folder = root / "devices" / "/".join([f"pci{bridges[0]}", *bridges[1:], address])
    folder.mkdir(parents=True)
    (folder / "class").write_text(f"{kind}\n")
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "numa_node").write_text(f"{numa}\n")
    bus = root / "bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / address).symlink_to(folder)
    return folder


@pytest.fixture
def sysfs(tmp_path):
    """Two domains with two GPUs and two cards each; in the second the cards come first."""
    for numa in (0, 1):
        for i in (0, 1):
            switch = [f"0000:{numa}0", f"0000:{numa}{i}:01.0"]
            pci(tmp_path, f"0000:{numa}{i}:02.0", bridges=switch, kind="0x030200", numa=numa)
            card = pci(
                tmp_path,
                f"0000:{numa}{i}:03.0",
                bridges=switch,
                kind="0x020700",
                numa=numa,
                vendor="0x15b3",
            )
            name = tmp_path / f"class/infiniband/mlx5_{2 * numa + (1 - i if numa else i)}"
            name.mkdir(parents=True)
            (name / "device").symlink_to(card)
        node = tmp_path / f"devices/system/node/node{numa}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{8 * numa}-{8 * numa + 7}\n")
    # What is no GPU of ours.
    pci(tmp_path, "0000:99:00.0", bridges=["0000:99"], kind="0x030000", numa=0, vendor="0x1a03")
    return tmp_path


def test_every_gpu_gets_the_card_on_its_own_switch(sysfs):
    bindings = read_bindings(sysfs, {})
    rows = [(b.local_rank, b.gpu.address, b.card.name, b.gpu.numa_node) for b in bindings]
    assert rows == [
        (0, "0000:00:02.0", "mlx5_0", 0),
        (1, "0000:01:02.0", "mlx5_1", 0),
        (2, "0000:10:02.0", "mlx5_3", 1),
        (3, "0000:11:02.0", "mlx5_2", 1),
    ]
    assert [b.processors for b in bindings] == ["0-7", "0-7", "8-15", "8-15"]


def test_cards_that_are_equally_near_are_dealt_out(tmp_path):
    for i in range(2):
        pci(tmp_path, f"0000:0{i}:00.0", bridges=["0000:00"], kind="0x030200", numa=-1)
        card = pci(tmp_path, f"0000:1{i}:00.0", bridges=["0000:1"], kind="0x0207", numa=-1)
        name = tmp_path / f"class/infiniband/mlx5_{i}"
        name.mkdir(parents=True)
        (name / "device").symlink_to(card)
    assert [b.card.name for b in read_bindings(tmp_path, {})] == ["mlx5_0", "mlx5_1"]


def test_visible_devices_and_named_cards_are_respected(sysfs):
    bindings = read_bindings(sysfs, {"CUDA_VISIBLE_DEVICES": "3,0", "NCCL_IB_HCA": "=mlx5_2"})
    assert [(b.gpu.address, b.card.name) for b in bindings] == [
        ("0000:11:02.0", "mlx5_2"),
        ("0000:00:02.0", "mlx5_2"),
    ]
    bindings = read_bindings(sysfs, {"NCCL_IB_HCA": "^mlx5_0,mlx5_1"})
    assert {b.card.name for b in bindings} == {"mlx5_2", "mlx5_3"}


def test_a_host_without_cards(sysfs):
    bindings = read_bindings(sysfs, {"NCCL_IB_HCA": "mlx4"})
    assert [b.card for b in bindings] == [None] * 4


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("4", r"contains GPU 4, but this host has 4"),
        ("GPU-ab12", r"contains 'GPU-ab12', but sysfs identifies GPUs by index"),
        ("", r"No NVIDIA GPU"),
    ],
)
def test_gpus_that_are_not_there(sysfs, visible, message):
    with pytest.raises(ConfigError, match=message):
        read_bindings(sysfs, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_login_node_says_where_to_run(tmp_path):
    with pytest.raises(ConfigError, match=r"No NVIDIA GPU .* Run this on a compute node: srun"):
        read_bindings(tmp_path, {})


def test_a_rank_outside_its_numa_node_is_warned_with_the_numactl_command(sysfs):
    third = read_bindings(sysfs, {})[2]
    assert affinity_warning(third, {8, 9}) == ""
    assert affinity_warning(third, {8, 9, 0, 1}).startswith(
        "may run on 2 CPU cores outside its GPU"
    )
    assert "numactl --cpunodebind=1 --membind=1" in affinity_warning(third, {0})


def test_lists_of_the_kernel():
    assert numbers_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numbers_in("") == set()
