"""Training a SentencePiece model that loses nothing and depends on nothing but its text.

Text comes back from its tokens as it was: no normalisation, no added or merged spaces, and a byte
token for every byte (line ends included), so that nothing is unknown. One exception is in
SentencePiece's own alphabet: U+2581, which stands for the space, comes back as one.

The same text and settings give the same model on every machine: the sample is bounded by size, not
drawn by chance, and the number of threads is fixed, because it shows in the result.

Ids: 0 pads, 1 ends a document, 2 is the unknown token that never occurs (as in T5), then 256 bytes,
then the learned pieces; last, where asked for, the sentinels of span corruption, ``<extra_id_0>``
at the highest id and the others counted down from it, as T5 has them. Text that spells a sentinel
becomes it, so that a prompt can hold one.
"""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from megatron_switch.errors import ConfigError, DataError

Algorithm = Literal["bpe", "unigram"]

END_OF_DOCUMENT = "<eod>"
SENTINEL = "<extra_id_{}>"
"""Name of a sentinel; takes its number."""

_LONGEST_SENTENCE = 2048  # characters: so long a line is cut; SentencePiece would pass over it
_NUM_THREADS = 8
_TOO_LARGE = re.compile(r"Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True)
class SentencePieceSettings:
    """What a SentencePiece model is trained with.

    Attributes:
        vocab_size: Number of tokens, byte and control tokens included.
        algorithm: ``bpe`` trains faster, ``unigram`` tokenises faster.
        sample_bytes: Most text to train on; the rest is not looked at.
        sentinels: How many of the tokens are sentinels of span corruption.
    """

    vocab_size: int
    algorithm: Algorithm
    sample_bytes: int
    sentinels: int = 0


def train_sentencepiece(texts: Iterable[str], settings: SentencePieceSettings) -> bytes:
    """Return a serialised SentencePiece model.

    Args:
        texts: Sample of the corpus, used up to ``settings.sample_bytes``.
        settings: Size and kind of the model.

    Raises:
        ConfigError: The vocabulary has no room for the characters of the text.
        DataError: The text supports no vocabulary as large as this.
        Exception: Whatever ``texts`` raises, as it is.
    """
    sentences = _Sentences(texts, settings.sample_bytes)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=settings.vocab_size - settings.sentinels,
            model_type=settings.algorithm,
            num_threads=_NUM_THREADS,
            max_sentence_length=4 * _LONGEST_SENTENCE,  # bytes: four a character at most
            byte_fallback=True,
            character_coverage=0.9995,  # the rarest characters are written as bytes
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation
            pad_id=0,
            eos_id=1,
            eos_piece=END_OF_DOCUMENT,
            unk_id=2,
            bos_id=-1,
            minloglevel=4,  # what goes wrong arrives as an exception
        )
    except (RuntimeError, OSError) as error:
        if sentences.error is not None:  # otherwise hidden below a C++ traceback
            raise sentences.error from None
        raise _explained(str(error), settings, sentences) from error
    return _with_sentinels(model.getvalue(), settings.sentinels)


def _with_sentinels(model: bytes, count: int) -> bytes:
    """Append sentinels to a finished model, the last of them first.

    SentencePiece itself gives symbols of the user the ids in front.
    """
    if count == 0:
        return model
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for number in reversed(range(count)):
        piece = proto.pieces.add(piece=SENTINEL.format(number), score=0.0)
        piece.type = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    proto.trainer_spec.vocab_size = len(proto.pieces)
    serialised: bytes = proto.SerializeToString()
    return serialised


class _Sentences:
    """Lines of the sample, until it is large enough; SentencePiece has no use for line ends.

    What reading raises is kept, because SentencePiece passes on only its text.
    """

    def __init__(self, texts: Iterable[str], limit: int) -> None:
        self.texts = texts
        self.limit = limit
        self.num_bytes = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines()
        except Exception as error:
            self.error = error
            raise

    def _lines(self) -> Iterator[str]:
        for text in self.texts:
            for line in text.splitlines():
                for start in range(0, len(line), _LONGEST_SENTENCE):
                    if self.num_bytes >= self.limit:
                        return
                    sentence = line[start : start + _LONGEST_SENTENCE]
                    self.num_bytes += len(sentence.encode("utf-8"))
                    yield sentence

    @property
    def were_cut(self) -> bool:
        return self.num_bytes >= self.limit


def _explained(
    message: str, settings: SentencePieceSettings, sentences: _Sentences
) -> ConfigError | DataError:
    """Return SentencePiece's complaint in terms of our flags."""
    size = f"{sentences.num_bytes:,} bytes of text"
    extra = settings.sentinels
    if too_large := _TOO_LARGE.search(message):
        more = " or give more text with --tokenizer-sample-mib" if sentences.were_cut else ""
        return DataError(
            f"--vocab-size {settings.vocab_size} is more than the corpus supports: "
            f"{settings.algorithm} finds only {too_large[1]} different tokens in {size}"
            f"{f', and there are {extra} sentinels' if extra else ''}. "
            f"Set --vocab-size to {int(too_large[1]) + extra} or less{more}."
        )
    if too_small := _TOO_SMALL.search(message):
        return ConfigError(
            f"--vocab-size {settings.vocab_size} is too small: 256 bytes, 3 control tokens and "
            f"the characters of the corpus need {too_small[1]}"
            f"{f', and the sentinels {extra}' if extra else ''}. Set --vocab-size to "
            f"{int(too_small[1]) + extra} or more."
        )
    return DataError(
        f"SentencePiece could not train a vocabulary of {settings.vocab_size} on {size}: "
        f"{message}. Set another --vocab-size or give other text."
    )
