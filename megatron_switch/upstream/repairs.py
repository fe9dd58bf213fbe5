"""Repairs of Megatron-Core that a run needs on every device.

The wheel trains, but saving and resuming fail in places: with the distributed optimizer and torch's
Adam (no Transformer Engine, no Apex) a run cannot resume, or resumes with wrong numbers; optimizer
state that may change its layout is wrong as soon as gradients have several buckets; no optimizer
resumes with another learning rate; a pipeline stage without experts loses its optimizer's step; a
model with experts loads only where it was trained, with Transformer Engine or without; the first
save starts a process per rank that takes seconds; a crash can leave an empty tracker. And its log
of tokens per expert does not count experts that are not Transformer Engine's.

:func:`repaired_megatron` enters all repairs for the length of a ``with`` block. Each one
wraps the original instead of copying it, names its reason, and is checked against the
source it wraps (:mod:`megatron_switch.upstream.patching`). Where Transformer Engine or Apex supply
Adam, which keeps one step per parameter group, the repairs of torch's Adam do nothing.
"""

import importlib.util
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_switch.checkpoint.formats.dist_metadata import read_index
from megatron_switch.checkpoint.load.group_rates import take_rates
from megatron_switch.checkpoint.load.norm_keys import name_norms_as_stored
from megatron_switch.checkpoint.load.object_types import check_types
from megatron_switch.checkpoint.load.write_errors import bytes_to_write, unwritten
from megatron_switch.errors import CheckpointError
from megatron_switch.moe.metrics.count_log import register_count_hooks
from megatron_switch.moe.metrics.tracker import step_is_skipped
from megatron_switch.upstream.patching import Patch, applied
from megatron_switch.upstream.tracker import TrackerRenamed

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_CHAIN = "megatron.core.optimizer.optimizer:ChainedOptimizer"
_MIXED = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_PLACEHOLDER = "step of an optimizer without parameters"


@contextmanager
def repaired_megatron() -> Iterator[None]:
    """Apply every repair for the length of a ``with`` block.

    Raises:
        UpstreamError: The installed Megatron-Core is not what the repairs were checked
            against; nothing has been changed.
    """
    with applied(megatron_repairs()):
        yield


