"""The report reads back as it was, and its summary says what a person needs next."""

import dataclasses
import json

from megatron_switch.data.preparation.prepared import SCHEMA, Prepared, from_json, summary

PREPARED = Prepared(
    schema=SCHEMA,
    version="1.2.3",
    prefix="my data/corpus",
    files=1234,
    empty_files=2,
    documents=5000,
    empty_documents=1,
    tokens=2_000_000,
    text_bytes=7_000_000,
    left_out=7,
    left_out_by_flag=7,
    reasons=("a.txt is not text",),
    tokenizer={
        "type": "SentencePieceTokenizer",
        "vocab_size": 2048,
        "eod": 1,
        "trained": {"algorithm": "bpe"},
    },
    data={"dtype": "uint16", "bin_bytes": 4_000_000, "idx_bytes": 999},
    training_flags=("--data-path", "my data/corpus"),
)

SUMMARY = """\
files       1,234
documents   5,000 (left out: 2 empty files, 1 empty document)
tokens      2,000,000 (3.50 bytes of text each)
vocabulary  2,048 (SentencePieceTokenizer, bpe, trained on this text; end of document 1)
written     my data/corpus.bin (4.00 MB, uint16) and .idx (1.0 kB)
left out    7: a.txt is not text

Train on it with:
  --data-path 'my data/corpus'"""


def test_json_and_back():
    fields = json.loads(json.dumps({**dataclasses.asdict(PREPARED), "fingerprint": "f"}))
    assert from_json(fields) == PREPARED


def test_the_summary_counts_and_ends_with_training_flags():
    assert summary(PREPARED) == SUMMARY


def test_a_given_tokenizer_and_few_documents():
    tokenizer = {"type": "NullTokenizer", "vocab_size": 9, "eod": 8, "trained": None}
    text = summary(
        dataclasses.replace(
            PREPARED, tokenizer=tokenizer, documents=1, empty_files=0, empty_documents=0, left_out=0
        )
    )
    assert "vocabulary  9 (NullTokenizer, given; end of document 8)" in text
    assert "documents   1\n" in text
    assert "left out" not in text
    assert "--split divides documents, and there are only 1." in text
