"""Each repair wraps what it says, does nothing where nothing is broken, and is undone.

That they make runs resume is shown by tests/checkpoint/test_resume.py.
"""

import inspect
import queue
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_switch.errors import UpstreamError
from megatron_switch.upstream import repairs
from megatron_switch.upstream.repairs import megatron_repairs, repaired_megatron

NUMBER_OF_REPAIRS = 15
"""A repair more needs a reason; a repair less, a release of Megatron that needs it no longer."""


@pytest.fixture(autouse=True)
def _torch_supplies_adam(monkeypatch):
    from megatron.core.optimizer import distrib_optimizer

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)


@pytest.fixture
def fused_adam(monkeypatch):
    from megatron.core.optimizer import distrib_optimizer

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


def _targets() -> list[Any]:
    import importlib

    found = []
    for repair in megatron_repairs():
        module, _, path = repair.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        found.append(inspect.getattr_static(owner, name))
    return found


def test_the_number_of_repairs_is_pinned():
    assert len(megatron_repairs()) == NUMBER_OF_REPAIRS


def test_all_are_applied_and_undone():
    before = _targets()
    with repaired_megatron():
        assert all(now is not then for now, then in zip(_targets(), before, strict=True))
    assert _targets() == before


def test_changed_source_stops_the_program_with_nothing_changed(monkeypatch):
    from megatron.core.datasets import utils

    monkeypatch.setattr(utils, "compile_helpers", lambda: None)
    before = _targets()
    with pytest.raises(UpstreamError, match=r"compile_helpers .* is not the code"):
        repaired_megatron().__enter__()
    assert _targets() == before


def test_the_compiled_helper_of_the_wheel_is_taken(monkeypatch):
    calls = []
    repaired = repairs._compile_if_missing(lambda: calls.append("make"))
    repaired()
    assert calls == []
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    monkeypatch.setattr(repairs.importlib.util, "find_spec", lambda name: None)
    repaired()
    assert calls == ["make"]


def test_a_synchronous_save_uses_a_queue_of_this_process():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    used = []

    def save(self: Any, state: Any, folder: Any) -> None:
        used.append(filesystem_async.get_write_results_queue())

    before = filesystem_async._results_queue
    repairs._save_with_local_queue(save)(None, {}, "folder")
    assert [type(each) for each in used] == [queue.Queue]
    assert filesystem_async._results_queue is before


def test_the_queue_is_taken_back_when_a_save_fails():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue

    def save(self: Any, state: Any, folder: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        repairs._save_with_local_queue(save)(None, {}, "folder")
    assert filesystem_async._results_queue is before


def test_megatron_still_writes_the_tracker_through_its_storage_client():
    from megatron.training.checkpointing import save_checkpoint

    assert "maybe_msc.open(tracker_filename, 'w')" in inspect.getsource(save_checkpoint)


def _optimizer(*steps: float, group_step: float | None = None) -> SimpleNamespace:
    """An inner torch optimizer with one parameter for each step that it has taken."""
    state = {index: {"step": torch.tensor(step)} for index, step in enumerate(steps)}
    group = {"params": list(state)} | ({} if group_step is None else {"step": group_step})
    return SimpleNamespace(state=state, param_groups=[group])


def _upstream_step(self: Any) -> float:
    """What the original does with the state: read the one step off it."""
    (step,) = {state["step"].item() for state in self.optimizer.state.values()}
    return step


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [(_optimizer(3.0, 3.0), 3.0), (_optimizer(), 0.0), (_optimizer(group_step=5.0), 5.0)],
)
def test_an_optimizer_without_state_has_a_step_too(optimizer, step):
    states = dict(optimizer.state)
    owner = SimpleNamespace(optimizer=optimizer)
    assert repairs._state_dict_without_steps(_upstream_step)(owner) == step
    assert optimizer.state == states


def test_loaded_steps_are_not_shared():
    optimizer = _optimizer(0.0, 0.0)

    def load(self: Any, state_dict: Any) -> None:
        shared = torch.tensor(3.0)
        for state in optimizer.state.values():
            state["step"] = shared

    owner = SimpleNamespace(
        optimizer=optimizer, ddp_config=SimpleNamespace(use_megatron_fsdp=False)
    )
    repairs._load_with_own_steps(load)(owner, {"optimizer": {"param_groups": []}})
    first, second = (state["step"] for state in optimizer.state.values())
    assert first == second == 3.0
    assert first is not second


def test_weights_that_require_gradients_are_loaded_and_steps_are_not():
    weight = torch.zeros(3, requires_grad=True)
    seen = {}

    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        weight.view(-1).copy_(tensors["param"])
        seen.update(tensors)

    tensors = {"param": torch.ones(3), "step": torch.tensor(1.0)}
    repairs._set_states_except_step(set_states)(None, None, tensors)
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert seen["step"] is None
    assert tensors["step"] == 1.0


def test_state_is_cut_where_the_buckets_lie():
    """Three parameters in two buckets, the first of which is padded from 3 to 8 values."""
    first = SimpleNamespace(offset=0, numel_unpadded=3)
    second = SimpleNamespace(offset=8, numel_unpadded=2)
    dense = SimpleNamespace(buckets=[first, second])
    experts = SimpleNamespace(buckets=[SimpleNamespace(offset=0, numel_unpadded=2)])
    gathered = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])

    class Optimizer:
        def __init__(self) -> None:
            self.buffers = [dense, experts]

        def get_parameter_state_dp_zero(self, empty_data: bool) -> dict[Any, Any]:
            state = {"exp_avg": gathered, "numel_unpadded": 5}
            unpadded = {"exp_avg": gathered[:2], "numel_unpadded": 2}
            return {"buckets_coalesced": True, 0: {"fp32": state}, 1: {"fp32": unpadded}}

    def cut(self: Any) -> list[list[float]]:
        state = self.get_parameter_state_dp_zero(empty_data=False)
        dense, experts = state[0]["fp32"]["exp_avg"], state[1]["fp32"]["exp_avg"]
        return [dense[0:3].tolist(), dense[8:10].tolist(), experts[0:2].tolist()]

    optimizer = Optimizer()
    cuts = repairs._cut_state_where_it_lies(cut)(optimizer)
    assert cuts == [[1.0, 2.0, 3.0], [4.0, 5.0], [1.0, 2.0]]
    assert "get_parameter_state_dp_zero" not in vars(optimizer)


