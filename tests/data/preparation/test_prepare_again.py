"""A preparation that is run again: it goes on, answers at once, or asks before it replaces."""

import shutil

import pytest

from megatron_switch.commands.prepare import run
from megatron_switch.data.preparation import prepare as prepare_module
from megatron_switch.data.preparation import token_shards
from megatron_switch.data.preparation.prepare import prepare
from megatron_switch.data.preparation.token_shards import ShardWriter
from megatron_switch.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def many_shards(monkeypatch):
    monkeypatch.setattr(token_shards, "_LEAST_WEIGHT", 1500)


def interrupt(*_args):
    raise KeyboardInterrupt


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_interrupted_work_is_resumable_and_ends_the_same(command, out, monkeypatch, capsys):
    prepare(command())
    expected = contents(out)
    shutil.rmtree(out)
    write = ShardWriter.write
    written = []

    def until_the_third(self, shard):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.index)
        return write(self, shard)

    monkeypatch.setattr(ShardWriter, "write", until_the_third)
    assert run(command()) == 130
    assert "Interrupted. Finished work is kept" in capsys.readouterr().err
    assert listing(out) == [".preparing"]

    written.clear()
    monkeypatch.setattr(
        ShardWriter, "write", lambda self, shard: written.append(shard.index) or write(self, shard)
    )
    monkeypatch.setattr(prepare_module, "train_sentencepiece", pytest.fail)  # trained already
    assert run(command("--workers", 2)) == 0
    assert "Resuming: 2 of 4 shards are finished." in capsys.readouterr().err
    assert contents(out) == expected


def test_a_crash_while_publishing_is_mended(command, out, monkeypatch):
    prepare(command())
    expected = contents(out)
    shutil.rmtree(out)
    path_type = type(out)
    replace = path_type.replace

    def dying(path, target):
        if path.name == "corpus.idx":
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(path_type, "replace", dying)
    assert run(command()) == 130
    assert listing(out) == [".preparing", "corpus.bin", "tokenizer.model"]
    monkeypatch.undo()
    monkeypatch.setattr(token_shards, "_LEAST_WEIGHT", 1500)
    assert run(command()) == 0
    assert contents(out) == expected


@pytest.mark.parametrize("change", ["input", "settings"])
def test_unfinished_work_of_other_input_or_settings_is_not_used(
    command, out, source, monkeypatch, capsys, change
):
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "join", interrupt)
        assert run(command()) == 130
    words = []
    if change == "input":
        (source / "0.txt").write_text("something else\n" * 50)
    else:
        words = ["--document-separator", "."]
    assert run(command(*words)) == 0
    assert "differ from those of the unfinished work: starting over" in capsys.readouterr().err
    resumed = contents(out)
    shutil.rmtree(out)
    prepare(command(*words))
    assert contents(out) == resumed


def test_the_same_command_again_does_nothing(command, out, monkeypatch, capsys):
    first = prepare(command())
    before = contents(out)
    monkeypatch.setattr(ShardWriter, "write", pytest.fail)
    assert prepare(command("--workers", 2)) == first
    assert "already holds this result" in capsys.readouterr().err
    assert contents(out) == before


def test_the_same_command_again_notices_damage(command, out):
    prepare(command())
    (out / "corpus.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.bin is truncated"):
        prepare(command())
    prepare(command("--overwrite"))


def test_other_results_need_overwrite(command, out):
    prepare(command())
    before = contents(out)
    with pytest.raises(ConfigError, match=r"already holds prepared\.json.*--overwrite"):
        prepare(command("--vocab-size", 299))
    assert contents(out) == before
    assert prepare(command("--vocab-size", 299, "--overwrite")).tokenizer["vocab_size"] == 299
    assert contents(out) != before


def test_results_stay_until_new_ones_are_complete(command, out, monkeypatch):
    prepare(command())
    before = contents(out)
    monkeypatch.setattr(ShardWriter, "join", interrupt)
    assert run(command("--vocab-size", 299, "--overwrite")) == 130
    shutil.rmtree(out / ".preparing")
    assert contents(out) == before


def test_results_with_losses_do_not_answer_a_command_without(command, source):
    (source / "8.jsonl").write_text('{"text": "good"}\nbad\n')
    assert prepare(command("--skip-bad-input")).left_out == 1
    assert prepare(command("--skip-bad-input")).left_out == 1
    with pytest.raises(ConfigError, match="already holds"):
        prepare(command())


def test_input_that_changes_meanwhile_is_refused(command, out, source, monkeypatch):
    write = ShardWriter.write

    def changing(self, shard):
        (source / "7.txt").write_text("changed\n" * 9)
        return write(self, shard)

    monkeypatch.setattr(ShardWriter, "write", changing)
    with pytest.raises(DataError, match=r"7\.txt changed while it was being read"):
        prepare(command())
    assert listing(out) == [".preparing"]
