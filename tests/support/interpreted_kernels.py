"""The kernels as Triton's interpreter runs them: on the CPU, one program after the other.

Triton decides whether it interprets or compiles while it is imported, so both it and our kernels
are imported once more, and the modules that others hold come back when the block ends.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import megatron_switch.kernels

OURS = "megatron_switch.kernels"
NAMES = ("activation", "permutation", "router", "slots")

_interpreted: dict[str, ModuleType] = {}  # kept from block to block


@contextmanager
def interpreted_kernels() -> Iterator[SimpleNamespace]:
    """Yield our modules of kernels by name, made of interpreted functions."""
    compiling = _take_out()
    sys.modules.update(_interpreted)
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.object(megatron_switch, "kernels"),
    ):
        try:
            yield SimpleNamespace(**{n: importlib.import_module(f"{OURS}.{n}") for n in NAMES})
        finally:
            _interpreted.update(_take_out())
            sys.modules.update(compiling)


def _take_out() -> dict[str, ModuleType]:
    """Take the modules that depend on the choice out of Python's table of modules."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _depends(name)}


def _depends(name: str) -> bool:
    if name.startswith("triton._C"):  # machine code, which cannot be imported twice
        return False
    return name.startswith(("triton.", OURS)) or name == "triton"
