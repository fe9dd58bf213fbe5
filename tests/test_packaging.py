"""What pip installs can do all that a checkout can: code, examples, templates, commands.

The wheel is built from a copy of the checkout, installed into an empty folder, and used from
there. The build back end is called directly, as pip would, but without a network.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import megatron_switch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_switch"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
COMPILED = shutil.ignore_patterns("__pycache__", "*.pyc")


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` from a source tree; return the archive."""
    target.mkdir()
    program = f"import setuptools.build_meta as b; print(b.build_{kind}({str(target)!r}))"
    run([sys.executable, "-c", program], cwd=source)
    (archive,) = target.iterdir()
    return archive


def run(command: list[str], cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from, so that nothing is left in the checkout or taken from it."""
    tree = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, tree / name)
    for folder in (PACKAGE, "examples"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=COMPILED)
    return tree


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("dist") / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel)], cwd=folder)
    return folder


def test_wheel_holds_all_of_the_package_and_nothing_else(wheel):
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".md"}
    }
    expected |= {
        f"{PACKAGE}/{path.relative_to(ROOT)}"
        for path in (ROOT / "examples").rglob("*")
        if path.is_file()
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert f"{PACKAGE}/py.typed" in names


def test_metadata_comes_from_one_place(wheel):
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["Version"] == megatron_switch.__version__
    assert "version" not in project
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.12"
    assert "megatron-core==0.19.2" in metadata.get_all("Requires-Dist")
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert {f"{folder}/licenses/LICENSE", f"{folder}/licenses/NOTICE"} <= set(archive.namelist())
    entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    assert "megatron-switch = megatron_switch.cli:main" in entry_points


def test_the_newest_release_of_the_changelog_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == megatron_switch.__version__


@pytest.mark.slow
def test_a_source_archive_builds_the_same_wheel(source, wheel, tmp_path):
    archive = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_constraints_hold_names_and_versions_only():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.+]*", line)] == []
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["dev"], *extras["bench"]]
    named = {re.split(r"[<>=\[ ]", name)[0].replace(".", "-") for name in wanted}
    assert named - {"megatron-switch"} <= set(names)


def test_commands_answer_from_an_installed_wheel(installed, tmp_path):
    where = "import megatron_switch; print(megatron_switch.__file__)"
    path = run([sys.executable, "-c", where], cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(path.strip()).is_relative_to(installed)

    module = [sys.executable, "-m", PACKAGE]
    script = [sys.executable, str(installed / "bin" / "megatron-switch")]
    by_module = run([*module, "--help"], cwd=tmp_path, PYTHONPATH=str(installed))
    by_script = run([*script, "--help"], cwd=tmp_path, PYTHONPATH=str(installed))
    assert "train" in by_module
    assert by_module == by_script
    version = run([*module, "--version"], cwd=tmp_path, PYTHONPATH=str(installed))
    assert megatron_switch.__version__ in version


TINY_RUN = """
    --switch-device cpu --num-experts 4 --num-layers 2 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4
    --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --num-workers 0 --eval-iters 0 --log-interval 1
"""


@pytest.mark.slow
def test_an_installed_wheel_trains(installed, tmp_path):
    command = [sys.executable, "-m", PACKAGE, "train", *TINY_RUN.split()]
    metrics = tmp_path / "metrics.jsonl"
    run(
        [*command, "--switch-metrics-file", str(metrics)],
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    _, *records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())  # its start
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert all(0.0 < record["lm_loss"] < 10.0 for record in records)
