"""The CPU is taken only where no GPU is present or promised; every other case explains itself."""

from dataclasses import replace

import pytest
import torch

from megatron_switch.errors import ConfigError
from megatron_switch.training.preflight import device
from megatron_switch.training.preflight.device import Surroundings, choose_device, look_around

NOTHING = Surroundings(
    cuda_works=False,
    gpu_signs=(),
    num_gpus=0,
    num_local_ranks=1,
    num_hosts=1,
    torch_cuda="13.0",
    driver="none loaded",
)
GPUS = replace(NOTHING, cuda_works=True, gpu_signs=("a GPU",), num_gpus=2, num_local_ranks=2)


@pytest.fixture(autouse=True)
def _a_host_without_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(device, "_WSL_DRIVER", tmp_path / "libcuda.so.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("wanted", "around", "chosen"),
    [
        ("auto", NOTHING, "cpu"),
        ("auto", GPUS, "cuda"),
        ("cuda", GPUS, "cuda"),
        ("cpu", GPUS, "cpu"),
        ("cpu", replace(NOTHING, num_hosts=4, gpu_signs=("SLURM_GPUS=8",)), "cpu"),
    ],
)
def test_a_gpu_is_chosen_where_one_works(wanted, around, chosen):
    assert choose_device(wanted, around) == chosen


@pytest.mark.parametrize(
    ("wanted", "around", "message"),
    [
        (
            "cuda",
            NOTHING,
            r"--switch-device cuda needs a GPU .* built for CUDA 13\.0; NVIDIA driver: none loaded"
            r".*--switch-device cpu",
        ),
        (
            "auto",
            replace(NOTHING, gpu_signs=("/dev/nvidia0 exists", "SLURM_GPUS=1")),
            r"present or promised \(/dev/nvidia0 exists, SLURM_GPUS=1\) but torch cannot use it"
            r".*CUDA 13\.0.*driver: none loaded.*--switch-device cpu",
        ),
        (
            "auto",
            replace(NOTHING, num_hosts=4),
            r"4 hosts and no GPU on this one.*--switch-device cpu if CPUs are meant",
        ),
        (
            "auto",
            replace(GPUS, num_local_ranks=8),
            r"8 ranks share this host and torch sees 2 of its GPUs.*Start 2 ranks a host",
        ),
    ],
)
def test_what_cannot_work_is_explained(wanted, around, message):
    with pytest.raises(ConfigError, match=message):
        choose_device(wanted, around)


@pytest.mark.parametrize(
    ("environ", "signs"),
    [
        ({}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("CUDA_VISIBLE_DEVICES=0,1",)),
        ({"SLURM_JOB_GPUS": "3"}, ("SLURM_JOB_GPUS=3",)),
        ({"SLURM_GPUS_ON_NODE": "0"}, ()),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, ("SLURM_GPUS_PER_NODE=h100:8",)),
        ({"SLURM_GPUS_PER_TASK": "1"}, ("SLURM_GPUS_PER_TASK=1",)),
        ({"SLURM_GPUS_PER_SOCKET": "2"}, ("SLURM_GPUS_PER_SOCKET=2",)),
        # Hidden by hand, a promise of SLURM's still counts.
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS": "8"}, ("SLURM_GPUS=8",)),
    ],
)
def test_a_promise_in_the_environment_is_seen(environ, signs):
    assert look_around(environ).gpu_signs == signs


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_device_files_are_seen_unless_hidden_on_purpose(tmp_path, hidden):
    for name in ("nvidia1", "nvidia0", "nvidiactl", "libcuda.so.1"):
        (tmp_path / name).touch()
    seen = ("nvidia0", "nvidia1", "libcuda.so.1")  # the last one on Windows' Linux
    expected = tuple(f"{tmp_path}/{name} exists" for name in seen)
    assert look_around({}).gpu_signs == expected
    assert look_around({"CUDA_VISIBLE_DEVICES": hidden}).gpu_signs == ()


@pytest.mark.parametrize(
    ("environ", "hosts", "local_ranks"),
    [
        ({}, 1, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 1, 8),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2, 8),
        ({"SLURM_JOB_NUM_NODES": "4"}, 4, 1),
        # srun starts ranks one by one, and says nothing of how many there are on a host.
        ({"WORLD_SIZE": "16", "SLURM_JOB_NUM_NODES": "2"}, 2, 1),
    ],
)
def test_hosts_and_ranks_are_counted(environ, hosts, local_ranks):
    around = look_around(environ)
    assert (around.num_hosts, around.num_local_ranks) == (hosts, local_ranks)


def test_versions_are_looked_up(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    assert look_around({}).torch_cuda == "none (a CPU-only build)"
    assert look_around({}).driver == "none loaded"
    (tmp_path / "version").write_text("NVRM version: 580.65\nGCC version: 12\n")
    assert look_around({}).driver == "NVRM version: 580.65"
