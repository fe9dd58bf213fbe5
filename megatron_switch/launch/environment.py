"""Environment variables of a launch, by GPU generation and flags, each with its reason.

Only variables that apply to every cluster of that kind. Network interfaces, cards and timeouts are
site-specific and are not set; variables that are already set take precedence.

Sources: Megatron-Core 0.19.2 (``training/arguments.py`` checks CUDA_DEVICE_MAX_CONNECTIONS), its
MoE guide (allocator, NVLS), Transformer Engine's SM margins for overlapped communication.
"""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_switch.errors import ConfigError
from megatron_switch.launch.job import LaunchJob

Generation = Literal["ampere", "hopper", "blackwell"]

_GPUS: dict[str, Generation] = {
    r"\bA(10|30|40|100|800)\b": "ampere",
    r"\bG?H(20|100|200|800)\b": "hopper",
    r"\bG?B(100|200|300)\b": "blackwell",
}


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: Its name.
        value: Default value; bash expands it.
        reason: Why it is set; rendered as a comment.
    """

    name: str
    value: str
    reason: str


def generation_of(gpu: str) -> Generation:
    """Return the generation of a GPU from its description in a hardware file.

    Raises:
        ConfigError: If the description contains no known name.
    """
    for pattern, generation in _GPUS.items():
        if re.search(pattern, gpu):
            return generation
    raise ConfigError(
        f"The generation of the hardware's \"gpu\", '{gpu}', is unknown; names such as A100, H100 "
        "or B200 are recognised. Set --generation ampere, hopper or blackwell."
    )


def environment_of(job: LaunchJob, generation: Generation) -> list[Variable]:
    """Return the variables of a launch, in the order of the script."""
    values = job.values
    found = _connections(job, generation)
    found.append(
        Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "expert buffers change size: less fragmentation",
        )
    )
    if generation != "ampere":
        found.append(
            Variable("NCCL_NVLS_ENABLE", "0", "NVLink SHARP's buffers cost memory in every group")
        )
    if values.on("fine-grained-activation-offloading"):
        found.append(
            Variable(
                "NVTE_CPU_OFFLOAD_V1",
                "1",
                "required by Megatron for activation offloading with Transformer Engine 2.10",
            )
        )
    if values.on("overlap-grad-reduce"):
        for side in ("FWD", "BWD"):
            found.append(
                Variable(
                    f"NVTE_{side}_LAYERNORM_SM_MARGIN",
                    "16",
                    "norm kernels leave SMs to the overlapped gradient reduction",
                )
            )
    return [*found, *_HOST]


def _connections(job: LaunchJob, generation: Generation) -> list[Variable]:
    """Return the number of hardware queues of a GPU where the default is wrong."""
    name, values, layout = "CUDA_DEVICE_MAX_CONNECTIONS", job.values, job.layout
    if values.on("overlap-moe-expert-parallel-comm"):
        return [Variable(name, "32", "the exchange of tokens overlaps with another micro-batch")]
    if values.on("use-megatron-fsdp") or generation == "blackwell" or layout.tp * layout.cp == 1:
        return []  # with FSDP one queue would prevent the overlap of prefetch; Megatron refuses it
    reason = "kernels must start in issue order with TP or CP"
    return [Variable(name, "1", reason)]


_HOST = (
    Variable("OMP_NUM_THREADS", "1", "ranks share the node's CPU cores"),
    Variable(
        "TOKENIZERS_PARALLELISM", "false", "data workers are forked after threads have started"
    ),
    Variable(
        "TRITON_CACHE_DIR",
        "${TMPDIR:-/tmp}/triton-${USER:-user}",
        "node-local: thousands of ranks would contend for one file system",
    ),
)
