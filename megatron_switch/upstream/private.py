"""Every private name of torch and Megatron-Core that is used outside declared patches.

A private name may change in any release, so each stands here, under a public name, and nowhere
else: ``tests/upstream/test_private.py`` checks that all of them exist and that no other module
names one. Names that are *replaced* are patches (:mod:`megatron_switch.upstream.patching`).

The model code imports this file, so modules of Megatron's training loop are imported inside the
functions that need them.
"""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, HashStore
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "FakeWork",
    "HashStore",
    "StorageInfo",
    "TorchDispatchMode",
    "fake_store",
    "function_mode_stack",
    "has_values",
    "in_autograd_node",
    "in_kernel_invocation_manager",
    "install_signal_handler",
    "local_storage",
    "model_parallel_groups",
    "open_log_writers",
    "operator_packet",
    "operator_schema",
    "replace_tensorboard_writer",
    "replace_wandb_writer",
    "storage_address",
    "with_values",
    "without_dispatch_modes",
]

with_values = unset_fake_temporarily
"""``with with_values():`` tensors made in the block have values, also inside a fake mode."""


def function_mode_stack() -> list[Any]:
    """Return the function modes that see a call made now, outermost first."""
    stack: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has memory that can be read and filled: it is not meta or fake."""
    return not (tensor.is_meta or isinstance(tensor.data, FakeTensor))


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has, also of tensors without values."""
    address: int = storage._cdata
    return address


def local_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; of a DTensor, that of this rank's part."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.untyped_storage()


def in_autograd_node() -> bool:
    """Return whether a node of a backward pass is being executed on this thread."""
    return torch._C._current_autograd_node() is not None


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator: its arguments, its returns and what they alias."""
    return operator._schema


def operator_packet(operator: Any) -> Any:
    """Return the operator of which this is one overload."""
    return operator._overloadpacket


def fake_store() -> Any:
    """Return the store of a fake process group, and register that back end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def model_parallel_groups() -> set[dist.ProcessGroup]:
    """Return every process group that Megatron has made and not destroyed."""
    from megatron.core import parallel_state

    return set(parallel_state._global_process_group_list or ()) - {None}


def open_log_writers(args: Namespace) -> None:
    """Open, on the last rank, TensorBoard's file, the W&B run and One Logger.

    Args:
        args: Megatron's validated arguments.
    """
    from megatron.training import global_vars

    global_vars._set_tensorboard_writer(args)
    global_vars._set_wandb_writer(args)
    global_vars._set_one_logger(args)


def replace_tensorboard_writer(writer: Any) -> Any:
    """Put ``writer`` into Megatron's TensorBoard slot, unless it is None; return the one before."""
    from megatron.training import global_vars

    before = global_vars._GLOBAL_TENSORBOARD_WRITER
    if writer is not None:
        global_vars._GLOBAL_TENSORBOARD_WRITER = writer
    return before


def replace_wandb_writer(writer: Any) -> Any:
    """Put ``writer`` into Megatron's Weights & Biases slot, as the function above does."""
    from megatron.training import global_vars

    before = global_vars._GLOBAL_WANDB_WRITER
    if writer is not None:
        global_vars._GLOBAL_WANDB_WRITER = writer
    return before


def install_signal_handler(handler: Any) -> None:
    """Let Megatron's loop ask ``handler`` whether to save and exit (``--exit-signal-handler``)."""
    from megatron.training import global_vars

    global_vars._GLOBAL_SIGNAL_HANDLER = handler
