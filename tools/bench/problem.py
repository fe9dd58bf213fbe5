"""One layer to measure: its sizes, its weights and tokens, and the memory that it takes.

Everything is drawn from generators that name what they draw (an expert, a rank's tokens), so every
rank knows what the others hold, and every implementation gets the same numbers.

Shape letters:

    T  tokens of one rank    D  model    F  hidden width of an expert
    E, e  experts, local experts    C  slots per expert and rank
"""

import math
from dataclasses import dataclass
from functools import cached_property

import psutil
import torch
from torch import Tensor

from megatron_switch.utils.units import size_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROUTER_SEED = 10**9


class BenchError(ValueError):
    """A measurement that cannot be made as asked for; the message says what to change."""


@dataclass(frozen=True)
class Sizes:
    """What is measured. Experts are spread over the ranks; every rank has tokens of its own."""

    experts: int
    total_tokens: int = 4096
    width: int = 512
    ffn: int = 2048
    capacity_factor: float = 1.25
    world: int = 1
    threads: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    without_experts: bool = False
    """Leave the experts' products out: a row is only multiplied by its gate."""
    accumulate: bool = False
    """Add each gradient of a weight to a buffer and drop it, as Megatron does."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            BenchError: A size is below 1, or ranks cannot share tokens or experts evenly.
        """
        for flag in ("experts", "total_tokens", "width", "ffn", "world", "threads"):
            if getattr(self, flag) < 1:
                raise BenchError(
                    f"Sizes are at least 1, got --{flag.replace('total_', '')} "
                    f"{getattr(self, flag)}."
                )
        if self.capacity_factor <= 0:
            raise BenchError(
                f"A capacity factor is positive, got --capacity-factor {self.capacity_factor}."
            )
        for flag, value in (("experts", self.experts), ("tokens", self.total_tokens)):
            if value % self.world:
                raise BenchError(
                    f"{value} {flag} cannot be shared evenly by {self.world} ranks. Set --{flag} "
                    f"to a multiple of --world {self.world}."
                )

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.total_tokens // self.world

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.world

    @property
    def capacity(self) -> int:
        """Slots per expert for the tokens of one rank, rounded up as Megatron-Core does."""
        return math.ceil(self.tokens * self.capacity_factor / self.experts)

    @property
    def title(self) -> str:
        """The sizes in one line."""
        ranks = f", {self.world} ranks" if self.world > 1 else ""
        part = ", layer without experts" if self.without_experts else f", F {self.ffn}"
        sums = ", gradients accumulated" if self.accumulate else ""
        return (
            f"E {self.experts}{part}: T {self.total_tokens}, D {self.width}, capacity "
            f"{self.capacity}, {self.dtype} on {self.device}{ranks}, {self.threads} threads{sums}"
        )

    def memory_parts(self) -> dict[str, int]:
        """Return an estimate of what one host's ranks allocate at once, in bytes by purpose."""
        itemsize = DTYPES[self.dtype].itemsize
        ffn = 0 if self.without_experts else self.ffn
        rows = max(self.world * self.experts * self.capacity, self.total_tokens)
        experts = 2 * self.experts * self.width * ffn * itemsize
        router = 4 * self.experts * self.width * self.world
        # To check gradients every rank draws the experts of all ranks, and sums gradients twice.
        copies = self.world if self.world > 1 else 1
        return {
            "weights": experts * copies + router,
            "gradients": 2 * experts * copies + router,
            "buffers": 8 * self.experts * self.width * ffn if self.accumulate else 0,
            "activations": itemsize * rows * (6 * self.width + 4 * ffn),
            "maps of tokens by experts": 32 * self.total_tokens * self.experts,
        }

    def check_memory(self, free_bytes: int | None = None) -> None:
        """Refuse sizes that would not fit, before anything is allocated.

        Args:
            free_bytes: Memory to use; default: what the host or the device has free.

        Raises:
            BenchError: More is needed than is free.
        """
        free = self._free_bytes() if free_bytes is None else free_bytes
        parts = self.memory_parts()
        if (needed := sum(parts.values())) > free:
            listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
            raise BenchError(
                f"{self.title} would take about {size_text(needed)} ({listed}), and "
                f"{size_text(free)} are free. Lower --experts, --ffn or --tokens, or leave the "
                "experts out with --without-experts."
            )

    def _free_bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[0] * self.world
        return psutil.virtual_memory().available


@dataclass(frozen=True)
class Problem:
    """The numbers of one rank."""

    sizes: Sizes
    rank: int = 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        name = self.sizes.device
        return torch.device(name, self.rank) if name == "cuda" else torch.device(name)

    @cached_property
    def router_ED(self) -> Tensor:
        """Router weight, float32."""
        shape = (self.sizes.experts, self.sizes.width)
        return self._draw(_ROUTER_SEED, shape, torch.float32) / math.sqrt(self.sizes.width)

    @cached_property
    def wi_eFD(self) -> Tensor:
        """First matrix of this rank's experts."""
        sizes = self.sizes
        return self._stack(1, (sizes.ffn, sizes.width), self.experts_of(self.rank))

    @cached_property
    def wo_eDF(self) -> Tensor:
        """Second matrix of this rank's experts."""
        sizes = self.sizes
        return self._stack(2, (sizes.width, sizes.ffn), self.experts_of(self.rank))

    def experts_of(self, rank: int) -> range:
        """Return the numbers of the experts that a rank holds."""
        count = self.sizes.local_experts
        return range(rank * count, (rank + 1) * count)

    def all_experts(self) -> tuple[Tensor, Tensor]:
        """Return both matrices of all experts, those of this rank among them."""
        sizes = self.sizes
        if sizes.world == 1:
            return self.wi_eFD, self.wo_eDF
        everyone = range(sizes.experts)
        wi_EFD = self._stack(1, (sizes.ffn, sizes.width), everyone)
        return wi_EFD, self._stack(2, (sizes.width, sizes.ffn), everyone)

    def tokens_of(self, rank: int) -> Tensor:
        """Return the tokens of a rank: shape (T, D)."""
        return self._draw(10 * rank + 3, (self.sizes.tokens, self.sizes.width))

    def output_gradient_of(self, rank: int) -> Tensor:
        """Return the gradient that comes back to a rank's outputs: shape (T, D)."""
        return self._draw(10 * rank + 4, (self.sizes.tokens, self.sizes.width))

    def _stack(self, matrix: int, shape: tuple[int, int], experts: range) -> Tensor:
        if self.sizes.without_experts:
            shape = (0, 0)
        stacked = torch.empty(
            (len(experts), *shape), dtype=DTYPES[self.sizes.dtype], device=self.device
        )
        for place, expert in enumerate(experts):
            drawn = self._draw(10 * expert + matrix, shape)
            stacked[place] = drawn.mul_(1 / math.sqrt(max(1, shape[1])))
        return stacked

    def _draw(self, seed: int, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape, generator=random)
        return drawn.to(self.device, DTYPES[self.sizes.dtype] if dtype is None else dtype)
