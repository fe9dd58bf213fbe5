"""Conversions as tests need them: to Megatron's format, and of folders with other tensors."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from megatron_switch.checkpoint.convert.conversion import plan_import, write_import
from megatron_switch.commands.checkpoints.written_arguments import written_arguments


def imported(hf: Path, target: Path, **settings) -> Path:
    plan = plan_import(hf, **settings)
    size = plan.model.vocab_size
    flags = {**plan.model.flags, "tokenizer-type": "NullTokenizer", "vocab-size": size - 1}
    args = written_arguments(flags, padded_vocab_size=plan.model.padded_vocab_size)
    write_import(plan, args, target)
    return target


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
