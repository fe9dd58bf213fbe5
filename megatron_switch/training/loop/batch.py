"""One micro-batch: from the data set to the loss.

Which part of a batch a rank gets is the matter of :mod:`megatron_switch.training.loop.micro_batch`.
The forward step also names the micro-batch to the Switch layers, whose noise is keyed by it: the
number of a micro-batch in its global batch is the same in every layout with the same micro-batch
size.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_switch.data.padding import (
    PADDING_MASK,
    EvenDataset,
    MaskedGPTDataset,
    MaskedMockGPTDataset,
)
from megatron_switch.errors import DataError
from megatron_switch.moe.counter_rng import mix
from megatron_switch.moe.micro_batch_state import set_loss_tokens, set_step_key
from megatron_switch.training.loop.micro_batch import LOSS_TOKENS, read_micro_batch, reads_data


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's train, validation and test data sets.

    Args:
        num_samples: Least number of samples of each.
        vp_stage: Number of the model chunk on this pipeline stage that reads them, if there are
            several.

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


# The builder meets all ranks at a barrier, so Megatron must call it on every rank.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def text_datasets(
    num_samples: list[int], vp_stage: int | None, *, sequence_length: int, extra_token: bool
) -> Any:
    """Build Megatron's data sets of texts, cut to a length.

    Args:
        num_samples: Least number of samples of each.
        vp_stage: As for :func:`datasets_provider`.
        sequence_length: Tokens of a sample.
        extra_token: Whether labels are a sample's tokens one place further on.

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
    """Build the data sets that arguments name, without Megatron's global state.

    Args:
        args: Megatron's arguments.
        tokenizer: What Megatron makes of them.
        num_samples: Least number of samples of each; one that gets 0 is not built.
        is_built_here: Whether this rank reads data; all ranks must call.
        sequence_length: Tokens of a sample.
        extra_token: Whether labels are a sample's tokens one place further on.

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
            if number == 0:  # nothing is read; Megatron would want documents for it all the same
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
                f"The order of samples cannot be written: {error.__cause__}. Give a folder that "
                "can be to --data-cache-path; without it the data's own folder is used."
            ) from error
        raise


class ForwardStep:
    """Megatron's forward step for a decoder-only model.

    Args:
        seed: Seed of the run, part of the key of Switch layers' noise.
        keyed: Whether any Switch layer draws noise, so that micro-batches must be named.
        on_evaluation: Called before each micro-batch of an evaluation, once for all model chunks.
    """

    def __init__(
        self, *, seed: int, keyed: bool, on_evaluation: Callable[[], None] = lambda: None
    ) -> None:
        self._seed = seed
        self._keyed = keyed
        self._on_evaluation = on_evaluation
        self._iteration = -1
        self._calls: dict[int | None, int] = {}
        self._evaluation_iterators: dict[int | None, list[Any]] = {}

    def __call__(
        self, data_iterator: Iterator[Any], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run one micro-batch through one model chunk.

        Returns:
            The chunk's output, and the function that turns the last stage's into a loss.
        """
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        if not model.training:
            self._note_evaluation(data_iterator, vp_stage)
        batch = read_micro_batch(data_iterator, vp_stage, training=model.training)
        if self._keyed and model.training:
            set_step_key(self._micro_batch_key(vp_stage))
        if batch[LOSS_TOKENS] is not None:
            set_loss_tokens(batch[LOSS_TOKENS])
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            padding_mask=batch[PADDING_MASK],
        )
        return output, over_context_ranks(partial(masked_loss, batch["loss_mask"]))

    def evaluated_split(self) -> int:
        """Return what the last evaluation read: 0 the validation data, 1 the test data.

        Megatron names the split only in a text. It reads validation data first whenever there are
        any, and each split has one iterator a model chunk for good. With several validation sets it
        knows no test data. Ranks that read no data answer 0.
        """
        splits_seen = max(map(len, self._evaluation_iterators.values()), default=0)
        args = get_args()
        if splits_seen == 0 or args.multiple_validation_sets:
            return 0
        return 1 if splits_seen > 1 or not args.do_valid else 0

    def _note_evaluation(self, data_iterator: Any, vp_stage: int | None) -> None:
        if not vp_stage:
            self._on_evaluation()
        seen = self._evaluation_iterators.setdefault(vp_stage, [])
        if data_iterator is not None and not any(data_iterator is one for one in seen):
            seen.append(data_iterator)

    def _micro_batch_key(self, vp_stage: int | None) -> int:
        """Hash what names this micro-batch in the run, in any layout.

        A schedule runs the micro-batches of a chunk in order, so counting calls numbers them; the
        count wraps around where an iteration is run again to check a suspicious result.
        """
        iteration = get_args().curr_iteration
        if iteration != self._iteration:
            self._iteration = iteration
            self._calls = {}
        local = self._calls.get(vp_stage, 0) % get_num_microbatches()
        self._calls[vp_stage] = self._calls.get(vp_stage, 0) + 1
        replicas = parallel_state.get_data_parallel_world_size()
        micro_batch = local * replicas + parallel_state.get_data_parallel_rank()
        return int(mix(self._seed, iteration, micro_batch))


def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return what Megatron wants of a loss function.

    Args:
        loss_mask_BS: 1.0 where a token's loss counts.
        loss_BS: Cross-entropy of each token.

    Returns:
        Sum of losses over tokens that count, their number, and both again for the log.
    """
    mask_T = loss_mask_BS.reshape(-1).float()
    total = (loss_BS.reshape(-1).float() * mask_T).sum()
    num_tokens = mask_T.sum().detach().to(torch.int)
    logged = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    return total, num_tokens, {"lm loss": logged}


def over_context_ranks(loss: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Let a loss be the mean over a whole micro-batch, whichever context ranks hold it.

    Unless the loss is counted per token, Megatron divides a rank's sum by the rank's own tokens and
    averages over ranks. Context ranks hold parts of one micro-batch, and its mean is not the mean
    of theirs where they have unequal numbers of tokens in the loss.

    Args:
        loss: What :func:`masked_loss` gives, for the part of this rank.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size <= 1 or get_args().calculate_per_token_loss:
        return loss

    def whole_loss(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, num_tokens, logged = loss(loss_BS)
        dist.all_reduce(num_tokens, group=parallel_state.get_context_parallel_group())
        return total * size, num_tokens, logged

    return whole_loss
