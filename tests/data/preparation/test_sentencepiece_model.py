"""A trained model loses nothing, and the same text gives the same model."""

import re

import pytest
import sentencepiece

from megatron_switch.data.preparation.sentencepiece_model import (
    SentencePieceSettings,
    train_sentencepiece,
)
from megatron_switch.errors import ConfigError, DataError

HARD_TEXT = "\n  indent\tTab\r\n\r\n   日本語 é \x00 \u200b\u3000 <eod> </s> 🙂 trailing  "


def settings(vocab_size=300, algorithm="bpe", sample_bytes=2**20):
    return SentencePieceSettings(vocab_size, algorithm, sample_bytes)


def load(model):
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_text_comes_back_as_it_was(make_text, algorithm):
    processor = load(train_sentencepiece([make_text(200)], settings(algorithm=algorithm)))
    assert processor.get_piece_size() == 300
    for text in (HARD_TEXT, make_text(20, seed="other"), " ", "\n"):
        ids = processor.encode_as_ids(text)
        assert processor.decode_ids(ids) == text
        assert processor.eos_id() not in ids  # not even where the text spells it
        assert processor.unk_id() not in ids
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id()) == (0, 1, 2)
    assert processor.id_to_piece(1) == "<eod>"


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_model(make_text, algorithm):
    first, second = (
        train_sentencepiece([make_text(200)], settings(algorithm=algorithm)) for _ in range(2)
    )
    assert first == second


def test_indentation_becomes_one_token(make_text):
    processor = load(train_sentencepiece(["        x = 1\n" * 50 + make_text(50)], settings()))
    assert len(processor.encode_as_ids("        ")) == 1


def test_no_more_than_the_sample_is_read(make_text):
    def texts():
        yield make_text(300)
        yield make_text(300, seed="second")
        raise AssertionError("read beyond the sample")

    size = len(make_text(300)) + 1000
    train_sentencepiece(texts(), settings(sample_bytes=size))


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_too_large_a_vocabulary_says_the_largest_that_works(make_text, algorithm):
    text = [make_text(100)]
    with pytest.raises(DataError, match="is more than the corpus supports") as caught:
        train_sentencepiece(text, settings(5000, algorithm))
    assert f"{algorithm} finds only" in str(caught.value)
    assert "--tokenizer-sample-mib" not in str(caught.value)
    found = re.search(r"Set --vocab-size to (\d+) or less\.", str(caught.value))
    largest = int(found[1])
    assert load(train_sentencepiece(text, settings(largest, algorithm))).get_piece_size() == largest
    with pytest.raises(DataError, match=rf"Set --vocab-size to {largest} or less"):
        train_sentencepiece(text, settings(largest + 1, algorithm))


def test_too_large_a_vocabulary_for_a_cut_sample_says_that_it_was_cut(make_text):
    with pytest.raises(DataError, match="or less or give more text with --tokenizer-sample-mib"):
        train_sentencepiece([make_text(300)], settings(5000, sample_bytes=2000))


def test_too_small_a_vocabulary_says_the_least_that_works(make_text):
    text = [make_text(100)]
    with pytest.raises(ConfigError, match="--vocab-size 100 is too small") as caught:
        train_sentencepiece(text, settings(100))
    least = int(re.search(r"to (\d+) or more", str(caught.value))[1])
    assert load(train_sentencepiece(text, settings(least))).get_piece_size() == least
    with pytest.raises(ConfigError, match=rf"need {least}"):
        train_sentencepiece(text, settings(least - 1))


def test_text_of_line_ends_alone_trains_nothing():
    with pytest.raises(DataError, match="SentencePiece could not train a vocabulary of 300"):
        train_sentencepiece(["\n\n"], settings())


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_sentinels_are_the_last_tokens_the_first_of_them_highest(make_text, algorithm):
    asked = SentencePieceSettings(320, algorithm, 2**20, sentinels=20)
    processor = load(train_sentencepiece([make_text(200)], asked))
    assert processor.get_piece_size() == 320
    names = [processor.id_to_piece(token) for token in range(300, 320)]
    assert names == [f"<extra_id_{number}>" for number in reversed(range(20))]
    text = "see <extra_id_0> and <extra_id_19>."
    ids = processor.encode_as_ids(text)
    assert [token for token in ids if token >= 300] == [319, 300]
    assert processor.decode_ids(ids) == text
    # Everything else is what it is without them.
    plain = load(train_sentencepiece([make_text(200)], settings(300, algorithm)))
    assert plain.encode_as_ids(HARD_TEXT) == processor.encode_as_ids(HARD_TEXT)


def test_a_vocabulary_too_small_for_its_sentinels_says_so(make_text):
    asked = SentencePieceSettings(300, "bpe", 2**20, sentinels=100)
    with pytest.raises(
        ConfigError, match=r"and the sentinels 100\. Set --vocab-size to (\d+)"
    ) as got:
        train_sentencepiece([make_text(100)], asked)
    least = int(re.search(r"to (\d+) or more", str(got.value))[1])
    train_sentencepiece([make_text(100)], SentencePieceSettings(least, "bpe", 2**20, sentinels=100))


@pytest.mark.parametrize("error", [DataError("line 2 holds int"), KeyError("text")])
def test_what_reading_the_text_raises_arrives_as_it_is(make_text, error):
    def texts():
        yield make_text(50)
        raise error

    with pytest.raises(type(error)) as caught:
        train_sentencepiece(texts(), settings())
    assert caught.value is error
