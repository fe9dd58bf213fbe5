"""What a user does with a checkpoint that a conversion wrote: data of its tokenizer, and training.

The commands are complete but for ``TEXTS``. A sequence is as long as the model's positions reach
only where that is short: a model that reads 131,072 tokens does not train on as many in the memory
of one device.
"""

import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST = 4096
_TOKENS = 8192
"""Tokens of a sequence and of a micro-batch that the command asks for at most."""

_SHOWN = (
    "moe-expert-capacity-factor",
    "switch-capacity",
    "switch-capacity-group",
    "switch-eval-capacity-factor",
)
"""Which tokens experts drop is stored too; it is shown because the two sides count differently."""


def next_steps(args: Namespace, folder: Path, flags: Mapping[str, Any]) -> str:
    """Return the commands that prepare data and train on from a checkpoint, ready to be pasted.

    Args:
        args: Arguments that the checkpoint stores.
        folder: The checkpoint's folder.
        flags: The model's flags; those of its capacity are shown.
    """
    lines = ["Train on from it:"]
    data = f"{folder}-corpus/corpus"
    if args.switch_arch == "t5" and args.tokenizer_type == "NullTokenizer":
        data = "PAIRS.jsonl"  # there are no sentinels for span corruption
        lines[0] = "Train on from it, on lines of JSON with input and target (PAIRS.jsonl):"
    else:
        lines[0] = "Train on from it, on files or folders of text (TEXTS):"
        lines.append(_preparation(args, folder))
    length = min(args.seq_length, _LONGEST)
    command = [
        *("megatron-switch", "train", "--load", str(folder), "--use-checkpoint-args"),
        *("--save", f"{folder}-trained"),
        *("--micro-batch-size", str(min(4, _TOKENS // length)), "--lr", "1e-4"),
        *("--train-iters", "1000", "--save-interval", "500", "--data-path", data),
    ]
    if length < args.seq_length:
        command += ["--seq-length", str(length)]
    for name in _SHOWN:
        if flags.get(name) is not None:
            command += [f"--{name}", str(flags[name])]
    lines.append(shlex.join(command))
    if length < args.seq_length:
        lines.append(
            f"The model reads up to {args.seq_length:,} tokens, and --seq-length may be anything "
            "up to that. Memory grows with it and with --micro-batch-size."
        )
    if args.num_experts:
        lines.append(capacity_text(flags))
    return "\n".join(lines)


def _preparation(args: Namespace, folder: Path) -> str:
    """Return the command that makes data with the checkpoint's tokenizer."""
    command = ["megatron-switch", "prepare", "TEXTS", "--tokenizer-type", args.tokenizer_type]
    if args.tokenizer_model:
        place = Path(args.tokenizer_model)
        if place.is_relative_to(folder.resolve()):  # as short as the folder was given
            place = folder / place.relative_to(folder.resolve())
        command += ["--tokenizer-model", str(place)]
    else:
        command += ["--vocab-size", str(args.vocab_size)]
    return shlex.join([*command, "--output", f"{folder}-corpus"])


def capacity_text(flags: Mapping[str, Any]) -> str:
    """Return of what the capacity of an imported model is, and what a larger micro-batch does.

    Args:
        flags: The model's flags.
    """
    slots = flags.get("switch-capacity")
    by_sequence = flags.get("switch-capacity-group") == "sequence"
    if slots is not None:
        of_what = "one sequence" if by_sequence else "one micro-batch, all its sequences together"
        effect = (
            "a larger --micro-batch-size drops no more, a longer --seq-length does, and with "
            "--switch-capacity-group microbatch all sequences would share them"
            if by_sequence
            else "a larger --micro-batch-size drops more"
        )
        return f"Capacity: an expert takes at most {slots} tokens of {of_what}; {effect}."
    factor = flags.get("moe-expert-capacity-factor")
    if factor is not None and float(factor) < 0:
        return "Capacity: none, so no token is dropped, whatever --micro-batch-size is."
    of_what = "sequence" if by_sequence else "micro-batch"
    effect = (
        "does not depend on --micro-batch-size"
        if by_sequence
        else "grows with --micro-batch-size, and a larger one drops fewer"
    )
    return (
        "Capacity: an expert takes at most --moe-expert-capacity-factor times its even share of a "
        f"{of_what}'s tokens, which {effect}."
    )
