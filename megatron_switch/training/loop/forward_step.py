"""One micro-batch: this rank's part of the data, the model's forward pass, and the loss.

The first rank of each tensor-parallel group reads the data and sends them to the others. Tokens and
labels are needed at the ends of a pipeline only, and are sent by Megatron's own function; the
padding mask and an explicit attention mask are needed by every layer, so every stage reads them.
Every stage reads the same samples in the same order.

Megatron's model cuts the padding mask for sequence parallelism on the first stage and nowhere else.
Here the first stage therefore gets the mask of all positions that its context-parallel rank holds,
and a later stage one that is cut already.

The forward step also sets the key of the micro-batch, from which Switch layers draw their noise.
The number of a micro-batch in its global batch is the same in every layout with the same
micro-batch size.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args
from torch import Tensor

from megatron_switch.config import SwitchConfig
from megatron_switch.data import encoder_decoder
from megatron_switch.data.padding import PADDING_MASK, filled_up
from megatron_switch.moe.counter_rng import mix
from megatron_switch.moe.micro_batch_state import set_loss_tokens, set_step_key

LOSS_TOKENS = "loss_tokens"
"""Key of the number of tokens in the loss of the whole micro-batch, float32, on every stage."""
KEYS = (
    *("tokens", "labels", "loss_mask", "attention_mask", "position_ids"),
    *(PADDING_MASK, LOSS_TOKENS),
)


def forward_step_of(
    args: Namespace, switch: SwitchConfig, on_evaluation: Callable[[], None]
) -> "ForwardStep":
    """Return the forward step of the architecture.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.
        on_evaluation: Called before each micro-batch of an evaluation.
    """
    kind = T5ForwardStep if args.switch_arch == "t5" else ForwardStep
    noise = args.moe_input_jitter_eps or switch.expert_dropout
    keyed = bool(args.num_experts and noise)
    return kind(seed=args.seed, keyed=keyed, on_evaluation=on_evaluation)


class ForwardStep:
    """Megatron's forward step for a decoder-only model.

    Args:
        seed: Seed of the run, part of the key of Switch layers' noise.
        keyed: Whether any Switch layer draws noise, so that micro-batches need keys.
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

        Megatron names the split only in a printed text. It reads validation data first whenever
        there are any, and each split keeps one iterator per model chunk. With several validation
        sets there is no test data. Ranks that read no data return 0.
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
        """Return a hash that identifies this micro-batch in the run, in any layout.

        A schedule runs the micro-batches of a chunk in order, so counting calls numbers them; the
        count wraps around where Megatron runs an iteration again to check a result.
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
        batch = _read_t5_batch(data_iterator)
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


def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the values that Megatron expects of a loss function.

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
    """Return a loss that is the mean over a whole micro-batch, whichever context ranks hold it.

    Unless the loss is counted per token, Megatron divides a rank's sum by the rank's own tokens and
    averages over ranks. Context ranks hold parts of one micro-batch, and its mean is not the mean
    of theirs where they have unequal numbers of tokens in the loss.

    Args:
        loss: :func:`masked_loss` of this rank's part.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size <= 1 or get_args().calculate_per_token_loss:
        return loss

    def whole_loss(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, num_tokens, logged = loss(loss_BS)
        dist.all_reduce(num_tokens, group=parallel_state.get_context_parallel_group())
        return total * size, num_tokens, logged

    return whole_loss


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this rank reads data for a model chunk.

    Args:
        vp_stage: Number of the chunk on its pipeline stage, or None if there is one.
    """
    args = get_args()
    if args.full_validation:  # Megatron takes the data's length on every rank
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


def _read_t5_batch(data_iterator: Iterator[Any]) -> dict[str, Tensor]:
    """Return the next micro-batch, on every rank of a tensor-parallel group."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    sample = next(data_iterator) if first else None
    batch: dict[str, Tensor] = tensor_parallel.broadcast_data(
        list(encoder_decoder.KEYS), sample, torch.int64
    )
    return batch


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
    """Send tokens or labels to all tensor ranks, which have the masks already."""
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
        if mask is None:  # a buffer to receive, or a batch without a mask: no padding
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
    """Return the number of tokens in the loss, on every tensor rank, where routers need it."""
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
