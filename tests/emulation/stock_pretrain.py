"""Stock Megatron GPT through unmodified ``pretrain`` on mock data: the harness of these tests.

Of this package only the emulation under test takes part. Two things that stock Megatron
lacks without Transformer Engine, on any device, come in through supported seams: a norm
that works with sequence parallel (the layer spec), and weights that do not depend on the
layout (a hook before DDP), without which layouts could not be compared.
"""

import dataclasses
import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.patching import Patch, applied

BASE_FLAGS = """
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --padded-vocab-size 256 --eval-iters 0 --eval-interval 100 --log-interval 1
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion
"""
MOE_FLAGS = """
    --num-experts 4 --moe-router-topk 1 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-z-loss-coeff 1e-3 --moe-router-pre-softmax
"""


@dataclass(frozen=True)
class RankRecord:
    """What one rank reports."""

    losses: list[float]  # mean lm loss of each micro-batch, on the last pipeline stage
    random_states: dict[str, str]  # digest of every random state at the end


def losses_of(records: list[RankRecord], num_iterations: int) -> list[float]:
    """Mean lm loss of each iteration, over micro-batches and ranks of the last stage."""
    losses_RN = torch.tensor([record.losses for record in records if record.losses])
    per_rank_RI = losses_RN.reshape(len(losses_RN), num_iterations, -1).mean(dim=-1)
    return per_rank_RI.mean(dim=0).tolist()


def train(num_ranks: int, flags: str, folder: Path) -> list[RankRecord]:
    """Train on forked ranks; records in rank order."""
    code = launch(num_ranks, lambda: train_rank(flags, folder))
    assert code == 0, f"training with {flags} ended with exit code {code}"
    return read_records(num_ranks, folder)


def read_records(num_ranks: int, folder: Path) -> list[RankRecord]:
    """Records that the ranks left in ``folder``, in rank order."""
    texts = [(folder / f"rank-{rank}.json").read_text() for rank in range(num_ranks)]
    return [RankRecord(**json.loads(text)) for text in texts]


def train_rank(flags: str, folder: Path) -> None:
    """Train on this rank, inside the emulation, and leave a record in ``folder``."""
    losses: list[float] = []
    with cuda_on_cpu(), applied([_NO_COMPILATION]):
        _pretrain(flags, losses)
        record = RankRecord(losses, _random_states())
        rank = torch.distributed.get_rank()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(dataclasses.asdict(record)))


def _pretrain(flags: str, losses: list[float]) -> None:
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = ["stock_pretrain.py", *BASE_FLAGS.split(), *flags.split()]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = _layer_spec
    model.pre_wrap_hooks = [_set_weights_by_name]

    def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch = _batch(args, data, get_attr_wrapped_model(model, "vp_stage"))
        loss_BS = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
        )

        def loss_of_batch(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = (loss_BS.float() * batch["loss_mask"]).sum()
            num_tokens = batch["loss_mask"].sum().to(torch.int)
            losses.append((total / num_tokens).item())
            return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens])}

        return loss_BS, loss_of_batch

    container = pretrain_cfg_container_from_args(args, model)
    pretrain(container, _datasets, ModelType.encoder_or_decoder, forward_step)


def _datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, num_samples, lambda: _holds_data(vp_stage), config
    ).build()


_datasets.is_distributed = True  # every rank takes part in building, as in Megatron's own script


def _ends_of_pipeline(vp_stage: int | None) -> tuple[bool, bool]:
    """Whether this rank's chunk ``vp_stage`` is the first, and the last, of the model."""
    from megatron.core import parallel_state

    ignore_virtual = vp_stage is None
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual, vp_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual, vp_stage),
    )


def _holds_data(vp_stage: int | None) -> bool:
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    return any(_ends_of_pipeline(vp_stage)) and get_tensor_model_parallel_rank() == 0


def _batch(args: Namespace, data: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    """This rank's micro-batch, handed out by the first rank of each tensor group."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_tp_rank

    first, last = _ends_of_pipeline(vp_stage)
    if not (first or last):
        keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
        return dict.fromkeys(keys)
    batch = {}
    if _holds_data(vp_stage):
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data).items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=True,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )


class _Norm:
    """Megatron's torch norm, and the mark by which its gradient is summed over TP ranks."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> Any:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def _layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return _with_norm(
        get_gpt_decoder_block_spec(
            config.transformer, use_transformer_engine=False, vp_stage=vp_stage
        )
    )


def _with_norm(spec: Any) -> Any:
    """A copy of ``spec`` in which every torch norm is :class:`_Norm`."""
    import functools

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if spec is WrappedTorchNorm:
        return _Norm
    if isinstance(spec, list):
        return [_with_norm(each) for each in spec]
    if isinstance(spec, functools.partial):
        return functools.partial(
            spec.func, **{name: _with_norm(value) for name, value in spec.keywords.items()}
        )
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        changes = {
            each.name: _with_norm(getattr(spec, each.name)) for each in dataclasses.fields(spec)
        }
        return dataclasses.replace(spec, **changes)
    return spec


def _set_weights_by_name(models: list[Any]) -> list[Any]:
    """Draw every whole weight from its checkpoint key, then keep this rank's part of it."""
    with torch.no_grad():
        for model in models:
            for sharded in _sharded_tensors(model):
                _set_weight(sharded)
    return models


def _sharded_tensors(model: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for value in nested_values(model.sharded_state_dict()):
        if isinstance(value, ShardedTensor) and value.data is not None:
            yield value


def _set_weight(sharded: Any) -> None:
    if "norm" in sharded.key:
        return  # ones in every layout
    seed = int(hashlib.sha256(sharded.key.encode()).hexdigest()[:8], 16)
    whole = torch.randn(sharded.global_shape, generator=torch.Generator().manual_seed(seed))
    lengths = (1,) * sharded.prepend_axis_num + tuple(sharded.data.shape)
    for dim, (start, length) in enumerate(zip(sharded.global_offset, lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    sharded.data.copy_(whole.reshape(sharded.data.shape) * 0.02)


def _random_states() -> dict[str, str]:
    import random

    import numpy
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr(numpy.random.get_state()).encode(),
        "host": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes(),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[name] = state.numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}


# The wheel ships the compiled helper without its Makefile; a repair that any device needs.
_NO_COMPILATION = Patch(
    "megatron.core.datasets.utils:compile_helpers",
    "the wheel has no Makefile",
    lambda: None,
    sha256=("84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63",),
)


if __name__ == "__main__":
    train_rank(sys.argv[1], Path(sys.argv[2]))
