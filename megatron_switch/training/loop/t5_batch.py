"""Data of a Switch-T5: pairs of texts, or corrupted spans; and one micro-batch of either."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.training import get_args, get_tokenizer
from torch import Tensor

from megatron_switch.data.encoder_decoder import KEYS, SpecialTokens
from megatron_switch.data.span_corruption import SpanCorruption
from megatron_switch.data.text_to_text import PairFiles, TextToText, split_numbers
from megatron_switch.moe.micro_batch_state import set_step_key
from megatron_switch.training.arguments.data_flags import reads_pairs
from megatron_switch.training.loop.batch import ForwardStep, masked_loss, text_datasets
from megatron_switch.training.preflight.data import sentinels, span_plan, split_sizes

_SPLITS = ("train", "valid", "test")


def t5_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the train, validation and test data sets that the data flags name.

    Args:
        num_samples: Least number of samples of each.
        vp_stage: Always None: there is one pipeline stage.

    Returns:
        The three data sets; one is None where its split is empty, and all are where this rank reads
        no data.
    """
    args = get_args()
    built = get_tokenizer()
    special = SpecialTokens.of(built, built.vocab_size)
    if reads_pairs(args):
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None, None, None
        return _pairs(args, num_samples, special)
    plan = span_plan(args)
    texts = text_datasets(num_samples, vp_stage, sequence_length=plan.text, extra_token=False)
    return tuple(
        None
        if each is None
        else SpanCorruption(
            each,
            plan,
            source_length=args.seq_length,
            target_length=args.decoder_seq_length,
            sentinels=sentinels(args),
            special=special,
            seed=args.seed,
            split=split,
        )
        for split, each in enumerate(texts)
    )


# The builder of texts meets all ranks at a barrier, so Megatron must call it on every rank.
t5_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _pairs(args: Namespace, num_samples: list[int], special: SpecialTokens) -> Any:
    """Return the data sets of pairs, in order of the splits."""
    made: list[TextToText | None] = []
    for split, (pairs, numbers) in enumerate(_parts(args)):
        wanted = num_samples[split]
        if pairs is None or wanted == 0:
            made.append(None)
            continue
        made.append(
            TextToText(
                pairs,
                numbers,
                wanted,
                tokenizer=get_tokenizer(),
                source_length=args.seq_length,
                target_length=args.decoder_seq_length,
                special=special,
                seed=args.seed,
                split=split,
            )
        )
    return tuple(made)


def _parts(args: Namespace) -> Iterator[tuple[PairFiles | None, Any]]:
    """Yield the files and line numbers of each split."""
    if args.data_path:
        pairs = PairFiles([Path(path) for path in args.data_path])
        sizes = split_sizes(args, len(pairs))
        for numbers in split_numbers(len(pairs), sizes, seed=args.seed):
            yield (pairs, numbers) if len(numbers) else (None, None)
        return
    for name in _SPLITS:
        paths = getattr(args, f"{name}_data_path")
        if not paths:
            yield None, None
            continue
        pairs = PairFiles([Path(path) for path in paths])
        yield pairs, range(len(pairs))


class T5ForwardStep(ForwardStep):
    """Megatron's forward step for an encoder-decoder; arguments are those of ``ForwardStep``."""

    def __call__(
        self, data_iterator: Iterator[Any], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run one micro-batch.

        Returns:
            The loss of each target token, and the function that turns them into one.
        """
        if not model.training:
            self._note_evaluation(data_iterator, None)
        batch = _read_batch(data_iterator)
        if self._keyed and model.training:
            set_step_key(self._micro_batch_key(None))
        output = model(
            batch["encoder_tokens"],
            batch["decoder_tokens"],
            encoder_padding=batch["encoder_padding"].bool(),
            decoder_padding=batch["decoder_padding"].bool(),
            lm_labels=batch["labels"],
        )
        return output, partial(masked_loss, batch["loss_mask"])


def _read_batch(data_iterator: Iterator[Any]) -> dict[str, Tensor]:
    """Return the next micro-batch, on every rank of a tensor-parallel group."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    sample = next(data_iterator) if first else None
    batch: dict[str, Tensor] = tensor_parallel.broadcast_data(list(KEYS), sample, torch.int64)
    return batch
