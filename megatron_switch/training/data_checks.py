"""Checks of where data come from: of the flags, and of the files once there is a tokenizer."""

import math
from argparse import Namespace
from pathlib import Path

from megatron.training import get_tokenizer

from megatron_switch.data.check import check_indexed_dataset
from megatron_switch.data.span_corruption import check_sentinels
from megatron_switch.data.splits import check_splits, split_weights
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.training.t5_arguments import reads_pairs
from megatron_switch.training.t5_batch import check_pair_files, sentinels, span_plan

_OTHER_DATA_SETS = (
    "sft",
    "dataloader_inter_document_masking",
    "fim_data",
    "hybrid_context_parallel",
)
_FILE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def check_data_flags(args: Namespace) -> None:
    """Refuse flags that name no data, no tokenizer, or data that cannot be trained on.

    Raises:
        ConfigError: Flags that contradict one another.
        DataError: No training data, no tokenizer, or weights that are none.
    """
    _check_sources(args)
    for name in _BLENDS:
        _check_blend(_flag(name), getattr(args, name) or [])
    if args.split is not None:
        split_weights(args.split)
    _check_validation(args)


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
    for prefix in _prefixes(args):
        facts = check_indexed_dataset(prefix, vocab_size=get_tokenizer().vocab_size)
        if args.split is not None and prefix in (args.data_path or []):
            check_splits(prefix, facts.sequences, args.split)
    return ()


def _check_sources(args: Namespace) -> None:
    if not (args.mock_data or _prefixes(args) or _listed_elsewhere(args)):
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
                f"{_flag(name)} asks for samples of another form than this program's, which are "
                "documents one after the other, cut to --seq-length. Leave it out; with "
                "--reset-attention-mask and --reset-position-ids documents that share a sample do "
                "not see each other."
            )
    if args.tokenizer_type in _FILE_TOKENIZERS and not (
        args.tokenizer_model and Path(args.tokenizer_model).is_file()
    ):
        raise DataError(
            f"--tokenizer-type {args.tokenizer_type} reads a model file, and --tokenizer-model "
            f"{args.tokenizer_model} is none. Give the file that the data were prepared with."
        )


def _check_blend(flag: str, words: list[str]) -> None:
    """Refuse weights that Megatron cannot blend by; weights and prefixes alternate."""
    weights = words[::2]
    if not (words and all(map(_is_weight, weights))):
        return
    values = [float(weight) for weight in weights]
    given = " ".join(words)
    if len(words) % 2 or not all(_is_share(value) for value in values) or sum(values) == 0:
        raise DataError(
            f"{flag} takes prefixes, or pairs of a weight and a prefix; weights are finite, not "
            f"negative, and not all 0. Got: {given}."
        )


def _check_validation(args: Namespace) -> None:
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
    if args.eval_iters and not args.mock_data and not _has_validation(args):
        raise DataError(
            f"Nothing is left to evaluate on, but --eval-iters is {args.eval_iters}. Add "
            "--eval-iters 0, or give validation a share (--split 98,1,1) or data of its own "
            "(--valid-data-path)."
        )


def _has_validation(args: Namespace) -> bool:
    if args.train_data_path:
        return bool(args.valid_data_path)
    return args.split is None or split_weights(args.split)[1] > 0


def _prefixes(args: Namespace) -> list[str]:
    """Return the path prefixes named on the command line, without blending weights."""
    named = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    return [word for words in named for word in words or [] if not _is_weight(word)]


def _listed_elsewhere(args: Namespace) -> bool:
    return args.data_args_path is not None or args.per_split_data_args_path is not None


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_share(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0


def _flag(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")
