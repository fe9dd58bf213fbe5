"""The loss that an upcycled model starts with, beside the dense model's, on one text.

The dense model is computed by Megatron or, where it is in Hugging Face's format, by
``transformers``. A decoder-only model predicts each next token; an encoder-decoder reads the first
part of each window and predicts the rest.

The vocabulary is the dense model's: a run's padding counts as it does in training, and what an
upcycled model of ``transformers`` was padded with does not.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_switch.checkpoint.formats.hf_folder import CONFIG, read_json
from megatron_switch.commands.checkpoints.logit_parity import their_scores
from megatron_switch.data.tokenizer import build_tokenizer
from megatron_switch.errors import DataError
from megatron_switch.training.inference.token_scores import mean_loss, scores

_WINDOWS, _LENGTH = 4, 128


@dataclass(frozen=True)
class FirstLosses:
    """Mean cross-entropy of both models, in nats."""

    dense: float
    dropless: float
    """Of the sparse model, where experts take every token."""
    sparse: float
    """Of the same, with the capacity of evaluation."""
    tokens: int

    def explained(self, scale: str, num_experts: int) -> str:
        """Return the losses and what to make of them."""
        text = (
            f"First loss on {self.tokens} tokens: {self.sparse:.4f}, the dense model's is "
            f"{self.dense:.4f}. Gates change it by {self.dropless - self.dense:+.4f}, tokens that "
            f"find their expert full by {self.sparse - self.dropless:+.4f}. "
        )
        if scale == "none":
            return text + (
                f"With plain copies each expert's output is multiplied by its gate, about "
                f"1/{num_experts} at first, so sparse layers begin weaker than they were; training "
                "makes up for it within some hundred steps. --scale sqrt_e starts nearer."
            )
        return text + (
            "The factors undo the gate of a uniform router exactly, and this router's nearly."
        )


def first_losses(
    text: Path, args: Namespace, *, dense_folder: Path | None, hf: Path | None, new: Path
) -> FirstLosses:
    """Compute both losses.

    Args:
        text: A text file, read as far as needed.
        args: Arguments of the new model; its tokenizer is built.
        dense_folder: The dense model's checkpoint folder, or None where ``hf`` holds it.
        hf: Its folder in Hugging Face's format.
        new: The new model's checkpoint folder.

    Raises:
        DataError: The text is too short, cannot be tokenized, or has tokens that the model has not.
    """
    is_t5 = args.switch_arch == "t5"
    # A model in Hugging Face's format has no row for the padding of Megatron's vocabulary.
    rows = args.padded_vocab_size if hf is None else read_json(hf / CONFIG)["vocab_size"]
    window_BS = _windows(text, args, rows)
    if is_t5:
        cut = window_BS.size(1) * 3 // 4
        source_BS, target_BS = window_BS[:, :cut], window_BS[:, cut:-1]
        labels_BS = window_BS[:, cut + 1 :]
    else:
        source_BS, target_BS, labels_BS = window_BS[:, :-1], None, window_BS[:, 1:]
    if hf is not None:
        dense_BSV = their_scores(hf, source_BS, target_BS)
    else:
        assert dense_folder is not None, "the dense model is somewhere"
        dense_BSV = scores(dense_folder, source_BS, target_BS)
    dropless, sparse = (
        mean_loss(
            scores(new, source_BS, target_BS, drop=drop)[..., : dense_BSV.size(-1)], labels_BS
        )
        for drop in (False, True)
    )
    return FirstLosses(mean_loss(dense_BSV, labels_BS), dropless, sparse, labels_BS.numel())


def _windows(text: Path, args: Namespace, rows: int) -> Tensor:
    """Return the first tokens of a text, shape (windows, positions)."""
    tokenizer = build_tokenizer(args)
    length = min(_LENGTH, int(args.seq_length)) + 1
    with text.open(encoding="utf-8", errors="replace") as stream:
        content = stream.read(_WINDOWS * length * 16)
    try:
        tokens = [int(token) for token in tokenizer.built.tokenize(content)]
    except ValueError as error:
        raise DataError(
            f"--text {text} cannot be tokenized: {error}. The checkpoint is written."
        ) from error
    beyond = [token for token in tokens if not 0 <= token < rows]
    if beyond:
        raise DataError(
            f"--text {text} has a token {beyond[0]}, but the embedding has {rows} rows. The "
            "checkpoint is written; give a text of the model's tokens to learn its first loss."
        )
    count = min(_WINDOWS, len(tokens) // length)
    if count == 0:
        raise DataError(
            f"--text {text} has {len(tokens)} tokens, but a window has {length}. The checkpoint is "
            "written; give a longer text to learn its first loss."
        )
    return torch.tensor(tokens[: count * length]).view(count, length)
