"""Span corruption, T5's objective, over the samples of Megatron's own data sets.

Some spans of every sample are masked. The source is what remains, with a sentinel in the place of
each span; the target is the spans, each after its sentinel. Both end with the end token.

    text     Thank you for inviting me to your party last week
    source   Thank you <0> me to your party <1> week <end>
    target   <0> for inviting <1> last <end>

The numbers of masked tokens and of spans are the same in every sample, so lengths are too; only
the positions differ. They are drawn from the sample's number, so they are the same in every layout
and after a resume. Spans never touch, and the first token of a sample is never in one.

Samples are Megatron's (``GPTDataset``, blended or not): text of several documents in a row, with
end-of-document tokens between.

Source:
    Raffel et al., arXiv:1910.10683, section 3.1.4; the lengths of spans and of what lies between
    are uniform over all ways to divide, as in T5's ``random_spans_noise_mask``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_switch.data.encoder_decoder import SpecialTokens, encoder_decoder_sample, without_loss
from megatron_switch.errors import ConfigError

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class SpanPlan:
    """Lengths that are the same in every sample.

    Attributes:
        text: Tokens of a sample before corruption.
        noise: Tokens taken out.
        spans: Spans that they form.
    """

    text: int
    noise: int
    spans: int

    @property
    def source(self) -> int:
        """Tokens of the source: what remains, sentinels and end token."""
        return self.text - self.noise + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens of the target: what was taken out, sentinels and end token."""
        return self.noise + self.spans + 1

    @classmethod
    def of(cls, text: int, *, density: float, mean_length: float) -> "SpanPlan":
        """Return the lengths for samples of ``text`` tokens, at least 2."""
        noise = min(max(round(text * density), 1), text - 1)
        spans = min(max(round(noise / mean_length), 1), text - noise)
        return cls(text, noise, spans)


def plan_spans(
    *, source_length: int, target_length: int | None, density: float, mean_length: float
) -> SpanPlan:
    """Return the longest text whose source and target fit.

    Args:
        source_length: Positions of the encoder.
        target_length: Positions of the decoder; None for as many as it takes.
        density: ``--switch-span-density``.
        mean_length: ``--switch-span-length``.

    Raises:
        ConfigError: Not even two tokens fit.
    """
    best: SpanPlan | None = None
    # Each text token puts at least (1 - density) tokens into the source.
    for text in range(2, int(source_length / (1.0 - density)) + 2):
        plan = SpanPlan.of(text, density=density, mean_length=mean_length)
        if plan.source <= source_length and plan.target <= (target_length or plan.target):
            best = plan
    if best is None:
        raise ConfigError(
            f"Span corruption has no room: two tokens of text need a source of 3 and a target of "
            f"3, but --seq-length is {source_length} and --decoder-seq-length {target_length}. "
            "Raise them."
        )
    return best


def corrupt(
    text: Tokens, plan: SpanPlan, *, sentinels: tuple[int, ...], end: int, draw: np.random.Generator
) -> tuple[Tokens, Tokens]:
    """Return source and target.

    Args:
        text: Tokens, ``plan.text`` of them.
        plan: How many are taken out.
        sentinels: At least as many ids as there are spans.
        end: End token.
        draw: Where the spans' places come from.
    """
    kept = _divide(plan.text - plan.noise, plan.spans, draw)
    taken = _divide(plan.noise, plan.spans, draw)
    bounds = np.cumsum(np.stack([kept, taken], axis=1).ravel())[:-1]
    pieces = np.split(text, bounds)  # kept, taken, kept, taken, ...
    marks = [np.array([sentinel]) for sentinel in sentinels[: plan.spans]]
    ending = [np.array([end])]
    source = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
    target = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
    return np.concatenate(source + ending), np.concatenate(target + ending)


def _divide(total: int, parts: int, draw: np.random.Generator) -> Tokens:
    """Return ``parts`` positive numbers that add up to ``total``, any such equally likely."""
    cuts = np.sort(draw.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


class SpanCorruption(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of a data set, corrupted.

    Args:
        texts: Data set whose samples hold ``plan.text`` tokens under ``tokens``.
        plan: Lengths.
        source_length: Positions of the encoder.
        target_length: Positions of the decoder.
        sentinels: Ids of the sentinels.
        special: End and padding token.
        seed: Seed of the run.
        split: 0 for training, 1 for validation, 2 for test.

    Raises:
        ConfigError: There are fewer sentinels than spans.
    """

    def __init__(
        self,
        texts: Any,
        plan: SpanPlan,
        *,
        source_length: int,
        target_length: int,
        sentinels: tuple[int, ...],
        special: SpecialTokens,
        seed: int,
        split: int,
    ) -> None:
        check_sentinels(plan, len(sentinels))
        self._texts = texts
        self._plan = plan
        self._lengths = {"source_length": source_length, "target_length": target_length}
        self._sentinels = sentinels
        self._special = special
        self._key = (seed, split)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._texts)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Return a sample; that of None fills up a batch and has no loss."""
        number = 0 if index is None else int(index)
        text = self._texts[number]["tokens"].numpy()
        source, target = corrupt(
            text,
            self._plan,
            sentinels=self._sentinels,
            end=self._special.end,
            draw=np.random.default_rng([*self._key, number]),
        )
        sample = encoder_decoder_sample(source, target, special=self._special, **self._lengths)
        return without_loss(sample) if index is None else sample


def check_sentinels(plan: SpanPlan, available: int) -> None:
    """Refuse a plan that needs more sentinels than the tokenizer has.

    Raises:
        ConfigError: With the flags that change either.
    """
    if available == 0:
        raise ConfigError(
            f"Span corruption marks {plan.spans} spans of each sample with sentinels "
            "<extra_id_N>, and the tokenizer has none. Train one with megatron-switch prepare "
            f"--sentinels {max(plan.spans, 100)}, or train on pairs of texts: --data-path with "
            ".jsonl files of input and target."
        )
    if available < plan.spans:
        raise ConfigError(
            f"Span corruption makes {plan.spans} spans of each sample, and the tokenizer has "
            f"{available} sentinels <extra_id_N>. Train one with megatron-switch prepare "
            f"--sentinels {max(plan.spans, 100)}, or lower --seq-length or --switch-span-density, "
            "or raise --switch-span-length."
        )
