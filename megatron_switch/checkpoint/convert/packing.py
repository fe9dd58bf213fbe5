"""How one tensor of Megatron is made of several others, and taken apart again.

Each packing is exact both ways: it moves elements and computes nothing.

Shape letters: G groups, R rows of one part, X all other dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Packing(Protocol):
    """Two functions that undo one another."""

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the one tensor that holds all parts."""
        ...

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a packed tensor."""
        ...


@dataclass(frozen=True)
class Interleaved:
    """Parts on top of each other, group by group.

    Megatron keeps attention heads together: with 2 groups, the rows of q, k and v of group 0 and
    then those of group 1, so that a cut between groups gives each tensor-parallel rank whole heads.
    With one group it is plain concatenation, as for the two halves of a gated unit; with one part
    it is that part.

    Attributes:
        groups: Number of groups; for attention, of key-value heads.
        rows: Rows of each part, over all groups.
    """

    groups: int
    rows: tuple[int, ...]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor of shape (sum of rows, X)."""
        if len(parts) == 1:
            return parts[0]
        # Rows of one group next to each other, then the parts side by side within each group:
        # [q0 q1 | k0 k1 | v0 v1] becomes [q0 k0 v0 | q1 k1 v1].
        pieces_GRX = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(pieces_GRX, dim=1).flatten(0, 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Return the parts, of shape (rows, X) each."""
        if len(self.rows) == 1:
            return (packed,)
        packed_GRX = packed.reshape(self.groups, -1, *packed.shape[1:])
        pieces_GRX = torch.split(packed_GRX, [rows // self.groups for rows in self.rows], dim=1)
        return tuple(piece.flatten(0, 1) for piece in pieces_GRX)


@dataclass(frozen=True)
class PaddedRows:
    """One part with rows of zeros behind it: the vocabulary.

    Attributes:
        rows: Rows of the part.
        padded: Rows of the packed tensor.
    """

    rows: int
    padded: int

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor of shape (padded, X)."""
        (part,) = parts
        if self.rows == self.padded:
            return part
        return torch.cat([part, part.new_zeros(self.padded - self.rows, *part.shape[1:])])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Return the part; what the rows behind it have become is left out."""
        return (packed[: self.rows],)