def megatron_repairs() -> tuple[Patch, ...]:
    """Return the repairs, without applying them."""
    return (
        Patch(
            f"{_OPTIMIZER}.state_dict",
            "it asserts that the optimizer has taken a step, which a new one, and one without "
            "parameters on this pipeline stage, has not",
            wrapper=_state_dict_without_steps,
            sha256=("fe621ae6a622b58752df0330a2a30056dda222d73f22dc6bce6a5d1ac2bfa3d8",),
        ),
        Patch(
            f"{_OPTIMIZER}.load_state_dict",
            "all parameters get one step tensor, and Adam adds to it once for each of them; and "
            "groups of parameters with another learning rate than before are not found",
            wrapper=_load_with_own_steps,
            sha256=("7e5f988b86b485012fe3031b4960e8624d3b6e8db12a49367ffeae5777de029f",),
        ),
        Patch(
            "megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
            "groups of parameters with another learning rate than before are not found",
            wrapper=_pair_by_kind,
            sha256=("08e55f3aea6499b771bfd42a027d2a5064dff3e9718496d6753dd862a2f172b9",),
        ),
        Patch(
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            "it writes into weights that require gradients, and expects the step among tensors "
            "that were never saved or holds a placeholder's",
            wrapper=_set_states_except_step,
            sha256=("40cab784659711a8e7cdd5a0d84e60de0e1a2fa648316d4d697af83725311b4b",),
        ),
        Patch(
            f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
            "with several buckets it cuts the state at places that count the padding between "
            "them, out of a copy without it, and saves other parameters' moments",
            wrapper=_cut_state_where_it_lies,
            sha256=("6df6392a0ebb4c79b632fccd59d2703ac0021f0a73ef9e87eb32d0b3bdfb23b0",),
        ),
        Patch(
            f"{_CHAIN}._synchronize_steps",
            "an optimizer without parameters on this rank has no step of its own to save",
            wrapper=_synchronize_empty_optimizers,
            sha256=("cb76e52372e8e5b13fd2fc6eaf71eea1702227c5deecef5ef3bb578e4f2cd211",),
        ),
        Patch(
            f"{_CHAIN}.prepare_grads",
            "only a loss scaler can skip a step, and fp32 and bf16 have none",
            wrapper=_skip_marked_steps,
            sha256=("423ada69590e3dde0f82d1771a468d4bcbc777c0270c959b6c7c0e8256326391",),
        ),
        Patch(
            f"{_CHAIN}.load_state_dict",
            "the first rank, which alone saves common state, may have no experts, and then the "
            "experts' step is missing",
            wrapper=_load_with_sibling_step,
            sha256=("403774c7dde1d5460414ceec11ca3d6946e1eff7a9713a51aff30ac61425df4c",),
        ),
        Patch(
            f"{_MIXED}.sharded_state_dict",
            "a rank without experts saves, or fails to find, an empty list in the place of other "
            "ranks' main weights",
            wrapper=_keep_empty_lists_local,
            sha256=("9c7488e7734f2cae432498fb24f5333451a08aed27888570d80fbe04a6912d04",),
        ),
        Patch(
            "megatron.training.checkpointing:maybe_msc",
            "the tracker is written in place, and a job killed meanwhile leaves an empty one",
            wrapper=TrackerRenamed,
            alias_of="megatron.core.msc_utils:maybe_msc",
        ),
        Patch(
            "megatron.core.dist_checkpointing.strategies.torch:TorchDistSaveShardedStrategy.save",
            "a synchronous save hands its results over through a new process per rank, which "
            "takes seconds and a copy of torch to start; and of a full disk its error says nothing",
            wrapper=_save_with_local_queue,
            sha256=("e3bb2e822ccbabc8981c9437847e77eb44f34fb0a8a1d7f14c05f3b5da679422",),
        ),
        Patch(
            "megatron.core.dist_checkpointing:load",
            "plain torch layers save the norm before experts under another name than Transformer "
            "Engine's, and neither loads what the other saved",
            wrapper=_load_by_either_name,
            sha256=("40f333740e86ac388918bd5de2539cdcc7538250f034a23026861f6e8ac61413",),
        ),
        Patch(
            "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
            "it unpickles whatever objects a checkpoint holds, which runs what they name",
            wrapper=_load_known_types,
        ),
        Patch(
            "megatron.core.datasets.utils:compile_helpers",
            "it runs make, but the wheel has the compiled helper and no Makefile",
            wrapper=_compile_if_missing,
            sha256=("84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63",),
        ),
        Patch(
            "megatron.training.activation_logging:ActivationLogger.register_tpe_hooks",
            "it looks for Transformer Engine's experts only, and takes padded rows for tokens",
            register_count_hooks,
            sha256=("ad828d23398bf8435eb7616b5297db67e5d2b20d69e76bd31b2f9ec78a065004",),
        ),
    )


def _has_fused_adam() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return bool(distrib_optimizer.HAVE_APEX_OR_TE)


