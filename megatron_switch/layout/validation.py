"""Check a layout against the model and batch that it has to divide, before any group exists.

:func:`validate_layout` is the one entry point. It takes plain values, touches no process group
and no GPU, and returns the :class:`~megatron_switch.layout.grid.Layout` or raises a
:class:`~megatron_switch.errors.LayoutError` that shows every broken rule with its values and way
out, both grids, and the nearest settings that all rules accept.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_rules import LayoutConstraints, broken_rules
from megatron_switch.layout.sizes import FLAGS, Sizes, divisors
from megatron_switch.layout.suggestions import layout_error


def validate_layout(sizes: Sizes, given: LayoutConstraints) -> Layout:
    """Return the layout of ``sizes`` if it fits ``given``.

    Args:
        sizes: Parallel sizes as given on the command line.
        given: What they have to divide.

    Raises:
        LayoutError: If a rule is broken; every one is explained.
    """
    broken = broken_rules(sizes, given)
    if broken:
        is_legal, also = _suggestions(sizes, given)
        raise layout_error(broken, sizes, is_legal, also=also)
    return Layout.of(sizes)


def virtual_stages(num_layers: int, pp: int, layers_per_chunk: int) -> int:
    """Return the chunks per pipeline stage for Megatron's ``--num-layers-per-virtual-...`` flag.

    Args:
        num_layers: Layers of the model.
        pp: Pipeline stages.
        layers_per_chunk: ``--num-layers-per-virtual-pipeline-stage``.

    Raises:
        LayoutError: If the layers are no multiple of stages x layers of a chunk.
    """
    step = pp * layers_per_chunk
    if layers_per_chunk < 1 or num_layers % step:
        allowed = divisors(num_layers // pp) if num_layers % pp == 0 else "none"
        raise LayoutError(
            "Layers must be a multiple of PP x layers of a chunk, but --num-layers is "
            f"{num_layers}, {FLAGS['pp']} {pp} and --num-layers-per-virtual-pipeline-stage "
            f"{layers_per_chunk}. Chunks of this many layers would work: {allowed}."
        )
    return num_layers // step


def _suggestions(
    asked: Sizes, given: LayoutConstraints
) -> tuple[Callable[[Sizes], bool], Callable[[Sizes], str]]:
    """Return which other sizes may be suggested, and with what flag besides.

    More context parallelism than was asked for never is: only some attention has it. Sequence
    parallelism goes with another TP, unless its lack is all that is wrong.
    """
    with_flag = replace(given, sequence_parallel=True)
    may_add = not given.sequence_parallel and bool(broken_rules(asked, with_flag))

    def needs_flag(other: Sizes) -> bool:
        return may_add and given.num_experts is not None and other.tp > 1

    def is_legal(other: Sizes) -> bool:
        tried = with_flag if needs_flag(other) else given
        return other.cp <= asked.cp and not broken_rules(other, tried)

    return is_legal, lambda other: "--sequence-parallel" if needs_flag(other) else ""
