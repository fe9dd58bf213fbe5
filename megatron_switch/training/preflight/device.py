"""Which device a run uses: decided once, before any process group exists.

``--switch-device auto`` takes the CPU only where no GPU is present *or promised*. A node whose
driver does not match torch's CUDA, a container without the device files, a job that SLURM gave a
GPU: there a silent fall to the CPU would waste the allocation, so it is an error instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_switch.errors import ConfigError

_SLURM_GPU_VARIABLES = (
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DEVICE_FOLDER = Path("/dev")
_WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")  # Windows lends this instead of device files
_NO_DEVICE = ("", "-1", "NoDevFiles")  # hidden on purpose, by the user or by SLURM


@dataclass(frozen=True)
class Surroundings:
    """What this process can see of GPUs and of the job it is part of."""

    cuda_works: bool
    """torch can use a CUDA device here."""
    gpu_signs: tuple[str, ...]
    """Reasons to believe that a GPU is present or promised."""
    num_gpus: int
    """CUDA devices that torch sees."""
    num_local_ranks: int
    """Ranks of the job on this host."""
    num_hosts: int
    """Hosts of the job, as far as the environment says."""
    torch_cuda: str
    """CUDA version that torch was built with."""
    driver: str
    """Version line of the loaded NVIDIA driver."""


def look_around(environ: Mapping[str, str]) -> Surroundings:
    """Return what this process sees of GPUs and of its job.

    Args:
        environ: The process environment.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    signs = []
    if visible is None:
        files = [*sorted(_DEVICE_FOLDER.glob("nvidia[0-9]*")), _WSL_DRIVER]
        signs = [f"{path} exists" for path in files if path.exists()]
    elif visible not in _NO_DEVICE:
        signs = [f"CUDA_VISIBLE_DEVICES={visible}"]
    for name in _SLURM_GPU_VARIABLES:
        if environ.get(name, "0") not in ("", "0"):
            signs.append(f"{name}={environ[name]}")
    local_ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    hosts = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    if "LOCAL_WORLD_SIZE" in environ:
        hosts = max(hosts, -(-int(environ.get("WORLD_SIZE", "1")) // local_ranks))
    return Surroundings(
        cuda_works=torch.cuda.is_available(),
        gpu_signs=tuple(signs),
        num_gpus=torch.cuda.device_count(),
        num_local_ranks=local_ranks,
        num_hosts=hosts,
        torch_cuda=torch.version.cuda or "none (a CPU-only build)",
        driver=_DRIVER_FILE.read_text().split("\n")[0] if _DRIVER_FILE.exists() else "none loaded",
    )


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], around: Surroundings
) -> Literal["cuda", "cpu"]:
    """Return the device of the run.

    Raises:
        ConfigError: CUDA is wanted, present or promised, but cannot be used, by this many ranks
            at least; or ``auto`` would put a job of several hosts on CPUs.
    """
    if wanted == "cpu":
        return "cpu"
    if around.cuda_works:
        if around.num_local_ranks > around.num_gpus:
            raise ConfigError(
                f"Every rank needs a GPU of its own, but {around.num_local_ranks} ranks share this "
                f"host and torch sees {around.num_gpus} of its GPUs (CUDA_VISIBLE_DEVICES). Start "
                f"{around.num_gpus} ranks a host (torchrun --nproc-per-node), show each rank all "
                "GPUs (srun --gpus-per-node, not --gpus-per-task), or give --switch-device cpu."
            )
        return "cuda"
    versions = f"torch was built for CUDA {around.torch_cuda}; NVIDIA driver: {around.driver}"
    if wanted == "cuda":
        raise ConfigError(
            f"--switch-device cuda needs a GPU that torch can use, and there is none: {versions}. "
            "Install a driver at least as new as torch's CUDA, start the container with GPU "
            "access, or train on the CPU with --switch-device cpu."
        )
    if around.gpu_signs:
        raise ConfigError(
            f"A GPU is present or promised ({', '.join(around.gpu_signs)}) but torch cannot use "
            f"it: {versions}. Fix the driver or the container, or give --switch-device cpu to "
            "train on the CPU all the same."
        )
    if around.num_hosts > 1:
        raise ConfigError(
            f"This job has {around.num_hosts} hosts and no GPU on this one; --switch-device auto "
            "takes the CPU only for a job on one host. Give --switch-device cpu if CPUs are meant."
        )
    return "cpu"
