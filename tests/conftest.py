"""What holds for every test: one thread, the same seed, no network, and the slow ones last."""

import functools
import gc
import inspect
import os
import signal

# Before torch is imported, here or in a process that a test starts: tests run side by side, and
# two threads on two busy cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# nohup lets its command ignore this signal, and what tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # until all tests are imported: nothing of that is garbage

# Autograd counts devices at its first backward pass, and with any but the CPU it starts threads,
# after which no rank can be forked. A FakeTensorMode makes torch count a CUDA device that is not
# there, so the first pass must come before.
torch.ones((), requires_grad=True).backward()

# Megatron's parser reads the sources of its settings whenever it is built, which takes 0.2 s and
# happens hundreds of times.
inspect.getsource = functools.cache(inspect.getsource)

pytest_plugins = ["support.training_fixtures"]
SLOW_MARKERS = ("slow", "torchrun")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that take long behind all others, so that a plain mistake shows in seconds."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in SLOW_MARKERS))


def pytest_collection_finish() -> None:
    """Start collecting garbage, but walk nothing that was imported: forked ranks share it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_start_for_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    # What a launcher sets must not leak in from the shell that runs the tests (a SLURM job).
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
