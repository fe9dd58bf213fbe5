"""``megatron-switch convert``: between Hugging Face's format and Megatron's.

convert hf-to-megatron --hf DIR --megatron DIR
convert megatron-to-hf --megatron DIR --hf DIR
convert inspect DIR
convert verify --hf DIR --megatron DIR
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_switch.checkpoint.conversion import (
    TOKENIZER_FOLDER,
    Import,
    plan_export,
    plan_import,
    write_export,
    write_import,
)
from megatron_switch.checkpoint.files import Asker, checkpoint_folder, find_checkpoint
from megatron_switch.checkpoint.inspection import inspect_folder
from megatron_switch.checkpoint.tensors import size_text
from megatron_switch.checkpoint.tokenizer_files import tokenizer_flags, write_tokenizer
from megatron_switch.checkpoint.verification import compare_sides
from megatron_switch.commands.checkpoint_parsers import convert_parser
from megatron_switch.commands.progress import bytes_progress
from megatron_switch.data.tokenizer import build_tokenizer
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.models.vocabulary import padded_vocab_size

_ASKER = Asker("--megatron", "--iteration", can_start_anew=False)


def run(argv: Sequence[str]) -> int:
    """Convert as the command line says, and return the exit status.

    Args:
        argv: Words behind the command's name.

    Raises:
        SwitchError: Something cannot be converted; nothing was written.
    """
    own = convert_parser().parse_args(list(argv))
    actions = {
        "hf-to-megatron": _import,
        "megatron-to-hf": _export,
        "inspect": _inspect,
        "verify": _verify,
    }
    actions[own.action](own)
    return 0


def _import(own: Namespace) -> None:
    # Megatron's parser takes seconds to import, and only this action needs it.
    from megatron_switch.training.written_arguments import written_arguments

    plan = plan_import(own.hf, dtype=own.dtype, multiple=own.vocab_multiple)
    flags = import_flags(plan, own.megatron)
    args = written_arguments(flags, padded_vocab_size=plan.model.padded_vocab_size)
    with bytes_progress("converting", plan.nbytes) as on_bytes:
        write_import(plan, args, own.megatron, workers=own.workers, on_bytes=on_bytes)
    rows = len(plan.model.table.rows)
    padding = plan.model.padded_vocab_size - plan.model.vocab_size
    print(
        f"{own.megatron}: {plan.model.model_type}, {rows} tensors, "
        f"{size_text(plan.nbytes)}, {padding} vocabulary rows of padding."
    )
    if flags["tokenizer-type"] == "NullTokenizer":
        print(
            f"{own.hf} has no tokenizer, so tokens are numbers. For texts add --tokenizer-type and "
            "--tokenizer-model below."
        )
    print(f"Train on from it:\n{training_command(flags, own.megatron)}")


def import_flags(plan: Import, target: Path) -> dict[str, Any]:
    """Return the flags of a run of an imported model, its precision and tokenizer included.

    Args:
        plan: The conversion.
        target: Where the checkpoint will be.
    """
    tokenizer = (target / TOKENIZER_FOLDER).resolve()
    flags = {
        **plan.model.flags,
        **tokenizer_flags(plan.folder, tokenizer, plan.model.vocab_size),
    }
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if plan.precision == dtype:
            flags[name] = True
    return flags


def training_command(flags: dict[str, Any], folder: Path) -> str:
    """Return the command that trains on from a converted checkpoint, ready to be pasted."""
    command = [
        *("megatron-switch", "train", "--load", str(folder), "--use-checkpoint-args"),
        *("--save", f"{folder}-trained", "--micro-batch-size", "4", "--lr", "1e-4"),
        *("--train-iters", "1000", "--save-interval", "500", "--data-path", "DATA"),
    ]
    for name in _SHOWN:
        if flags.get(name) is not None:
            command += [f"--{name}", str(flags[name])]
    return shlex.join(command)


_SHOWN = (
    "moe-expert-capacity-factor",
    "switch-capacity",
    "switch-capacity-group",
    "switch-eval-capacity-factor",
)
"""Which tokens experts drop is stored too; it is shown because the two sides count differently."""


def _export(own: Namespace) -> None:
    found = find_checkpoint(checkpoint_folder(own.megatron), iteration=own.iteration, asker=_ASKER)
    plan = plan_export(found, architecture=own.architecture, dtype=own.dtype)
    size = own.vocab_size or _tokens(plan.args)
    if size is not None:
        plan = plan_export(found, architecture=own.architecture, dtype=own.dtype, vocab_size=size)
    args = plan.args
    if own.tokenizer_model:
        args.tokenizer_model = own.tokenizer_model
    notes = list(plan.model.notes)

    def tokenizer(folder: Path) -> None:
        if not own.no_tokenizer:
            notes.append(write_tokenizer(args, folder, found.folder.parent))

    with bytes_progress("converting", plan.nbytes) as on_bytes:
        write_export(plan, own.hf, tokenizer=tokenizer, on_bytes=on_bytes)
    print(
        f"{own.hf}: {plan.model.model_type}, {sum(len(g.names) for g in plan.groups)} tensors, "
        f"{size_text(plan.nbytes)}."
    )
    for note in notes:
        print(note)


def _tokens(args: Namespace) -> int | None:
    """Return the rows of the vocabulary that are no padding, where that can be told.

    A run pads the tokenizer's tokens by a known rule. What was converted has the rows that its
    format had, which are often more than its tokenizer has tokens, and keeps them.
    """
    if args.tokenizer_type == "NullTokenizer":
        return int(args.vocab_size) + 1  # and the one that ends a document
    try:
        tokens = build_tokenizer(args).vocab_size
    except (ConfigError, DataError):  # it was moved; whether that matters is decided elsewhere
        return None
    padded = padded_vocab_size(tokens, make_divisible_by=args.make_vocab_size_divisible_by)
    return tokens if padded == args.padded_vocab_size else None


def _inspect(own: Namespace) -> None:
    found = inspect_folder(checkpoint_folder(own.folder))
    table = Table(show_header=False, box=None)
    for name, value in found.facts.items():
        table.add_row(name, value)
    Console().print(table)
    print(found.advice)


def _verify(own: Namespace) -> None:
    found = find_checkpoint(checkpoint_folder(own.megatron), asker=_ASKER)
    total = sum(path.stat().st_size for path in found.folder.glob("*.distcp"))
    with bytes_progress("comparing", total) as on_bytes:
        result = compare_sides(own.hf, found, on_bytes=on_bytes)
    rounded = f", {result.rounded} after rounding" if result.rounded else ", bit for bit"
    print(f"Tensors: {result.rows} compared, {size_text(result.nbytes)}, all equal{rounded}.")
    if own.tensors_only:
        return
    from megatron_switch.commands.parity import compare_logits

    with redirect_stdout(sys.stderr):
        parity = compare_logits(own.hf, found.folder.parent)
    print(
        f"Logits: {parity.tokens} tokens, largest difference {parity.difference:.1e} where the "
        f"largest logit is {parity.largest:.3g}."
    )
    if not parity.difference <= parity.tolerance:
        raise CheckpointError(
            f"The two sides compute different logits: {parity.difference:.3g} apart, and "
            f"{parity.tolerance:.3g} is expected at most. Tensors are equal, so a setting differs: "
            f"compare {own.hf / 'config.json'} with the arguments that inspect shows."
        )
