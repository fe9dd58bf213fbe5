"""Files are found in one order, each once, and what cannot be used is said at once."""

import argparse
from pathlib import Path

import pytest

from megatron_switch.data.preparation.corpus import (
    find_corpus,
    first_of,
    library_root,
    standard_library,
)
from megatron_switch.errors import ConfigError, DataError


def names(corpus, root):
    return [str(source.path.relative_to(root)) for source in corpus.files]


def test_a_folder_is_sorted_and_empty_files_are_counted(folder):
    corpus = find_corpus([folder])
    assert names(corpus, folder) == ["a.txt", "b/c.md", "b/d.py"]
    assert corpus.empty == 1
    assert corpus.faults == ()


def test_inputs_keep_their_order_and_a_file_counts_once(folder):
    link = folder / "b" / "again.txt"
    link.symlink_to(folder / "a.txt")
    corpus = find_corpus([folder / "b" / "d.py", folder, folder / "a.txt"])
    assert names(corpus, folder) == ["b/d.py", "a.txt", "b/c.md"]


def test_hidden_names_other_formats_and_the_output_are_passed_over(folder):
    for name in (".hidden.txt", "picture.png", ".git/config.txt", "out/corpus.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("text")
    corpus = find_corpus([folder], leave_out=folder / "out")
    assert names(corpus, folder) == ["a.txt", "b/c.md", "b/d.py"]


def test_without_input_there_is_nothing_to_prepare():
    with pytest.raises(ConfigError, match=r"no text to prepare: name files .* give --stdlib"):
        find_corpus([])


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(DataError, match=r"Input .*/gone\.txt does not exist"):
        find_corpus([tmp_path / "gone.txt"])


def test_a_name_without_a_format_is_refused(tmp_path):
    (tmp_path / "text.rst").write_text("text")
    with pytest.raises(DataError, match=r"text\.rst does not say .* must end in \.txt \.md \.py"):
        find_corpus([tmp_path / "text.rst"])


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"Folder .* holds no file named \.txt \.md"):
        find_corpus([tmp_path])


def test_an_unreadable_folder_is_named(folder, monkeypatch):
    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"Folder .*text cannot be read \(Permission denied\)"):
        find_corpus([folder])


def test_an_empty_file_that_was_named_is_refused(folder):
    with pytest.raises(DataError, match=r"1 input file cannot be used: .*empty\.txt is empty"):
        find_corpus([folder / "empty.txt", folder])


def test_a_folder_of_empty_files_holds_no_text(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"no text in the input\. Its 1 files are empty"):
        find_corpus([tmp_path])


def test_bad_files_are_listed_together_or_left_out(folder):
    (folder / "binary.txt").write_bytes(b"\x7fELF\0")
    (folder / "latin.txt").write_bytes(b"\xe9t\xe9")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "loop").symlink_to(folder / "loop")  # of no known name, so passed over
    pattern = (
        r"4 input files cannot be used: .*dangling\.txt cannot be read \(No such file .*\); "
        r".*loop\.txt cannot be read \(Too many levels .*\); "
        r".*binary\.txt is not text: it holds NUL bytes; .*latin\.txt is not UTF-8 text: byte 0 is "
        r"0xe9\. Fix or remove .* give --skip-bad-input"
    )
    with pytest.raises(DataError, match=pattern):
        find_corpus([folder])
    corpus = find_corpus([folder], skip_bad=True)
    assert names(corpus, folder) == ["a.txt", "b/c.md", "b/d.py"]
    assert len(corpus.faults) == corpus.by_flag == 4


def test_a_parquet_file_without_the_key_is_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["text"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no column 'text' \(--text-key\)"):
        find_corpus([tmp_path])
    assert len(find_corpus([tmp_path], text_key="body").files) == 1


def test_only_bad_files_are_no_corpus(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"There is no text in the input\. .*NUL bytes"):
        find_corpus([tmp_path], skip_bad=True)


def test_only_the_first_few_of_many_faults_are_shown():
    assert first_of(["a", "b"]) == "a; b"
    assert first_of([str(number) for number in range(8)]) == "0; 1; 2; 3; 4; and 3 more"


def test_a_library_gives_sources_without_packages_and_tests(tmp_path):
    for name in ("z.py", "json/a.py", "site-packages/x.py", "test/t.py", "json/data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9")
    (tmp_path / "nothing.py").touch()
    corpus = find_corpus([], library=tmp_path)
    assert names(corpus, tmp_path) == ["json/a.py", "z.py"]
    assert corpus.empty == 1
    assert "latin.py is not UTF-8" in corpus.faults[0]  # left out without asking
    assert corpus.by_flag == 0
    with_tests = find_corpus([], library=tmp_path, library_tests=True)
    assert names(with_tests, tmp_path) == ["json/a.py", "test/t.py", "z.py"]


def test_the_running_python_has_its_library():
    paths = standard_library(library_root())
    assert Path(argparse.__file__) in paths
    assert len(paths) > 100
    assert paths == sorted(paths, key=lambda path: path.parts)


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"comes without its sources, so --stdlib has nothing"):
        find_corpus([], library=tmp_path)
