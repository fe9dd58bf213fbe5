"""The tour names every room, and every path that a page names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_switch"
TOUR = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/semantics.md")
PATH = re.compile(r"`([a-z_]+/[\w/]*(?:\.(?:py|json|md|sh))?)`")
FOREIGN = (
    "transformer/",
    "architectures/moe",
    "moe/sharded_moe.py",
)  # of Mesh-TensorFlow, Flaxformer and Megatron


def folders() -> list[Path]:
    found = (path.parent for path in PACKAGE.rglob("__init__.py"))
    return sorted(path for path in found if path != PACKAGE)


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_tour_names_every_room(folder):
    room, *inner = folder.relative_to(PACKAGE).parts
    (line,) = re.findall(rf"^\| `megatron_switch/{room}/` \|.*$", TOUR, flags=re.MULTILINE)
    assert all(f"*{name}*" in line for name in inner)


def test_the_tour_names_every_module_beside_the_rooms():
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules == set(
        re.findall(r"^\| `megatron_switch/(\w+\.py)` \|", TOUR, flags=re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {path for path in PATH.findall(text) if not path.startswith(FOREIGN)}
    assert [
        path for path in named if not any((base / path).exists() for base in (ROOT, PACKAGE))
    ] == []
