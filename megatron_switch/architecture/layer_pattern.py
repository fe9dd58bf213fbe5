"""Which layers have experts: ``--moe-layer-freq`` becomes layers here, and layers become the flag.

The flag is a number N for experts in layers 0, N, 2N, ..., or says of each layer whether it has
experts, as a list or as the text of one (``[0,1]*12``).

Layers are counted from 0, and by stack: a T5 has an encoder and a decoder, a GPT a decoder only.
Megatron's ``layer_number`` counts from 1, a decoder's layers behind its encoder's; it is called by
that name wherever it is meant.
"""

import ast
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Self

from megatron_switch.errors import ConfigError


@dataclass(frozen=True)
class Stack:
    """Encoder or decoder.

    Attributes:
        num_layers: Layers, dense and sparse.
        sparse_layers: Those with experts, counted from 0.
    """

    num_layers: int
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def switch(cls, num_layers: int) -> Self:
        """Return a stack with Switch's placement of sparse layers: 1, 3, 5, ..., counted from 0.

        A model of one layer is sparse in that layer, because a Switch model without experts would
        be none.

        Args:
            num_layers: Layers of the stack, at least 1.

        Source:
            Switch Transformer, arXiv:2101.03961, table 9 (expert frequency 1/2); the released
            models make the second of each pair sparse.
        """
        return cls(num_layers, tuple(range(1, num_layers, 2)) or (0,))

    @property
    def num_dense(self) -> int:
        """Layers without experts."""
        return self.num_layers - len(self.sparse_layers)

    @property
    def layer_freq(self) -> list[int]:
        """The pattern as ``--moe-layer-freq`` takes it: 1 or 0 for each layer."""
        return [int(layer in self.sparse_layers) for layer in range(self.num_layers)]


def sparse_layers(
    layer_freq: object,
    num_layers: int,
    *,
    flag: str = "--moe-layer-freq",
    depth: str = "--num-layers",
) -> tuple[int, ...]:
    """Return the layers of a stack that have experts, counted from 0.

    Args:
        layer_freq: Value of ``flag``: N for experts in every Nth layer, a list with 0 or 1 for
            each layer, or the text of either.
        num_layers: Layers of the stack.
        flag: Named in messages.
        depth: What says how many layers there are; named too.

    Raises:
        ConfigError: It is neither a positive number nor such a list, or a list of another length.
    """
    pattern = _parsed(layer_freq) if isinstance(layer_freq, str) else layer_freq
    if type(pattern) is int and pattern > 0:
        return tuple(range(0, num_layers, pattern))
    if not isinstance(pattern, list) or any(entry not in (0, 1) for entry in pattern):
        raise ConfigError(
            f"{flag} is a number N of at least 1, for experts in every Nth layer, or says of each "
            f"layer whether it has experts, as in [0,1,0,1]; got {layer_freq!s:.80}."
        )
    if len(pattern) != num_layers:
        raise ConfigError(
            f"{flag} says of each layer whether it has experts, and has {len(pattern)} entries "
            f"for {num_layers} layers. Give as many as {depth}."
        )
    return tuple(layer for layer, has_experts in enumerate(pattern) if has_experts)


def stacks_of(args: Namespace) -> dict[str, Stack]:
    """Return the stacks of a model by name, ``decoder`` or ``encoder`` and ``decoder``.

    A T5's ``--moe-layer-freq`` is the encoder's. It is the decoder's too, unless that has its own,
    or another depth than the list is for.

    Args:
        args: Megatron's namespace, of a run or of a checkpoint.

    Raises:
        ConfigError: A pattern is none, or not one of its layers.
    """
    layer_freq = getattr(args, "moe_layer_freq", 1)
    has_experts = bool(getattr(args, "num_experts", None))
    depth = args.num_layers
    first = Stack(depth, sparse_layers(layer_freq, depth) if has_experts else ())
    if getattr(args, "switch_arch", "gpt") != "t5":
        return {"decoder": first}
    depth = args.decoder_num_layers
    own = getattr(args, "switch_decoder_layer_freq", None)
    layers: tuple[int, ...] = ()
    if has_experts and own is not None:
        flags = {"flag": "--switch-decoder-layer-freq", "depth": "--decoder-num-layers"}
        layers = sparse_layers(own, depth, **flags)
    elif has_experts and (isinstance(layer_freq, int) or depth == first.num_layers):
        layers = sparse_layers(layer_freq, depth)
    elif has_experts:
        layers = Stack.switch(depth).sparse_layers
    return {"encoder": first, "decoder": Stack(depth, layers)}


def _parsed(text: str) -> object:
    """Return the value of a pattern such as ``([0]*3+[1])*2``, without running it as code."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


_MOST_LAYERS = 2**16  # a longer list would fill the memory before it is compared with the model


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value)


def _value(node: ast.expr) -> Any:
    """Evaluate lists and whole numbers, and of operators + and *, as Megatron's parser does."""
    match node:
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            one, other = _value(node.left), _value(node.right)
            times, length = (one, len(other)) if isinstance(other, list) else (other, _size(one))
            if not 0 <= times * length <= _MOST_LAYERS:
                raise ValueError(f"{times} times {length}")
            return one * other
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else value
