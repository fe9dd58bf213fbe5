"""Kernels in two forms: interpreted on the CPU, and compiled for GPUs that are not here."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support.interpreted_kernels import interpreted_kernels


@pytest.fixture
def kernels() -> Iterator[SimpleNamespace]:
    with interpreted_kernels() as modules:
        yield modules


@pytest.fixture
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile now, not from what an earlier run left in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
