"""A reader of the name sees the old text or the new one."""

import pytest

from megatron_switch.utils.atomic_file import renamed_into_place


def test_the_text_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "file.txt"
    with renamed_into_place(path) as stream:
        stream.write("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def test_the_old_text_stays_when_writing_fails(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"):
        _write_half(path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def _write_half(path):
    with renamed_into_place(path) as stream:
        stream.write("half")
        stream.flush()
        assert path.read_text() == "old"
        raise RuntimeError("half way")


def test_the_file_may_be_read_by_whom_the_umask_lets(tmp_path):
    plain, renamed = tmp_path / "plain", tmp_path / "renamed"
    plain.write_text("")
    with renamed_into_place(renamed):
        pass
    assert renamed.stat().st_mode == plain.stat().st_mode