def _state_dict_without_steps(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """With no state, the step is the one that the sibling left in the group, else 0."""

    def state_dict(self: Any) -> Any:
        if _has_fused_adam() or len(self.optimizer.state) > 0:
            return original(self)
        step = next((group["step"] for group in self.optimizer.param_groups if "step" in group), 0)
        # The original reads the step off any state and keeps nothing else of it.
        self.optimizer.state[_PLACEHOLDER] = {"step": torch.tensor(float(step))}
        try:
            return original(self)
        finally:
            del self.optimizer.state[_PLACEHOLDER]

    return state_dict


def _load_with_own_steps(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if not self.ddp_config.use_megatron_fsdp:
            take_rates(state_dict["optimizer"]["param_groups"], self.optimizer.param_groups)
        original(self, state_dict)
        if _has_fused_adam():
            return
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


def _pair_by_kind(original: Any) -> Any:
    def _filter_and_reorder_param_groups(current_groups: Any, state_dict_groups: Any) -> Any:
        take_rates(state_dict_groups, current_groups)
        return original.__func__(current_groups, state_dict_groups)

    return staticmethod(_filter_and_reorder_param_groups)


def _set_states_except_step(
    original: Callable[[Any, Any, Any], None],
) -> Callable[[Any, Any, Any], None]:
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self: Any, model_param: Any, tensors: Mapping[str, Any]
    ) -> None:
        if not _has_fused_adam():
            # Values that are no tensors are skipped; load_state_dict has set the step already.
            tensors = {**tensors, "step": None}
        original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def _cut_state_where_it_lies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give the gathered state the buffers' own layout, padding included, before it is sliced."""

    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        gather = self.get_parameter_state_dp_zero

        def gather_padded(*gather_args: Any, **gather_kwargs: Any) -> Any:
            state = gather(*gather_args, **gather_kwargs)
            if state is not None:  # another rank holds what was gathered
                for index, buffer in enumerate(self.buffers):
                    for tensors in state[index].values():
                        for key, value in tensors.items():
                            if isinstance(value, Tensor):
                                tensors[key] = _with_padding(value, buffer.buckets)
            return state

        self.get_parameter_state_dp_zero = gather_padded
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero

    return sharded_param_state_fully_reshardable


def _with_padding(values: Tensor, buckets: Sequence[Any]) -> Tensor:
    """Move one buffer's values, stored bucket after bucket, to the offsets of the buckets."""
    ends = [bucket.offset + bucket.numel_unpadded for bucket in buckets]
    if ends[-1] == values.numel():
        return values  # nothing was padded, except behind the last bucket
    spread = values.new_zeros(ends[-1])
    taken = 0
    for bucket, end in zip(buckets, ends, strict=True):
        spread[bucket.offset : end] = values[taken : taken + bucket.numel_unpadded]
        taken += bucket.numel_unpadded
    return spread


def _synchronize_empty_optimizers(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let optimizers without state save their siblings' step."""

    def _synchronize_steps(self: Any) -> Any:
        from megatron.core.optimizer import DistributedOptimizer

        result = original(self)
        members = [
            each for each in self.chained_optimizers if isinstance(each, DistributedOptimizer)
        ]
        states = [state for each in members for state in each.optimizer.state.values()]
        steps = [float(state["step"]) for state in states if "step" in state]
        if steps and not _has_fused_adam():
            for each in members:
                if not each.optimizer.state:
                    for group in each.optimizer.param_groups:
                        group["step"] = steps[0]
        return result

    return _synchronize_steps


def _skip_marked_steps(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Report a step that must be skipped as an overflow, which the optimizer skips."""

    def prepare_grads(self: Any) -> bool:
        overflow = original(self)  # in any case: it brings a loss scaler up to date
        return overflow or step_is_skipped()

    return prepare_grads


def _load_with_sibling_step(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if isinstance(state_dict, dict) and len(self.chained_optimizers) > 1:
            # In mixed precision the torch optimizer's record is one level deeper.
            records = [member.get("optimizer", member) for member in state_dict.values()]
            states = [record["state"] for record in records if "state" in record]
            steps = [state["common_step"] for state in states if "common_step" in state]
            for state in states:
                if steps and "common_step" not in state:
                    state["common_step"] = steps[0].clone()
        original(self, state_dict)

    return load_state_dict


def _keep_empty_lists_local(original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

        record = original(self, model_sharded_state_dict, is_loading, metadata)
        groups = record["fp32_from_fp16_params"]
        if not any(groups):
            # What is neither sharded nor local counts as common to all ranks.
            record["fp32_from_fp16_params"] = LocalNonpersistentObject(groups)
        return record

    return sharded_state_dict


def _save_with_local_queue(
    original: Callable[[Any, Any, Any], None],
) -> Callable[[Any, Any, Any], None]:
    """Give a synchronous save a queue within this process, and explain why one fails."""

    def save(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        shared = filesystem_async._results_queue
        filesystem_async._results_queue = queue.Queue()
        try:
            original(self, sharded_state_dict, checkpoint_dir)
        except CheckpointException as error:  # on all ranks
            needed = bytes_to_write(sharded_state_dict)
            raise unwritten(Path(checkpoint_dir), needed, str(_first_failure(error))) from error
        finally:
            filesystem_async._results_queue = shared

    return save


def _first_failure(error: CheckpointException) -> BaseException | str:
    failures = [failure for failure, _ in error.failures.values()]
    return failures[0] if failures else "see the log of rank 0"  # Megatron reports it there only


def _load_known_types(original: Callable[..., None]) -> Callable[..., None]:
    def load_bytes(self: Any, read_item: Any, value: Any) -> None:
        check_types(value, read_item.dest_index.fqn)
        original(self, read_item, value)

    return load_bytes


def _load_by_either_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(checkpoint_dir)
        if folder.is_dir():  # not an object store's address
            name_norms_as_stored(sharded_state_dict, read_index(folder).state_dict_metadata)
        try:
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        except CheckpointException as error:  # on all ranks
            failure = _first_failure(error)
            if isinstance(failure, CheckpointError):
                raise failure from error
            raise CheckpointError(
                f"{checkpoint_dir} is damaged: its files have their sizes, but reading them fails "
                f"({failure}). Copy it again, or choose another iteration with "
                "--ckpt-step."
            ) from error

    return load


def _compile_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()  # a source checkout, which has the Makefile

    return compile_helpers
