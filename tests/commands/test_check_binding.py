"""``megatron-switch check-binding``: a table of a host, or a line of a rank."""

import os

import pytest

from megatron_switch.cli import main
from megatron_switch.commands import check_binding
from megatron_switch.launch.binding import Binding, PciDevice


@pytest.fixture
def two_gpus(monkeypatch):
    here = sorted(os.sched_getaffinity(0))
    devices = [PciDevice(f"0000:0{i}:00.0", f"0000:0{i}:00.0", i, ()) for i in (0, 1)]
    card = PciDevice("mlx5_0", "0000:09:00.0", 0, ())
    near = ",".join(map(str, here))
    bindings = [Binding(0, devices[0], card, near), Binding(1, devices[1], None, "9999")]
    monkeypatch.setattr(check_binding, "read_bindings", lambda: bindings)


def test_a_host_shows_all_its_ranks(two_gpus, capsys):
    assert main(["check-binding"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["local", "rank"]
    assert lines[2].split()[:4] == ["0", "0000:00:00.0", "mlx5_0", "0"]
    assert lines[3].split()[:4] == ["1", "0000:01:00.0", "none", "1"]


def test_a_rank_shows_its_own(two_gpus, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "8")
    assert main(["check-binding"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("rank 8 on ")
    assert "GPU 0000:00:00.0, card mlx5_0, NUMA node 0: bound to its GPU" in line


def test_a_rank_that_is_bound_badly_says_so_and_fails(two_gpus, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert main(["check-binding"]) == 1
    line = capsys.readouterr().out
    assert line.startswith("rank 5 on ")
    assert "no network card" in line
    assert "numactl --cpunodebind=1 --membind=1" in line


def test_more_ranks_than_gpus(two_gpus, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert main(["check-binding"]) == 2
    assert "Local rank 2 has no GPU" in capsys.readouterr().err
    assert main(["check-binding", "--all"]) == 0
