"""Whether there are data to train on: the flags at once, the files once there is a tokenizer."""

import math
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron.training import get_tokenizer

from megatron_switch.data.encoder_decoder import sentinel_ids
from megatron_switch.data.indexed_files import check_indexed_dataset
from megatron_switch.data.span_corruption import SpanPlan, check_sentinels, plan_spans
from megatron_switch.data.splits import SPLITS, check_splits, documents_of_splits, split_weights
from megatron_switch.data.text_to_text import PairFiles, check_pairs, count_cut
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.flags.argv import flag_name
from megatron_switch.training.arguments.data_flags import data_entries, data_paths, reads_pairs

_OTHER_DATA_SETS = (
    "sft",
    "dataloader_inter_document_masking",
    "fim_data",
    "hybrid_context_parallel",
)
_FILE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def check_data_flags(args: Namespace) -> None:
    """Refuse flags that name no data, no tokenizer, or data that cannot be trained on.

    Raises:
        ConfigError: Flags that contradict one another.
        DataError: No training data, no tokenizer, or weights that are none.
    """
    named = data_entries(args)
    _check_sources(args, named)
    for name, entries in named.items():
        _check_blend(flag_name(name), entries)
    if args.split is not None:
        split_weights(args.split)
    if not (args.skip_train or args.mock_data):
        _check_training(args, named)
    _check_validation(args, named)


def check_data(args: Namespace) -> tuple[str, ...]:
    """Check the files that training will read, on the first rank.

    Returns:
        What the user should know.

    Raises:
        ConfigError: Span corruption needs more sentinels than the tokenizer has.
        DataError: A file is missing, damaged, or holds tokens outside the vocabulary.
    """
    pairs = args.switch_arch == "t5" and reads_pairs(args)
    if args.switch_arch == "t5" and not pairs:
        check_sentinels(span_plan(args), len(sentinels(args)))
    if args.mock_data or args.rank != 0:
        return ()
    if pairs:
        return check_pair_files(args)
    check_token_files(args, vocab_size=get_tokenizer().vocab_size, read=_splits_read(args))
    return ()


def check_token_files(args: Namespace, *, vocab_size: int, read: Collection[str]) -> None:
    """Check the token files that arguments name.

    Args:
        args: Arguments, of this run or of a checkpoint.
        vocab_size: Number of tokens that there are.
        read: The splits that are read.

    Raises:
        DataError: A file is missing, damaged, holds tokens outside the vocabulary, or has no
            document for a split that is read.
    """
    named = data_entries(args)
    for prefix in _prefixes(named):
        facts = check_indexed_dataset(prefix, vocab_size=vocab_size)
        if args.split is not None and prefix in named.get("data_path", []):
            check_splits(prefix, facts.sequences, args.split, read=read)


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
            path, built, source_length=args.seq_length, target_length=args.decoder_seq_length
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


def _check_sources(args: Namespace, named: Mapping[str, list[str]]) -> None:
    if not (args.mock_data or named):
        raise DataError(
            "There is nothing to train on: no --data-path was given. Prepare text with "
            "'megatron-switch prepare' (--stdlib needs no files at all) and pass the --data-path "
            "it prints, or train on random numbers with --mock-data."
        )
    if args.tokenizer_type is None:
        raise DataError(
            "There is no tokenizer: --tokenizer-type was not given. 'megatron-switch prepare' "
            "prints the flags that fit its data; with --mock-data use --tokenizer-type "
            "NullTokenizer --vocab-size N."
        )
    for name in _OTHER_DATA_SETS:
        if getattr(args, name):
            raise ConfigError(
                f"{flag_name(name)} asks for samples of another form than this program's, which "
                "are documents one after the other, cut to --seq-length. Leave it out; with "
                "--reset-attention-mask and --reset-position-ids documents that share a sample do "
                "not see each other."
            )
    if args.tokenizer_type in _FILE_TOKENIZERS and not (
        args.tokenizer_model and Path(args.tokenizer_model).is_file()
    ):
        model = args.tokenizer_model
        given = "none was given" if not model else f"--tokenizer-model {model} is none"
        raise DataError(
            f"--tokenizer-type {args.tokenizer_type} reads a model file, and {given}. Give the "
            "file that the data were prepared with (--tokenizer-model)."
        )


def _check_blend(flag: str, entries: list[str]) -> None:
    """Refuse weights that Megatron cannot blend by; weights and prefixes alternate."""
    weights = entries[::2]
    if not (entries and all(map(_is_weight, weights))):
        return
    values = [float(weight) for weight in weights]
    given = " ".join(entries)
    if len(entries) % 2 or not all(_is_share(value) for value in values) or sum(values) == 0:
        raise DataError(
            f"{flag} takes prefixes, or pairs of a weight and a prefix; weights are finite, not "
            f"negative, and not all 0. Got: {given}."
        )


def _check_training(args: Namespace, named: Mapping[str, list[str]]) -> None:
    """Refuse data of which none is for training: Megatron would do nothing and end well."""
    if not {"data_path", "train_data_path"} & named.keys():
        raise DataError(
            "There is nothing to train on: --valid-data-path and --test-data-path name data to "
            "evaluate on only. Add --train-data-path."
        )
    if "data_path" in named and args.split is not None and split_weights(args.split)[0] == 0:
        raise DataError(
            f"There is nothing to train on: --split {args.split} gives training weight 0. Give it "
            "a share (--split 98,1,1), or add --skip-train to evaluate only."
        )


def _check_validation(args: Namespace, named: Mapping[str, list[str]]) -> None:
    """Refuse what Megatron stops at after it has trained up to the first evaluation."""
    if args.full_validation and not args.multiple_validation_sets:
        raise ConfigError(
            "Megatron-Core 0.19.2 evaluates whole validation sets only where it keeps them apart. "
            "Add --multiple-validation-sets to --full-validation, and name the data with "
            "--train-data-path and --valid-data-path."
        )
    if args.multiple_validation_sets and args.test_data_path:
        raise ConfigError(
            "Megatron-Core 0.19.2 cannot evaluate test data in a run with "
            "--multiple-validation-sets. Leave --test-data-path out, or name that data as one more "
            "validation set."
        )
    if args.eval_iters and not args.mock_data and not _has_validation(args, named):
        raise DataError(
            f"Nothing is left to evaluate on, but --eval-iters is {args.eval_iters}. Add "
            "--eval-iters 0, or give validation a share (--split 98,1,1) or data of its own "
            "(--valid-data-path)."
        )


def _splits_read(args: Namespace) -> tuple[str, ...]:
    """Return the names of the splits that the run reads."""
    train, *evaluated = SPLITS
    return (*(() if args.skip_train else (train,)), *(evaluated if args.eval_iters else ()))


def _has_validation(args: Namespace, named: Mapping[str, list[str]]) -> bool:
    if "data_path" not in named:
        return "valid_data_path" in named
    return args.split is None or split_weights(args.split)[1] > 0


def _prefixes(named: Mapping[str, list[str]]) -> list[str]:
    """Return the path prefixes among the entries, without blending weights."""
    return [entry for entries in named.values() for entry in entries if not _is_weight(entry)]


def _is_weight(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return False
    return True


def _is_share(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0
