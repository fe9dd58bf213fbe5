"""Token selection against hand-computed sets, and the generation loop against a toy model."""

import pytest
import torch

from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.models.sampling import (
    GREEDY,
    Sampling,
    generate_tokens,
    next_token,
    token_probabilities,
    window_width,
)

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])  # likeliest first: tokens 1, 3, 4, 0, 2
LOGITS_BV = PROBS.log().unsqueeze(0)


def kept(sampling):
    return token_probabilities(LOGITS_BV, sampling)[0].nonzero().flatten().tolist()


def test_without_filters_the_model_s_own_probabilities_are_drawn_from():
    torch.testing.assert_close(token_probabilities(LOGITS_BV, Sampling())[0], PROBS)


def test_temperature_divides_the_logits():
    expected = (LOGITS_BV / 0.5).softmax(-1)
    torch.testing.assert_close(token_probabilities(LOGITS_BV, Sampling(temperature=0.5)), expected)


def test_a_tiny_temperature_approaches_greedy_without_overflow():
    probs_BV = token_probabilities(LOGITS_BV, Sampling(temperature=1e-38))
    torch.testing.assert_close(probs_BV, token_probabilities(LOGITS_BV, GREEDY))


@pytest.mark.parametrize(("top_k", "tokens"), [(1, [1]), (3, [1, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_likeliest(top_k, tokens):
    assert kept(Sampling(top_k=top_k)) == tokens


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.01, [1]), (0.39, [1]), (0.5, [1, 3]), (0.84, [1, 3, 4]), (1.0, [*range(5)])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, tokens):
    assert kept(Sampling(top_p=top_p)) == tokens


def test_top_p_is_counted_among_the_top_k():
    # Of tokens 1, 3, 4 (0.85 together) token 1 alone has 0.47.
    assert kept(Sampling(top_k=3, top_p=0.45)) == [1]
    assert kept(Sampling(top_k=3, top_p=0.5)) == [1, 3]


def test_what_is_kept_sums_to_one_in_the_same_proportions():
    probs = token_probabilities(LOGITS_BV, Sampling(top_k=2))[0]
    torch.testing.assert_close(probs[[1, 3]], torch.tensor([0.4, 0.25]) / 0.65)


def test_ties_go_to_the_lowest_token():
    equal_BV = torch.zeros(1, 4)
    assert next_token(equal_BV, GREEDY).tolist() == [0]
    assert token_probabilities(equal_BV, Sampling(top_k=2))[0].tolist() == [0.5, 0.5, 0, 0]


def test_drawn_frequencies_follow_the_probabilities():
    logits_BV = LOGITS_BV.expand(20_000, -1)
    drawn_B = next_token(logits_BV, Sampling(), generator=torch.Generator().manual_seed(0))
    frequency = drawn_B.bincount(minlength=5) / len(drawn_B)
    torch.testing.assert_close(frequency, PROBS, atol=0.015, rtol=0)  # four standard deviations


def test_rows_are_chosen_on_their_own():
    logits_BV = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    assert next_token(logits_BV, GREEDY).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_of_a_diverged_model_are_refused(bad):
    logits_BV = torch.tensor([[0.0, bad]])
    with pytest.raises(CheckpointError, match=r"not finite.*diverged.*--ckpt-step"):
        next_token(logits_BV, GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"at least 0 .*--temperature -1.0"),
        ({"temperature": float("nan")}, r"at least 0 .*--temperature nan"),
        ({"temperature": float("inf")}, r"at least 0 .*--temperature inf"),
        ({"top_k": 0}, r"At least one token .*--top-k 0"),
        ({"top_p": 0.0}, r"above 0 and at most 1, got --top-p 0.0"),
        ({"top_p": 1.5}, r"above 0 and at most 1, got --top-p 1.5"),
        ({"top_p": float("nan")}, r"above 0 and at most 1, got --top-p nan"),
    ],
)
def test_impossible_settings_name_their_flag(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)


VOCAB = 10


def counting_model(calls):
    """Predicts token + 1 at every position and records what it was fed."""

    def forward(tokens_BS, padding_BS):
        calls.append((tokens_BS.clone(), padding_BS.clone()))
        return torch.nn.functional.one_hot((tokens_BS + 1) % VOCAB, VOCAB).float()

    return forward


def test_the_prompt_is_continued_from_its_last_token():
    new = list(generate_tokens(counting_model([]), [2, 3], window=8, max_new_tokens=4))
    assert new == [4, 5, 6, 7]


def test_every_call_has_the_same_shape_and_marks_its_padding():
    calls = []
    list(generate_tokens(counting_model(calls), [2, 3], window=4, max_new_tokens=2, padding_id=9))
    tokens, padding = zip(*calls, strict=True)
    assert [t.tolist() for t in tokens] == [[[2, 3, 9, 9]], [[2, 3, 4, 9]]]
    assert [p.tolist() for p in padding] == [[[False, False, True, True]], [[False] * 3 + [True]]]


def test_a_long_text_goes_on_with_its_last_tokens():
    calls = []
    new = list(generate_tokens(counting_model(calls), [1, 2, 3, 4], window=3, max_new_tokens=3))
    assert new == [5, 6, 7]
    assert [t.tolist() for t, _ in calls] == [[[2, 3, 4]], [[3, 4, 5]], [[4, 5, 6]]]


def test_generation_stops_before_the_end_of_document():
    new = list(generate_tokens(counting_model([]), [2], window=8, max_new_tokens=8, eod_id=5))
    assert new == [3, 4]


def test_padded_vocabulary_is_never_chosen():
    new = list(generate_tokens(counting_model([]), [2], window=4, max_new_tokens=3, vocab_size=4))
    assert new == [3, 0, 1]  # token 4 is beyond the vocabulary; of the rest, all equal, 0 is first


def test_a_seed_repeats_its_text_and_another_does_not():
    def uniform(tokens_BS, padding_BS):
        return torch.zeros(*tokens_BS.shape, 1000)

    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(
            generate_tokens(
                uniform, [0], window=4, max_new_tokens=8, sampling=Sampling(), generator=generator
            )
        )

    assert text(1) == text(1) != text(2)


def test_the_model_runs_without_gradients():
    weight = torch.ones((), requires_grad=True)

    def forward(tokens_BS, padding_BS):
        assert not torch.is_grad_enabled()
        return weight * torch.zeros(*tokens_BS.shape, VOCAB)

    for _ in generate_tokens(forward, [0], window=2, max_new_tokens=2):
        assert torch.is_grad_enabled()  # the caller's own setting is left alone in between


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"at least one token .*--prompt"):
        list(generate_tokens(counting_model([]), [], window=4, max_new_tokens=1))


@pytest.mark.parametrize(
    ("num_tokens", "multiple_of", "width"), [(5, 1, 5), (5, 4, 8), (16, 4, 16), (99, 4, 16)]
)
def test_the_window_is_no_wider_than_needed_or_possible(num_tokens, multiple_of, width):
    assert window_width(num_tokens, context_length=16, multiple_of=multiple_of) == width
