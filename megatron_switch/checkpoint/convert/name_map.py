"""Name maps: every tensor of a Megatron model, and the tensors of Hugging Face's it is made of.

The same entry serves both directions, so that the two cannot disagree, and a model's map is the
whole of it: every key of a source must be in some entry, and every entry of the target is written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_switch.checkpoint.convert.packing import Interleaved, Packing
from megatron_switch.checkpoint.formats.tensor_source import (
    Region,
    TensorInfo,
    TensorSource,
    check_finite,
    common_dtype,
    differing_bits,
    expect,
    listing,
    place,
)
from megatron_switch.errors import CheckpointError


@dataclass(frozen=True)
class HfTensor:
    """A tensor in Hugging Face's format."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names under which files may hold the same tensor, instead of this one or besides."""
    copies: tuple[str, ...] = ()
    """Those of the aliases that must be written too, or a library would draw them anew."""

    def names_in(self, source: TensorSource) -> tuple[str, ...]:
        """Return the names of this tensor that a source has; the first is the one to read.

        Raises:
            CheckpointError: It has none, or one with another shape.
        """
        present = [name for name in (self.name, *self.aliases) if name in source.tensors]
        for name in present or [self.name]:
            expect(source, name, self.shape)
        return tuple(present)


@dataclass(frozen=True)
class MapEntry:
    """One tensor of Megatron's checkpoint, or one expert of it."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor under ``key``."""
    parts: tuple[HfTensor, ...]
    packing: Packing
    expert: int | None = None
    """Index of an entry that is one expert of a stack; None where it is the whole tensor."""
    copies: tuple[str, ...] = ()
    """Other keys under which Megatron keeps the same tensor."""

    @property
    def region(self) -> Region:
        """The part of the tensor that this entry is."""
        if self.expert is None:
            return Region.whole(self.shape)
        return Region.row(self.shape, self.expert)

    def pack(self, source: TensorSource) -> Tensor:
        """Read the parts and return Megatron's tensor, shape of :attr:`region`."""
        tensors = []
        for part in self.parts:
            name, *others = part.names_in(source)
            tensor = _read(source, name)
            for other in others:
                again = source.read(other)
                if tensor.dtype != again.dtype or differing_bits(tensor, again):
                    raise CheckpointError(
                        f"{source.tensors[other].file}: {other} differs from {name}, but Megatron "
                        "has one tensor for both. The model was trained with the two untied."
                    )
            tensors.append(tensor)
        packed = self.packing.pack(tensors)
        return packed if self.expert is None else packed.unsqueeze(0)

    def unpack(self, source: TensorSource) -> tuple[Tensor, ...]:
        """Read Megatron's tensor and return the parts, each with its copies behind it."""
        packed = _read(source, self.key, self.region)
        parts = self.packing.unpack(packed if self.expert is None else packed.squeeze(0))
        pairs = zip(self.parts, parts, strict=True)
        return tuple(tensor for part, tensor in pairs for _ in (part.name, *part.copies))

    def names(self) -> tuple[str, ...]:
        """Return what :meth:`unpack` returns, by name."""
        return tuple(name for part in self.parts for name in (part.name, *part.copies))

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return what :meth:`unpack` returns, by shape."""
        return tuple(part.shape for part in self.parts for _ in (part.name, *part.copies))

    def packed_dtype(self, source: TensorSource) -> torch.dtype:
        """Return the type that Megatron's tensor has when nothing is rounded."""
        return common_dtype(source.tensors[part.names_in(source)[0]] for part in self.parts)


def plain(key: str, name: str, shape: tuple[int, ...], expert: int | None = None) -> MapEntry:
    """Return the entry of a tensor that is the same on both sides.

    Args:
        key: Megatron's key.
        name: Hugging Face's name.
        shape: Shape there.
        expert: Index of an expert, for an entry of a stack.
    """
    return MapEntry(key, shape, (HfTensor(name, shape),), Interleaved(1, shape[:1]), expert)


