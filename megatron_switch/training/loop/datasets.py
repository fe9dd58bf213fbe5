"""Data sets of a run: texts for a GPT, and pairs of texts or corrupted spans for a Switch-T5.

Megatron calls a provider once, on every rank, with the number of samples of each split.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_switch.data.encoder_decoder import SpecialTokens
from megatron_switch.data.padding import EvenDataset, MaskedGPTDataset, MaskedMockGPTDataset
from megatron_switch.data.span_corruption import SpanCorruption
from megatron_switch.data.text_to_text import PairFiles, TextToText, split_numbers
from megatron_switch.errors import DataError
from megatron_switch.training.arguments.data_flags import reads_pairs
from megatron_switch.training.loop.forward_step import reads_data
from megatron_switch.training.preflight.data import sentinels, span_plan, split_sizes

_SPLITS = ("train", "valid", "test")


def datasets_provider_of(args: Namespace) -> Callable[..., Any]:
    """Return what provides Megatron with the data sets of the architecture.

    Args:
        args: Parsed arguments.
    """
    return t5_datasets_provider if args.switch_arch == "t5" else datasets_provider


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's train, validation and test data sets.

    Args:
        num_samples: Least number of samples of each.
        vp_stage: Index of the model chunk on this pipeline stage, if there are several.

    Returns:
        The three data sets; one is None where its split is empty.
    """
    args = get_args()
    train, validation, test = text_datasets(
        num_samples, vp_stage, sequence_length=args.seq_length, extra_token=True
    )
    if args.full_validation:  # of several sets, or it is refused
        replicas = parallel_state.get_data_parallel_world_size()
        validation = [EvenDataset(each, replicas) for each in validation]
    return train, validation, test


# The builder has a barrier of all ranks, so Megatron must call it on every rank.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def text_datasets(
    num_samples: list[int], vp_stage: int | None, *, sequence_length: int, extra_token: bool
) -> Any:
    """Build Megatron's data sets of texts of a length.

    Args:
        num_samples: Least number of samples of each.
        vp_stage: As for :func:`datasets_provider`.
        sequence_length: Tokens of a sample.
        extra_token: Whether labels are a sample's tokens shifted by one.

    Returns:
        The three data sets; one is None where its split is empty.
    """
    return build_datasets(
        get_args(),
        get_tokenizer(),
        num_samples,
        partial(reads_data, vp_stage),
        sequence_length=sequence_length,
        extra_token=extra_token,
    )


def build_datasets(
    args: Namespace,
    tokenizer: Any,
    num_samples: list[int],
    is_built_here: Callable[[], bool],
    *,
    sequence_length: int,
    extra_token: bool,
) -> Any:
    """Build the data sets of the arguments, without Megatron's global state.

    Args:
        args: Megatron's arguments.
        tokenizer: Megatron's, built from them.
        num_samples: Least number of samples of each; one that gets 0 is not built.
        is_built_here: Whether this rank reads data; all ranks must call.
        sequence_length: Tokens of a sample.
        extra_token: Whether labels are a sample's tokens shifted by one.

    Raises:
        DataError: Megatron's index of samples cannot be kept on disk.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=sequence_length,
        add_extra_token_to_sequence=extra_token,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    if config.split_matrix is not None:
        for index, number in enumerate(num_samples):
            if number == 0:  # Megatron would require documents for a split that is not read
                config.split_matrix[index] = None
    builder = BlendedMegatronDatasetBuilder(
        MaskedMockGPTDataset if args.mock_data else MaskedGPTDataset,
        num_samples,
        is_built_here,
        config,
    )
    try:
        return builder.build()
    except Exception as error:  # the class that Megatron raises
        if isinstance(error.__cause__, OSError):
            raise DataError(
                f"The order of samples cannot be written: {error.__cause__}. Give a writable "
                "folder to --data-cache-path; without it the data's own folder is used."
            ) from error
        raise


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


# The builder of texts has a barrier of all ranks, so Megatron must call it on every rank.
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
