"""Checks of a Switch-T5's data: lengths of spans, sentinels, files of pairs and their splits."""

from argparse import Namespace
from pathlib import Path

from megatron.training import get_tokenizer

from megatron_switch.data.encoder_decoder import sentinel_ids
from megatron_switch.data.span_corruption import SpanPlan, plan_spans
from megatron_switch.data.splits import documents_of_splits
from megatron_switch.data.text_to_text import PairFiles, check_pairs, count_cut
from megatron_switch.errors import DataError
from megatron_switch.training.arguments.t5_arguments import data_paths


def span_plan(args: Namespace) -> SpanPlan:
    """Return the lengths of span corruption.

    Raises:
        ConfigError: The sequences are too short.
    """
    return plan_spans(
        source_length=args.seq_length,
        target_length=args.decoder_seq_length,
        density=args.switch_span_density,
        mean_length=args.switch_span_length,
    )


def sentinels(args: Namespace) -> tuple[int, ...]:
    """Return the tokenizer's sentinels; for random numbers, where it has none, its last tokens."""
    built = get_tokenizer()
    found = sentinel_ids(built)
    if found or not args.mock_data:
        return found
    return tuple(token for token in reversed(range(built.vocab_size)) if token != built.eod)


def check_pair_files(args: Namespace) -> tuple[str, ...]:
    """Read all files of pairs once, and return what of them will be cut.

    Raises:
        DataError: A line holds no pair, or a split gets none.
    """
    built = get_tokenizer()
    notes: list[str] = []
    for path in dict.fromkeys(map(Path, data_paths(args))):
        check_pairs(path)
        notes += count_cut(
            path,
            built,
            source_length=args.seq_length,
            target_length=args.decoder_seq_length,
        )
    if args.data_path:
        split_sizes(args, len(PairFiles([Path(path) for path in args.data_path])))
    return tuple(notes)


def split_sizes(args: Namespace, count: int) -> list[int]:
    """Return the pairs of each split.

    Raises:
        DataError: A split that is asked for gets none.
    """
    split = args.split or "969,30,1"  # Megatron's own default
    sizes = documents_of_splits(count, split)
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise DataError(
            f"--data-path has {count:,} pairs, and --split {split} leaves none for "
            f"{' and '.join(empty)}. Give larger weights to what is empty (--split 80,10,10) or "
            "weight 0 to what is not wanted (--split 100,0,0 with --eval-iters 0)."
        )
    return [sizes.get(name, 0) for name in ("train", "validation", "test")]
