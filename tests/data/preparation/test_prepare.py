"""From text to tokens that Megatron reads: the same whatever the way, whole or not at all."""

import dataclasses
import errno
import gzip
import json
import shutil
from types import SimpleNamespace

import pyarrow
import pytest
from backports import zstd
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pyarrow import parquet

from megatron_switch.commands.prepare import run
from megatron_switch.data.preparation import prepare as prepare_module
from megatron_switch.data.preparation import token_shards
from megatron_switch.data.preparation.prepare import prepare
from megatron_switch.data.preparation.token_shards import ShardWriter
from megatron_switch.data.tokenizer import build_tokenizer
from megatron_switch.errors import DataError

RESULTS = ["corpus.bin", "corpus.idx", "prepared.json", "tokenizer.model"]
FORMATS = ["txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"]


@pytest.fixture(autouse=True)
def many_shards(monkeypatch):
    monkeypatch.setattr(token_shards, "_LEAST_WEIGHT", 1500)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_in(folder, parse):
    """Return what training sees: the documents decoded with the tokenizer of the printed flags."""
    flags = json.loads((folder / "prepared.json").read_text())["training_flags"]
    assert flags[:2] == ["--data-path", str(folder / "corpus")]
    tokenizer = build_tokenizer(parse("--output", "unused", *flags[2:]))
    documents = [ids.tolist() for ids in IndexedDataset(flags[1])]
    assert all(ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1] for ids in documents)
    return [tokenizer.built.detokenize(ids[:-1]) for ids in documents]


def write_as(suffix, folder, texts):
    """Write texts in a format, as many files as it needs."""
    folder.mkdir()
    kind, _, packed = suffix.partition(".")
    pack = {"": bytes, "gz": gzip.compress, "zst": zstd.compress}[packed]
    if kind == "txt":
        for index, text in enumerate(texts):
            (folder / f"{index}.{suffix}").write_bytes(pack(text.encode()))
    elif kind == "jsonl":
        lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
        (folder / f"a.{suffix}").write_bytes(pack(lines.encode()))
    else:
        parquet.write_table(pyarrow.table({"body": texts}), folder / "a.parquet", 3)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_round_trips(tmp_path, parse, out, texts, sentencepiece_model, suffix):
    write_as(suffix, tmp_path / "in", texts)
    args = parse(
        *(tmp_path / "in", "--output", out, "--text-key", "body", "--workers", 1),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", sentencepiece_model),
    )
    prepared = prepare(args)
    assert texts_in(out, parse) == texts
    assert listing(out) == ["corpus.bin", "corpus.idx", "prepared.json"]
    assert prepared.documents == len(texts)
    assert prepared.tokens == len(IndexedDataset(str(out / "corpus")).bin_reader._bin_buffer) // 2
    assert prepared.text_bytes == sum(len(text.encode()) for text in texts)


def test_a_trained_tokenizer_round_trips_and_is_reported(command, parse, out, texts, capsys):
    assert run(command()) == 0
    assert listing(out) == RESULTS
    assert texts_in(out, parse) == texts
    printed = capsys.readouterr()
    assert printed.err == ""  # no progress bar without a terminal
    flags = (
        f"--data-path {out}/corpus --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {out}/tokenizer.model"
    )
    assert f"documents   {len(texts)}\n" in printed.out
    assert printed.out.endswith(f"Train on it with:\n  {flags}\n")
    report = json.loads((out / "prepared.json").read_text())
    assert report["schema"] == "megatron-switch/prepared/1"
    assert report["tokenizer"]["vocab_size"] == 300
    assert report["data"]["dtype"] == "uint16"


def test_the_number_of_workers_shows_nowhere(command, out, tmp_path):
    one = prepare(command("--workers", 1))
    first = contents(out)
    shutil.rmtree(out)
    two = prepare(command("--workers", 2))
    assert contents(out) == first
    assert one == two