def expert_entries(
    ours: str, names: Sequence[str], prefixes: Sequence[str], *, width: int, hidden: int
) -> Iterator[MapEntry]:
    """Yield the entries of the experts of a layer: Megatron stacks all of them in two tensors.

    Args:
        ours: Prefix of the layer's experts in Megatron.
        names: The matrices of an expert there: one or, with a gate, two of the first linear layer,
            and the one of the second.
        prefixes: What comes before these names, for each expert.
        width: Of the model.
        hidden: Hidden width of an expert.
    """
    *first, last = names
    packing = Interleaved(1, (hidden,) * len(first))
    for expert, prefix in enumerate(prefixes):
        parts = tuple(HfTensor(prefix + name, (hidden, width)) for name in first)
        shape = (len(prefixes), len(first) * hidden, width)
        yield MapEntry(f"{ours}linear_fc1.weight", shape, parts, packing, expert)
        shape = (len(prefixes), width, hidden)
        part = HfTensor(prefix + last, (width, hidden))
        yield MapEntry(f"{ours}linear_fc2.weight", shape, (part,), Interleaved(1, (width,)), expert)


@dataclass(frozen=True)
class NameMap:
    """Every tensor of a model, on both sides."""

    entries: tuple[MapEntry, ...]
    modules: tuple[str, ...]
    """Megatron modules that have an ``_extra_state`` entry, which must exist and holds nothing."""
    expert_modules: tuple[tuple[str, int], ...] = ()
    """Likewise of modules with one entry for each expert, and the number of experts."""
    inert: tuple[HfTensor, ...] = ()
    """Tensors that a format demands and whose values change nothing; zeros are written."""
    unread: tuple[str, ...] = ()
    """Names of what files of older libraries hold and no library reads any more."""

    def check_other_side(self, source: TensorSource) -> None:
        """Raise unless a source has all parts of all entries and nothing else.

        Raises:
            CheckpointError: Listing what is missing, left over, or of another shape or type.
        """
        known = {part.name: part for entry in self.entries for part in entry.parts}
        known |= {part.name: part for part in self.inert}
        aliases = {alias for part in known.values() for alias in part.aliases}
        missing = [
            name
            for name, part in known.items()
            if not any(each in source.tensors for each in (name, *part.aliases))
        ]
        known_names = known.keys() | aliases | set(self.unread)
        _refuse(source, missing, source.tensors.keys() - known_names)
        for part in known.values():
            part.names_in(source)

    def without_effect(self, source: TensorSource) -> tuple[str, ...]:
        """Return the tensors of a source that are not taken over, because nothing reads them."""
        inert = [part.name for part in self.inert if 0 not in part.shape]
        return tuple(name for name in (*self.unread, *inert) if name in source.tensors)

    def check_megatron(self, tensors: TensorSource, ignored: Iterable[str] = ()) -> None:
        """Raise unless a Megatron checkpoint has every key of the map and no other weight.

        Args:
            tensors: The checkpoint.
            ignored: Keys that are no weights.

        Raises:
            CheckpointError: Listing what is missing, left over, or of another shape or type.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            shapes.update(dict.fromkeys((entry.key, *entry.copies), entry.shape))
        missing = shapes.keys() - tensors.tensors.keys()
        _refuse(tensors, missing, tensors.tensors.keys() - shapes.keys() - set(ignored))
        for key, shape in shapes.items():
            expect(tensors, key, shape)

    def extra_states(self) -> tuple[str, ...]:
        """Return the keys of the objects that a Megatron checkpoint must have besides tensors."""
        return tuple(
            [f"{module}._extra_state/shard_0_1" for module in self.modules]
            + [
                f"{module}._extra_state/shard_{index}_{count}"
                for module, count in self.expert_modules
                for index in range(count)
            ]
        )


def _refuse(source: TensorSource, missing: Iterable[str], extra: Iterable[str]) -> None:
    missing, extra = list(missing), list(extra)
    if missing or extra:
        lacks = f" It lacks {listing(missing)}." if missing else ""
        has = f" Not part of the model are {listing(extra)}." if extra else ""
        raise CheckpointError(
            f"{place(source)} does not hold the tensors that its configuration describes.{lacks}"
            f"{has} Nothing was converted: correct the configuration, or take the files that "
            "belong to it."
        )


def _read(source: TensorSource, key: str, region: Region | None = None) -> Tensor:
    tensor = source.read(key, region)
    info: TensorInfo = source.tensors[key]
    check_finite(tensor, key, info.file)
    return tensor
