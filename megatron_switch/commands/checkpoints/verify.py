"""Comparison of the two sides of a conversion, and what it prints.

Tensors are compared bit by bit, and then the logits or, where ``transformers`` has no class that
computes the model, the settings. What is not compared is named.
"""

import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import torch

from megatron_switch.checkpoint.convert.verification import (
    Comparison,
    TensorComparison,
    plan_comparison,
)
from megatron_switch.checkpoint.formats.hf_folder import CONFIG
from megatron_switch.checkpoint.load.files import (
    FoundCheckpoint,
    LoadContext,
    checkpoint_folder,
    find_checkpoint,
)
from megatron_switch.errors import CheckpointError
from megatron_switch.utils.progress import bytes_progress
from megatron_switch.utils.units import size_text

CONTEXT = LoadContext("--megatron", "--iteration", can_start_anew=False)


def verify(own: Namespace) -> None:
    """Compare the two sides as the flags of the command say.

    Raises:
        CheckpointError: A tensor, a setting or the logits differ.
    """
    found = find_checkpoint(
        checkpoint_folder(own.megatron), iteration=own.iteration, context=CONTEXT
    )
    comparison = plan_comparison(own.hf, found)
    with bytes_progress("comparing", comparison.nbytes) as on_bytes:
        result = comparison.carry_out(on_bytes=on_bytes)
    kinds = {"equal values in another type": result.widened, "after rounding": result.rounded}
    how = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "bit for bit"
    print(f"Tensors: {result.tensors} compared, {size_text(result.nbytes)}, all equal, {how}.")
    if comparison.padding:
        print(f"Not compared: {comparison.padding} rows of padding of Megatron's vocabulary.")
    if own.tensors_only:
        return
    differing = "; ".join(
        f"{name} is {theirs} in config.json and {ours} in Megatron's arguments"
        for name, (theirs, ours) in comparison.differing_settings().items()
    )
    if comparison.without_class:
        _verify_settings(comparison, differing)
    else:
        _verify_logits(own.hf, found, result, differing)


def _verify_settings(comparison: Comparison, differing: str) -> None:
    if differing:
        raise CheckpointError(
            f"The two sides are different models, although all tensors are equal: {differing}. "
            f"Correct {comparison.hf / CONFIG}."
        )
    print(
        "Settings: all equal. Logits are not compared: transformers has no class that computes "
        f"this model ({comparison.model_type})."
    )


def _verify_logits(
    hf: Path, found: FoundCheckpoint, tensors: TensorComparison, differing: str
) -> None:
    from megatron_switch.commands.checkpoints.logit_parity import compare_logits

    rounded_to = tensors.coarsest if tensors.rounded else torch.float32
    with redirect_stdout(sys.stderr):
        parity = compare_logits(hf, found, rounded_to=rounded_to)
    print(
        f"Logits: {parity.tokens} tokens, largest difference {parity.difference:.1e} where the "
        f"largest logit is {parity.largest:.3g}."
    )
    if parity.own_capacity is not None:
        print(parity.own_capacity)
    if not parity.difference <= parity.tolerance:
        cause = differing or "no setting that a conversion knows"
        raise CheckpointError(
            f"The two sides compute different logits: {parity.difference:.3g} apart, and "
            f"{parity.tolerance:.3g} is expected at most. Tensors are equal. What differs: {cause}."
        )
