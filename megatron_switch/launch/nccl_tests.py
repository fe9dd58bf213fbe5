"""nccl-tests for exactly the groups of a layout: which program, and how it splits its ranks.

``NCCL_TESTS_SPLIT`` groups ranks of equal colour, and computes the colour from the rank with one
operation (nccl-tests, README: AND, OR, MOD, DIV). Along an axis of stride ``s`` and size
``n``, with ``w`` ranks in total:

* ``s = 1``: the colour is ``rank DIV n``;
* ``s * n = w``: the colour is ``rank MOD s``;
* powers of two: the colour is ``rank AND mask``, where the mask clears the bits of the axis.

Groups that no single operation can form are skipped and reported.
"""

from dataclasses import dataclass

from megatron_switch.layout.grid import Grid, Layout


@dataclass(frozen=True)
class GroupTest:
    """One program of nccl-tests, run in all groups along an axis at once.

    Attributes:
        axis: Name of the axis, also used in file names.
        program: Name of the program.
        split: Value of ``NCCL_TESTS_SPLIT``.
        members: Ranks per group.
    """

    axis: str
    program: str
    split: str
    members: int


_PROGRAMS = {
    "tp": ("all_gather_perf", "reduce_scatter_perf"),
    "cp": ("all_gather_perf",),
    "dp": ("all_gather_perf", "reduce_scatter_perf"),
    "pp": ("sendrecv_perf",),
    "ep": ("alltoall_perf",),
    "edp": ("all_gather_perf", "reduce_scatter_perf"),
}
"""Collectives that training runs along each axis."""


def group_tests(layout: Layout) -> list[GroupTest]:
    """Return the tests for the groups of more than one rank."""
    return [
        GroupTest(axis, program, split, size)
        for axis, size in _sizes(layout).items()
        if (split := split_of(layout, axis))
        for program in _PROGRAMS[axis]
    ]


def untestable_axes(layout: Layout) -> list[str]:
    """Return the axes whose groups nccl-tests cannot form."""
    return [axis for axis in _sizes(layout) if not split_of(layout, axis)]


def split_of(layout: Layout, axis: str) -> str:
    """Return the ``NCCL_TESTS_SPLIT`` that forms the groups along ``axis``; empty if none does."""
    grid = _grid(layout, axis)
    stride, size = grid.strides[axis], grid.sizes[axis]
    if stride == 1:
        return f"DIV {size}"
    if stride * size == layout.world_size:
        return f"MOD {stride}"
    if _is_power_of_two(stride) and _is_power_of_two(size):
        everything = (1 << (layout.world_size - 1).bit_length()) - 1
        return f"AND {everything & ~((size - 1) * stride):#x}"
    return ""


def _sizes(layout: Layout) -> dict[str, int]:
    sizes = {axis: _grid(layout, axis).sizes[axis] for axis in _PROGRAMS}
    return {axis: size for axis, size in sizes.items() if size > 1}


def _grid(layout: Layout, axis: str) -> Grid:
    return layout.expert if axis in ("ep", "edp") else layout.dense


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
