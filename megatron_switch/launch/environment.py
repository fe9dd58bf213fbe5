"""Environment variables of a launch, by generation of GPU and by flags, each with its reason.

Only what holds on every cluster of that kind. Interfaces, cards and time-outs of a network belong
to its site, which sets them itself; whatever is set there wins over what stands here.

Sources: Megatron-Core 0.19.2 (``training/arguments.py`` checks CUDA_DEVICE_MAX_CONNECTIONS), its
MoE guide (allocator, NVLS), Transformer Engine's margins for overlapped communication.
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
        value: Its value where the environment has none; bash expands it.
        reason: Why it is set, for the script's reader.
    """

    name: str
    value: str
    reason: str


def generation_of(gpu: str) -> Generation:
    """Return the generation of a GPU from its description in a hardware file.

    Raises:
        ConfigError: If no known name is in it.
    """
    for pattern, generation in _GPUS.items():
        if re.search(pattern, gpu):
            return generation
    raise ConfigError(
        f"The hardware's \"gpu\", '{gpu}', names no GPU whose generation is known, such as A100, "
        "H100 or B200. Say --generation ampere, hopper or blackwell."
    )


def environment_of(job: LaunchJob, generation: Generation) -> list[Variable]:
    """Return the variables of a launch, in the order in which a reader wants them."""
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
                "Megatron refuses to offload activations beside Transformer Engine 2.10 without",
            )
        )
    if values.on("overlap-grad-reduce"):
        for side in ("FWD", "BWD"):
            found.append(
                Variable(
                    f"NVTE_{side}_LAYERNORM_SM_MARGIN",
                    "16",
                    "norms leave processors to the gradients' overlapped reduction",
                )
            )
    return [*found, *_HOST]


def _connections(job: LaunchJob, generation: Generation) -> list[Variable]:
    """Return how many queues of kernels a GPU has, where the default is wrong."""
    name, values, layout = "CUDA_DEVICE_MAX_CONNECTIONS", job.values, job.layout
    if values.on("overlap-moe-expert-parallel-comm"):
        return [Variable(name, "32", "the exchange of tokens overlaps with another micro-batch")]
    if values.on("use-megatron-fsdp") or generation == "blackwell" or layout.tp * layout.cp == 1:
        return []  # with FSDP one queue would keep prefetch from overlapping; Megatron refuses it
    reason = "kernels start in the order of issue, which Megatron requires here with TP or CP"
    return [Variable(name, "1", reason)]


_HOST = (
    Variable("OMP_NUM_THREADS", "1", "ranks share the node's processors"),
    Variable("TOKENIZERS_PARALLELISM", "false", "data workers are forked after threads"),
    Variable(
        "TRITON_CACHE_DIR",
        "${TMPDIR:-/tmp}/triton-${USER:-user}",
        "on the node: thousands of ranks would lock one file system",
    ),
)
