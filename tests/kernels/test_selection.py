"""Which kernels run, and what is said where they cannot."""

import importlib.util
import shutil

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.kernels.selection import select_kernels, triton_problem


@pytest.mark.parametrize(
    ("choice", "device_type", "problem", "expected"),
    [
        ("auto", "cuda", None, "triton"),
        ("auto", "cuda", "Triton is not installed", "torch"),
        ("auto", "cpu", None, "torch"),
        ("triton", "cuda", None, "triton"),
        ("torch", "cuda", None, "torch"),
        ("torch", "cpu", "Triton is not installed", "torch"),
    ],
)
def test_the_choice_is_a_function_of_device_and_environment(choice, device_type, problem, expected):
    assert select_kernels(choice, device_type=device_type, problem=problem) == expected


@pytest.mark.parametrize(
    ("device_type", "problem", "said"),
    [
        ("cuda", "there is no C compiler", "there is no C compiler"),
        ("cpu", None, "the device is 'cpu'"),
    ],
)
def test_triton_asked_for_where_it_cannot_run_is_an_error(device_type, problem, said):
    with pytest.raises(ConfigError, match=f"--switch-kernels triton needs .* but {said}.* torch"):
        select_kernels("triton", device_type=device_type, problem=problem)


def test_an_unknown_choice_is_an_error():
    with pytest.raises(ConfigError, match=r"--switch-kernels must be .*, got 'cuda'"):
        select_kernels("cuda", device_type="cuda", problem=None)


def test_triton_has_no_problem_where_a_compiler_is(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    assert triton_problem() is None


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_problem() == "Triton is not installed (pip install triton)"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in triton_problem()
    monkeypatch.setenv("CC", "icx")
    assert triton_problem() == "CC=icx does not exist"
