"""Formats of checkpoints that are not ``torch_dist``: their names, and what can be done with each.

They are recognised by the names of their files; nothing is opened.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ForeignFormat:
    """A format that a run cannot load."""

    name: str
    advice: str
    """How to get a checkpoint that can be loaded."""


LEGACY = ForeignFormat(
    "Megatron's legacy format (mp_rank_* folders, --ckpt-format torch)",
    "Its files are pickles of whole Python objects, which only Megatron itself should open: load "
    "it with Megatron 0.19 on as many ranks as wrote it, and let that run convert it with "
    "--ckpt-convert-format torch_dist --ckpt-convert-save DIR.",
)
DEEPSPEED = ForeignFormat(
    "Megatron-DeepSpeed's format (global_step* folders)",
    "Turn it into Megatron's or Hugging Face's format with the tools of DeepSpeed "
    "(ds_to_universal or its Hugging Face converter), and convert that here.",
)
HUGGING_FACE = ForeignFormat(
    "Hugging Face's format (config.json and weight files)",
    "Convert it with megatron-switch convert hf-to-megatron.",
)
PLAIN_TORCH = ForeignFormat(
    "a plain torch format (--ckpt-format torch_dcp or fsdp_dtensor)",
    "Save it once more with --ckpt-format torch_dist, from a run without Megatron-FSDP or torch's "
    "FSDP.",
)


def format_by_names(folder: Path) -> ForeignFormat | None:
    """Return the format that the names of the files in a folder say, None where they say none."""
    if any(folder.glob("global_step*")):
        return DEEPSPEED
    if any(folder.glob("mp_rank_*")):
        return LEGACY
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return HUGGING_FACE if (folder / "config.json").exists() and weights else None