def test_megatrons_dataset_reads_it(command, out):
    prepare(command())
    tokenizer = build_tokenizer(
        command(
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", out / "tokenizer.model"),
        )
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        blend=([str(out / "corpus")], None),
        split="6,1,1",
        path_to_cache=str(out / "cache"),
        tokenizer=tokenizer.built,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [20, 2, 2]
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for dataset, size in zip(datasets, sizes, strict=True):
        assert len(dataset) >= size
        sample = dataset[0]
        assert sample["tokens"].shape == (32,)
        assert sample["tokens"].max() < 300
        assert sample["loss_mask"].all()


def test_bad_input_stops_or_is_left_out_and_reported(command, out, source, parse, texts, capsys):
    (source / "8.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    (source / "9.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"9\.txt is not text"):
        prepare(command())
    (source / "9.txt").unlink()
    with pytest.raises(DataError, match=r"8\.jsonl, line 2: key 'text' .* holds int"):
        prepare(command())
    assert listing(out) == [".preparing"]
    (source / "9.txt").write_bytes(b"\0")
    assert run(command("--skip-bad-input")) == 0
    assert texts_in(out, parse) == [*texts, "good"]
    assert "left out    2: " in capsys.readouterr().out
    assert json.loads((out / "prepared.json").read_text())["left_out"] == 2


def test_a_full_disk_is_said_before_and_while(command, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10))
        with pytest.raises(DataError, match=r"Preparing needs about 5\.4 KiB in --output"):
            prepare(command())

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", full)
        with pytest.raises(
            DataError, match=r"No space is left in --output .* Finished work is kept"
        ):
            prepare(command())
    assert prepare(command()).documents == 8


def test_an_output_that_cannot_be_written_is_named(command, out, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(out))

    monkeypatch.setattr(type(out), "mkdir", refuse)
    with pytest.raises(
        DataError, match=r"Preparing into --output .*Permission denied.* can be writ"
    ):
        prepare(command())


def test_only_documents_without_text(parse, tmp_path, out, sentencepiece_model):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n')
    args = parse(
        *(path, "--output", out),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", sentencepiece_model),
    )
    with pytest.raises(DataError, match="No document of the input holds text"):
        prepare(args)


def test_numbers_with_the_null_tokenizer(parse, tmp_path, out):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2 3"}\n{"text": "70000 99999"}\n')
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100_000]
    prepared = prepare(parse(path, "--output", out, *words))
    dataset = IndexedDataset(str(out / "corpus"))
    assert [ids.tolist() for ids in dataset] == [[1, 2, 3, 99_999], [70_000, 99_999]]
    assert prepared.data["dtype"] == "int32"
    assert prepared.training_flags == ("--data-path", str(out / "corpus"), *map(str, words))


def test_too_large_a_vocabulary(command, out):
    with pytest.raises(DataError, match="--vocab-size 9999 is more than the corpus supports"):
        prepare(command("--vocab-size", 9999))
    assert listing(out) == [".preparing"]


def test_the_standard_library(parse, out, source, texts, monkeypatch):
    for path in source.iterdir():
        path.rename(path.with_suffix(".py"))
    (source / "test").mkdir()
    (source / "test" / "t.py").write_text("x = 1\n")
    (source / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9")
    (source / "later.py").write_bytes(b"#" * 9000 + b"\xe9")  # found only while it is read
    monkeypatch.setattr(prepare_module, "library_root", lambda: source)
    prepared = prepare(parse("--stdlib", "--output", out, "--vocab-size", 300))
    assert texts_in(out, parse) == texts
    assert (prepared.left_out, prepared.left_out_by_flag) == (2, 0)
    assert prepare(parse("--stdlib", "--output", out, "--vocab-size", 300)) == prepared
    with_tests = ["--stdlib", "--stdlib-tests", "--output", out, "--overwrite", "--vocab-size", 300]
    prepare(parse(*with_tests))
    assert texts_in(out, parse) == [*texts, "x = 1\n"]


def test_documents_are_cut_at_a_separator(command, parse, out, texts):
    prepare(command("--document-separator", r"\r\n"))
    assert texts_in(out, parse) == [part for text in texts for part in text.split("\r\n") if part]


def test_flags_without_effect_are_said(command, parse, tmp_path, out, sentencepiece_model, capsys):
    prepare(command("--text-key", "body"))
    assert "--text-key changes nothing: there is no .jsonl" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    prepare(
        parse(
            *(tmp_path / "a.jsonl", "--output", tmp_path / "2", "--document-separator", "x"),
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", sentencepiece_model),
        )
    )
    assert "--document-separator changes nothing" in capsys.readouterr().err


def test_a_terminal_sees_progress(command, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare(command())
    shown = capsys.readouterr().err
    assert "training the tokenizer" in shown
    assert "tokenising" in shown


def test_the_report_speaks_of_where_it_is_now(command, parse, out, source, tmp_path, monkeypatch):
    prepared = prepare(command())
    monkeypatch.chdir(tmp_path)
    again = prepare(parse(source, "--output", "out", "--vocab-size", 300))
    assert again.prefix == "out/corpus"
    assert (
        dataclasses.replace(again, prefix=prepared.prefix, training_flags=prepared.training_flags)
        == prepared
    )