def test_state_that_another_rank_gathered_is_nothing_to_cut():
    class Optimizer:
        def get_parameter_state_dp_zero(self) -> None:
            return None

    cut = repairs._cut_state_where_it_lies(lambda self: self.get_parameter_state_dp_zero())
    assert cut(Optimizer()) is None


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_marked_to_be_skipped_counts_as_an_overflow(monkeypatch, overflow, skipped):
    asked = []
    monkeypatch.setattr(repairs, "step_is_skipped", lambda: skipped)
    prepare = repairs._skip_marked_steps(lambda self: asked.append(self) or overflow)
    assert prepare("chain") == (overflow or skipped)
    assert asked == ["chain"]  # a loss scaler must hear of every step


def test_a_missing_step_of_the_experts_comes_from_the_dense_optimizer():
    loaded = {}
    load = repairs._load_with_sibling_step(lambda self, state: loaded.update(state))
    chain = SimpleNamespace(chained_optimizers=[None, None])
    load(chain, {0: {"state": {"common_step": torch.tensor(3.0)}}, 1: {"state": {}}})
    first, second = (loaded[index]["state"]["common_step"] for index in (0, 1))
    assert first == second == 3.0
    assert first is not second


def test_a_missing_step_in_mixed_precision_lies_one_level_deeper():
    loaded = {}
    load = repairs._load_with_sibling_step(lambda self, state: loaded.update(state))
    chain = SimpleNamespace(chained_optimizers=[None, None])
    dense = {"optimizer": {"state": {"common_step": torch.tensor(3.0)}}}
    load(chain, {0: dense, 1: {"optimizer": {"state": {}}}})
    assert loaded[1]["optimizer"]["state"]["common_step"] == 3.0


@pytest.mark.parametrize("state", [[{"state": {}}], {0: {"state": {}}}, {0: {}, 1: {}}])
def test_records_without_any_step_are_left_alone(state):
    before = repr(state)
    chain = SimpleNamespace(chained_optimizers=[None, None])
    repairs._load_with_sibling_step(lambda self, state: None)(chain, state)
    assert repr(state) == before


@pytest.mark.parametrize("groups", [[["weight"], []], [[]], []])
def test_empty_lists_of_main_weights_stay_on_their_rank(groups):
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    record = repairs._keep_empty_lists_local(
        lambda self, model, is_loading, metadata: {"fp32_from_fp16_params": groups}
    )(None, {})
    kept = record["fp32_from_fp16_params"]
    if any(groups):
        assert kept is groups
    else:
        assert isinstance(kept, LocalNonpersistentObject)
        assert kept.unwrap() == groups


def _chain(*optimizers: SimpleNamespace) -> SimpleNamespace:
    from megatron.core.optimizer import DistributedOptimizer

    members = [DistributedOptimizer.__new__(DistributedOptimizer) for _ in optimizers]
    for member, optimizer in zip(members, optimizers, strict=True):
        member.optimizer = optimizer
    return SimpleNamespace(chained_optimizers=members)


def test_an_optimizer_without_parameters_saves_its_siblings_step():
    dense, experts = _optimizer(5.0, group_step=3.0), _optimizer(group_step=3.0)
    repairs._synchronize_empty_optimizers(lambda self: None)(_chain(dense, experts))
    assert experts.param_groups[0]["step"] == 5.0
    assert dense.param_groups[0]["step"] == 3.0  # torch's Adam keeps its step elsewhere


def test_a_chain_that_has_taken_no_step_has_none_to_share():
    dense, experts = _optimizer(), _optimizer()
    repairs._synchronize_empty_optimizers(lambda self: None)(_chain(dense, experts))
    assert "step" not in experts.param_groups[0]


@pytest.mark.usefixtures("fused_adam")
def test_a_fused_adam_is_left_alone():
    """Transformer Engine and Apex keep one step per group, and none per parameter."""
    optimizer = SimpleNamespace(state={}, param_groups=[{"params": [0], "step": 3}])
    owner = SimpleNamespace(optimizer=optimizer)
    original = SimpleNamespace(state=None)

    def state_dict(self: Any) -> dict[str, Any]:
        original.state = dict(self.optimizer.state)
        return {}

    repairs._state_dict_without_steps(state_dict)(owner)
    assert original.state == {}
    seen = {}
    repairs._set_states_except_step(lambda self, param, tensors: seen.update(tensors))(
        None, None, {"param": torch.ones(1)}
    )
    assert list(seen) == ["param"]
    empty = SimpleNamespace(state={}, param_groups=[{"params": []}])
    repairs._synchronize_empty_optimizers(lambda self: None)(_chain(optimizer, empty))
    assert empty.param_groups == [{"params": []}]
    step = torch.tensor(1.0)
    optimizer.state = {0: {"step": step}}
    owner.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
    repairs._load_with_own_steps(lambda self, state_dict: None)(owner, {})
    assert optimizer.state[0]["step"] is step
