"""The part of a micro-batch that one rank works on.

The first rank of each tensor-parallel group reads the data and hands them to the others. Tokens and
labels are needed at the ends of a pipeline only, and travel by Megatron's own function; the padding
mask and an explicit attention mask are needed by every layer, so every stage reads them. Every
stage reads the same samples in the same order.

Megatron's model cuts the padding mask for sequence parallelism on the first stage and nowhere else.
Here the first stage therefore gets the mask of all positions that its context-parallel rank holds,
and a later stage one that is cut already.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args
from torch import Tensor

from megatron_switch.data.padding import PADDING_MASK, filled_up

LOSS_TOKENS = "loss_tokens"
"""Key of the number of tokens in the loss of the whole micro-batch, float32, on every stage."""
KEYS = (
    *("tokens", "labels", "loss_mask", "attention_mask", "position_ids"),
    *(PADDING_MASK, LOSS_TOKENS),
)


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this rank reads data for a model chunk.

    Args:
        vp_stage: Number of the chunk on its pipeline stage, or None if there is one.
    """
    args = get_args()
    if args.full_validation:  # whose length Megatron asks for on every rank
        return True
    needed = _at_an_end(vp_stage) or _has_masks(args)
    return needed and parallel_state.get_tensor_model_parallel_rank() == 0


def read_micro_batch(
    data_iterator: Iterator[Any], vp_stage: int | None, *, training: bool
) -> dict[str, Any]:
    """Return this rank's part of the next micro-batch.

    Args:
        data_iterator: Batches; read where :func:`reads_data` says so.
        vp_stage: As in :func:`reads_data`.
        training: Whether the batch is for training; evaluation may have another size.

    Returns:
        A value for each of :data:`KEYS`; None for what this stage does not need.
    """
    args = get_args()
    size = args.micro_batch_size if training else args.eval_micro_batch_size
    at_an_end = _at_an_end(vp_stage)
    if not (at_an_end or _has_masks(args)):
        return dict.fromkeys(KEYS)
    given: dict[str, Any] = dict.fromkeys(KEYS)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        whole = filled_up(next(data_iterator), size)
        given |= {key: whole[key].cuda(non_blocking=True) for key in KEYS if key in whole}
    masks = _shared_masks(args, given, size)
    loss_tokens = _loss_tokens(args, given["loss_mask"])
    batch = _at_the_end(args, given, size, vp_stage) if at_an_end else {}
    batch = get_batch_on_this_cp_rank(
        {**batch, **masks}, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    if batch[PADDING_MASK] is not None and not _is_first(vp_stage):
        batch[PADDING_MASK] = _cut_for_sequence_parallelism(batch[PADDING_MASK])
    batch[LOSS_TOKENS] = loss_tokens
    return {key: batch.get(key) for key in KEYS}


def _has_masks(args: Namespace) -> bool:
    """Whether layers need to know more of a batch than their input."""
    return bool(args.num_experts or args.create_attention_mask_in_dataloader)


def _is_first(vp_stage: int | None) -> bool:
    first: bool = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return first


def _at_an_end(vp_stage: int | None) -> bool:
    last: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return _is_first(vp_stage) or last


def _at_the_end(
    args: Namespace, given: dict[str, Any], size: int, vp_stage: int | None
) -> dict[str, Any]:
    """Share tokens or labels over tensor ranks; the masks are shared already."""
    batch: dict[str, Any] = get_batch_on_this_tp_rank(
        dict(given),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=_is_first(vp_stage),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
    )
    return batch


def _shared_masks(args: Namespace, given: dict[str, Any], size: int) -> dict[str, Tensor | None]:
    """Return the masks that every layer needs, on every tensor rank."""
    length = args.seq_length
    shapes: dict[str, tuple[int, ...]] = {}
    if args.num_experts:
        shapes[PADDING_MASK] = (size, length)
    if args.create_attention_mask_in_dataloader:
        shapes["attention_mask"] = (size, 1, length, length)
    masks: dict[str, Tensor | None] = dict.fromkeys((PADDING_MASK, "attention_mask"))
    for key, shape in shapes.items():
        mask = given[key]
        if mask is None:  # what others send, or a batch that says nothing of padding: none
            mask = torch.zeros(shape, dtype=torch.bool, device=torch.cuda.current_device())
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            dist.broadcast(
                mask,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        masks[key] = mask
    return masks


def _loss_tokens(args: Namespace, loss_mask_BS: Tensor | None) -> Tensor | None:
    """Return the number of tokens in the loss, on every tensor rank, where routers weigh by it."""
    if not (args.num_experts and args.calculate_per_token_loss):
        return None
    count = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    if loss_mask_BS is not None:
        count = loss_mask_BS.sum(dtype=torch.float32)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.broadcast(
            count,
            parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    return count


def _cut_for_sequence_parallelism(mask_BS: Tensor) -> Tensor:
    """Return the positions that this tensor rank holds: shape (B, S / TP)."""
    if not get_args().sequence_parallel:
        return mask_BS
    shards = mask_BS.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=1)
    mine_BS: Tensor = shards[parallel_state.get_tensor_model_parallel_rank()]
    return mine_BS.contiguous()
