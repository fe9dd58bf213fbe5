"""Fake tensors in a third of the time: result shapes are computed once for each kind of call.

torch's fake tensors cache results too, but the key covers so much of each argument that a hit costs
as much as a miss. Here the key is operator, shapes, strides and types, which suffices for a
training step; everything else is left to torch: tensors with known values, results that alias
arguments in other ways, operators outside ``aten``.

The first call of a kind always goes through torch, with all its checks.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from megatron_switch.upstream.private import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    operator_schema,
    storage_address,
)

_PLAIN: tuple[type, ...] = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.layout, torch.device, torch.memory_format),
)


class _Effect(Enum):
    NEW = auto()  # returns tensors with memory of their own
    IN_PLACE = auto()  # writes its first argument and returns it
    VIEW = auto()  # returns its first argument's memory under another shape
    OTHER = auto()


class _NoKeyError(Exception):
    """An argument that cannot be part of a key."""


class ShapeCache:
    """Runs operators on fake tensors.

    Args:
        mode: torch's mode, entered.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._effects: dict[Any, _Effect] = {}
        self._results: dict[Any, Callable[[], Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what ``func`` returns, with new fake tensors where it returns new ones."""
        effect = self._effects.get(func)
        if effect is None:
            effect = self._effects[func] = _effect(func)
        if effect is _Effect.OTHER:
            return func(*args, **kwargs)
        try:
            key = (
                func,
                tuple(map(_key_of, args)),
                tuple((k, _key_of(v)) for k, v in kwargs.items()),
            )
        except _NoKeyError:
            return func(*args, **kwargs)
        make = self._results.get(key)
        if make is None:
            result = func(*args, **kwargs)
            factory = self._factory(effect, result, args)
            if factory is not None:
                self._results[key] = factory
            return result
        if effect is _Effect.IN_PLACE:
            return args[0]
        if effect is _Effect.VIEW:
            # The meta tensor inside the fake one makes the view; only the wrapper is ours.
            with in_kernel_invocation_manager(self._mode):
                view = func(*args, **kwargs)
            return FakeTensor(self._mode, view, args[0].fake_device)
        return make()

    def _factory(
        self, effect: _Effect, result: Any, args: tuple[Any, ...]
    ) -> Callable[[], Any] | None:
        """Return a function that makes such a result again; None where aliasing is not simple."""
        if effect is not _Effect.NEW:
            simple = isinstance(result, FakeTensor) and isinstance(args[0], FakeTensor)
            return (lambda: None) if simple else None
        if isinstance(result, Tensor):
            return self._factory_of_tensor(result, args)
        makers = [self._factory_of_tensor(each, args) for each in result]
        if any(make is None for make in makers):
            return None
        kind = type(result)
        return lambda: kind([make() for make in makers if make is not None])

    def _factory_of_tensor(self, result: Any, args: tuple[Any, ...]) -> Callable[[], Tensor] | None:
        if not isinstance(result, FakeTensor) or result.constant is not None:
            return None
        memory = result.untyped_storage()
        shared = {storage_address(each.untyped_storage()) for each in _tensors(args)}
        size, stride, dtype = result.shape, result.stride(), result.dtype
        device = result.fake_device
        with in_kernel_invocation_manager(self._mode):
            alike = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if storage_address(memory) in shared or memory.nbytes() != alike.untyped_storage().nbytes():
            return None

        def make() -> Tensor:
            with in_kernel_invocation_manager(self._mode):
                empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            return FakeTensor(self._mode, empty, device)

        return make


def _effect(func: Any) -> _Effect:
    """Return what an operator does with memory, by its schema."""
    schema = operator_schema(func)
    if func.namespace != "aten" or not schema.returns or torch.Tag.inplace_view in func.tags:
        return _Effect.OTHER
    dynamic = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    if any(tag in func.tags for tag in dynamic):
        return _Effect.OTHER
    if not all(str(each.type) in ("Tensor", "Tensor[]") for each in schema.returns):
        return _Effect.OTHER
    aliases = [each.alias_info for each in schema.returns]
    if not schema.is_mutable and all(alias is None for alias in aliases):
        return _Effect.NEW
    first = schema.arguments[0].alias_info
    others = [each.alias_info for each in schema.arguments[1:]]
    one = len(aliases) == 1 and str(schema.returns[0].type) == "Tensor"
    if not one or first is None or aliases[0] is None or any(others):
        return _Effect.OTHER
    return _Effect.IN_PLACE if first.is_write else _Effect.VIEW


def _key_of(value: Any) -> Any:
    """Return the part of a call's key that one argument contributes."""
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.layout is not torch.strided:
            raise _NoKeyError
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, list | tuple):
        return tuple(map(_key_of, value))
    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal and hash alike
    raise _NoKeyError


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
