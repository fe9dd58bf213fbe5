"""The kernels as Triton compiles them for a GPU that need not be there.

What an operation would launch is noted instead, with the arguments as they are, and compiled for a
compute capability; ``ptxas`` and ``cuobjdump`` come with Triton. Tensors may be fake: their types
are read, and nothing else.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

REGISTERS = 65536
"""Of a multiprocessor, in all three generations."""
THREADS = 128
"""Of a program: four warps, Triton's default."""
POINTERS = {
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What a program of a compiled kernel takes of a multiprocessor."""

    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of a thread in memory, where registers are spilled."""
    shared: int
    """Bytes of shared memory of a program; a multiprocessor has 160 KiB or more."""


class Context(SimpleNamespace):
    """What autograd hands to the bodies of a function, which refuses CUDA where there is none."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Nothing depends on it where no engine walks the graph."""


@contextmanager
def launches_of(module: ModuleType) -> Iterator[list[Launch]]:
    """Yield a list that every launch of a module's kernels is added to, instead of run."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, grid, arguments, constants))

    with mock.patch.object(module, "launch", note):
        yield launches


def assert_compiles(launches: list[Launch], capability: int) -> None:
    """Compile launches for a GPU, and check that four programs fit on a multiprocessor."""
    assert launches
    for launch in launches:
        usage = compiled(launch, capability)
        name = launch.kernel.__name__
        assert usage.stack == 0, f"{name} spills registers: {usage}"
        assert usage.registers * THREADS <= REGISTERS // 4, f"{name}: {usage}"
        assert usage.shared <= 16 * 1024, f"{name}: {usage}"


def compiled(launch: Launch, capability: int) -> Usage:
    """Compile a launch for a compute capability (80, 90, 100) and return what it uses."""
    signature, constants, attributes = {}, dict(launch.constants), {}
    positional = launch.kernel.arg_names[: len(launch.arguments)]
    for index, (name, value) in enumerate(zip(positional, launch.arguments, strict=True)):
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), name
            signature[name] = POINTERS[value.dtype]
        elif value is None or value == 1:  # as Triton does at a launch
            constants[name] = value
        else:
            signature[name] = "i32"
        if isinstance(value, torch.Tensor) or (value is not None and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=launch.kernel,
        signature={name: signature[name] for name in launch.kernel.arg_names},
        constexprs={(launch.kernel.arg_names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return _usage(kernel.asm["cubin"], kernel.metadata.shared)


def _usage(cubin: bytes, shared: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], shared)
