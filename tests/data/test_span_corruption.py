"""Span corruption: how much is taken out, in how long pieces, and that nothing is lost."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_switch.data.encoder_decoder import SpecialTokens
from megatron_switch.data.span_corruption import (
    SpanCorruption,
    SpanPlan,
    check_sentinels,
    corrupt,
    plan_spans,
)
from megatron_switch.errors import ConfigError

END = 1
SENTINELS = tuple(range(1099, 999, -1))


def draw(seed=0):
    return np.random.default_rng(seed)


def corrupted(text, plan, seed=0):
    return corrupt(text, plan, sentinels=SENTINELS, end=END, draw=draw(seed))


def restored(source, target):
    """Put the spans of a target back into a source, by their sentinels."""
    spans, marks = {}, set(SENTINELS)
    for token in target[:-1].tolist():
        if token in marks:
            spans[token] = current = []
        else:
            current.append(token)
    parts = [spans.get(token, [token]) for token in source[:-1].tolist()]
    assert source[-1] == target[-1] == END
    return [token for part in parts for token in part]


@pytest.mark.parametrize(
    ("density", "mean_length"), [(0.15, 3.0), (0.5, 1.0), (0.5, 8.0), (0.02, 3.0), (0.9, 3.0)]
)
@pytest.mark.parametrize("length", [2, 7, 100])
def test_input_and_target_together_are_the_text(length, density, mean_length):
    plan = SpanPlan.of(length, density=density, mean_length=mean_length)
    text = np.arange(10, 10 + length)
    for seed in range(20):
        source, target = corrupted(text, plan, seed)
        assert restored(source, target) == text.tolist()
        assert (len(source), len(target)) == (plan.source, plan.target)


@pytest.mark.parametrize(("density", "mean_length"), [(0.15, 3.0), (0.3, 5.0), (0.5, 1.0)])
def test_density_and_mean_length_are_those_asked_for(density, mean_length):
    plan = SpanPlan.of(1000, density=density, mean_length=mean_length)
    text = np.arange(2000, 3000)
    taken = spans = 0
    for seed in range(10):
        _, target = corrupted(text, SpanPlan(1000, plan.noise, min(plan.spans, 100)), seed)
        marks = np.isin(target[:-1], SENTINELS)
        taken += (~marks).sum()
        spans += marks.sum()
    assert taken / 10_000 == pytest.approx(density, abs=5e-4)
    assert plan.noise / plan.spans == pytest.approx(mean_length, rel=0.01)
    assert spans == 10 * min(plan.spans, 100)


def test_spans_vary_in_length_and_lie_anywhere_but_at_the_beginning():
    plan = SpanPlan.of(60, density=0.25, mean_length=3.0)
    text = np.arange(2000, 2060)
    lengths, begins = Counter(), Counter()
    for seed in range(400):
        _, target = corrupted(text, plan, seed)
        marks = np.flatnonzero(np.isin(target, SENTINELS))
        lengths.update(np.diff([*marks, len(target) - 1]) - 1)
        begins.update(target[marks + 1] - 2000)
    assert sum(length * count for length, count in lengths.items()) == 400 * plan.noise
    assert set(lengths) >= {1, 2, 3, 4, 5, 6, 7}
    assert 0 not in lengths  # a span has tokens, and the next one does not touch it
    assert 0 not in begins
    assert set(begins) >= set(range(1, 55))


def test_sentinels_are_taken_from_the_highest_id_down_and_mark_the_same_places():
    plan = SpanPlan.of(40, density=0.3, mean_length=3.0)
    source, target = corrupted(np.arange(2000, 2040), plan)
    in_source = [token for token in source.tolist() if token in SENTINELS]
    assert in_source == list(SENTINELS[: plan.spans])
    assert [token for token in target.tolist() if token in SENTINELS] == in_source
    assert target[0] == SENTINELS[0]


def test_the_lengths_of_t5():
    plan = plan_spans(source_length=512, target_length=None, density=0.15, mean_length=3.0)
    assert (plan.text, plan.source, plan.target) == (568, 512, 114)


@pytest.mark.parametrize(
    ("source", "target"), [(512, 114), (512, 60), (33, 17), (3, 3), (128, 512)]
)
def test_the_longest_text_that_fits_is_taken(source, target):
    settings = {"density": 0.15, "mean_length": 3.0}
    plan = plan_spans(source_length=source, target_length=target, **settings)
    assert plan.source <= source
    assert plan.target <= target
    longer = SpanPlan.of(plan.text + 1, **settings)
    assert longer.source > source or longer.target > target


def test_sequences_without_room_are_refused():
    with pytest.raises(ConfigError, match=r"no room.*--seq-length is 2 and --decoder-seq-length 9"):
        plan_spans(source_length=2, target_length=9, density=0.15, mean_length=3.0)


def test_too_few_sentinels_are_refused_with_the_ways_out():
    plan = SpanPlan(text=568, noise=85, spans=28)
    check_sentinels(plan, 28)
    with pytest.raises(ConfigError, match=r"28 spans .* 27 sentinels .*prepare --sentinels 100"):
        check_sentinels(plan, 27)
    with pytest.raises(ConfigError, match=r"tokenizer has none\. .*--sentinels 100, .*\.jsonl"):
        check_sentinels(plan, 0)


class Texts:
    """What Megatron's data set looks like from here."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"tokens": torch.arange(20) + 2000 + 100 * index}


def dataset(**changes):
    settings = {"seed": 3, "split": 0} | changes
    return SpanCorruption(
        Texts(),
        SpanPlan.of(20, density=0.3, mean_length=2.0),
        source_length=24,
        target_length=16,
        sentinels=SENTINELS,
        special=SpecialTokens(end=END, padding=0),
        **settings,
    )


def test_a_sample_depends_on_its_number_alone():
    first, again = dataset(), dataset()
    forwards = [first[index] for index in range(5)]
    backwards = [again[index] for index in reversed(range(5))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert len(first) == 5


def test_seed_and_split_change_the_places():
    labels = {
        tuple(dataset(**changes)[2]["labels"].tolist())
        for changes in ({}, {"seed": 4}, {"split": 1}, {"split": 2})
    }
    assert len(labels) == 4


def test_a_sample_restores_its_text_and_says_what_is_padding():
    sample = SimpleNamespace(**dataset()[3])
    source = sample.encoder_tokens[sample.encoder_padding == 0].numpy()
    target = sample.labels[sample.loss_mask == 1].numpy()
    assert restored(source, target) == list(range(2300, 2320))
    assert sample.decoder_tokens[0] == 0
    assert sample.encoder_padding.sum() > 0


def test_the_sample_of_none_has_no_loss():
    assert dataset()[None]["loss_mask"].sum() == 0
