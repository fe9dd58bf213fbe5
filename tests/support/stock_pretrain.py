"""Stock Megatron GPT through unmodified ``pretrain`` on made-up data: the harness of these tests.

Of this package only the emulation under test takes part, and the repairs that any device needs.
Two things come in through supported seams: a norm that works with sequence parallelism, which
stock Megatron lacks without Transformer Engine on any device (the layer spec), and weights that
do not depend on the layout, without which layouts could not be compared (a hook before DDP).
"""

import dataclasses
import functools
import hashlib
import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_switch.emulation import cuda_on_cpu, launch
from megatron_switch.upstream.repairs import repaired_megatron

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


@dataclass
class Record:
    """What one rank notes; the lists have one entry for each micro-batch on the last stage."""

    losses: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    random_states: dict[str, str] = field(default_factory=dict)  # digests, at the end


def losses_of(records: list[Record], num_iterations: int = 3) -> list[float]:
    """Mean lm loss of each iteration, over micro-batches and ranks of the last stage."""
    losses_RN = torch.tensor([record.losses for record in records if record.losses])
    per_rank_RI = losses_RN.reshape(len(losses_RN), num_iterations, -1).mean(dim=-1)
    return per_rank_RI.mean(dim=0).tolist()


def train(num_ranks: int, flags: str, folder: Path) -> list[Record]:
    """Train on forked ranks; return their records in rank order."""
    code = launch(num_ranks, lambda: train_rank(flags, folder))
    assert code == 0, f"training with {flags} ended with exit code {code}"
    return read_records(num_ranks, folder)


def read_records(num_ranks: int, folder: Path) -> list[Record]:
    """Records that ranks left in ``folder``, in rank order."""
    texts = [(folder / f"rank-{rank}.json").read_text() for rank in range(num_ranks)]
    return [Record(**json.loads(text)) for text in texts]


def train_rank(flags: str, folder: Path) -> None:
    """Train on this rank, inside the emulation, and leave a record in ``folder``."""
    record = Record()
    with cuda_on_cpu(), repaired_megatron():
        pretrain(flags, record)
        record.random_states = _random_states()
        rank = torch.distributed.get_rank()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(dataclasses.asdict(record)))


def pretrain(flags: str, record: Record) -> None:
    """Parse the base flags and ``flags``, and call Megatron's ``pretrain``."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as megatron_pretrain
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
    megatron_pretrain(
        pretrain_cfg_container_from_args(args, model),
        functools.partial(_datasets, args),
        ModelType.encoder_or_decoder,
        functools.partial(_forward_step, args, record),
    )


class _Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample ``i`` is drawn from a generator with seed ``i``."""

    def __init__(self, num_samples: int, args: Namespace) -> None:
        self._num_samples, self._length, self._vocabulary = (
            num_samples,
            args.seq_length,
            args.vocab_size,
        )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = numpy.random.default_rng(int(index))
        tokens = torch.from_numpy(draw.integers(self._vocabulary, size=self._length + 1))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
            "attention_mask": torch.ones(1, self._length, self._length).tril() < 0.5,
        }


def _datasets(args: Namespace, num_samples: list[int], vp_stage: int | None = None) -> Any:
    return [_Samples(number, args) if number else None for number in num_samples]


def _forward_step(
    args: Namespace, record: Record, data: Iterator[Any], model: Any
) -> tuple[Tensor, Any]:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    batch = _batch(args, data, get_attr_wrapped_model(model, "vp_stage"))
    loss_BS = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )

    def loss_of_batch(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (loss_BS.float() * batch["loss_mask"]).sum()
        num_tokens = batch["loss_mask"].sum().to(torch.int)
        record.losses.append((total / num_tokens).item())
        scale = get_model_config(model).grad_scale_func
        record.loss_scales.append(scale(torch.ones(1)).item())
        return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens])}

    return loss_BS, loss_of_batch


def _batch(args: Namespace, data: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    """This rank's micro-batch, handed out by the first rank of each tensor group."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_tp_rank

    ignore_virtual = vp_stage is None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual, vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual, vp_stage)
    if not (first or last):
        keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
        return dict.fromkeys(keys)
    batch = {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data).items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=True,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=tp_rank,
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
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if spec is WrappedTorchNorm:
        return _Norm
    if isinstance(spec, list):
        return [_with_norm(each) for each in spec]
    if isinstance(spec, functools.partial):
        keywords = {name: _with_norm(value) for name, value in spec.keywords.items()}
        return functools.partial(spec.func, **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        names = [each.name for each in dataclasses.fields(spec)]
        return dataclasses.replace(
            spec, **{name: _with_norm(getattr(spec, name)) for name in names}
        )
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


if __name__ == "__main__":
    train_rank(sys.argv[1], Path(sys.argv[2]))
