"""``make ... PYTHON=python`` says what a container lacks, and how to add it without its torch."""

import importlib.metadata as metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_environment.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_environment", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool, monkeypatch, capsys):
    def main(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_environment.py", *arguments])
        return tool.main(), capsys.readouterr().out

    return main


def installed(monkeypatch, versions: dict[str, str | None]) -> None:
    """Let distributions appear in another version, or not at all."""
    real = metadata.version

    def version(name: str) -> str:
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_the_environment_of_the_tests_lacks_nothing(run):
    assert run("test") == (0, "")


def test_a_vendors_pre_release_of_torch_will_do(run, monkeypatch):
    installed(monkeypatch, {"torch": "2.11.0a0+vendor"})
    assert run() == (0, "")


def test_another_megatron_is_named_and_torch_is_kept(run, monkeypatch):
    installed(monkeypatch, {"megatron-core": "0.18.0", "torch": "2.12.0"})
    code, said = run()
    assert code == 1
    assert "lacks, or has in another version:\n  megatron-core==0.19.2\n" in said
    assert "pip install 'torch==2.12.0' 'megatron-core==0.19.2'\n" in said


def test_a_package_under_another_name_counts_when_it_imports(run, monkeypatch):
    installed(monkeypatch, {"triton": None})  # what is there is called pytorch-triton, say
    assert run() == (0, "")


def test_no_torch_is_said_first(run, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    code, said = run()
    assert code == 1
    assert "has no torch" in said
    assert "leave PYTHON=... out" in said
