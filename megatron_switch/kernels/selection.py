"""Which implementation a Switch layer runs: the Triton kernels of this room, or plain torch.

The decision is a function of values, taken once when a run starts, so that it can be printed. This
file imports neither torch nor Triton.
"""

import importlib.util
import os
import shutil
from typing import Literal

from megatron_switch.errors import ConfigError

Kernels = Literal["triton", "torch"]


def select_kernels(
    choice: Literal["auto", "triton", "torch"], *, device_type: str, problem: str | None
) -> Kernels:
    """Return the implementation to use.

    Args:
        choice: Value of ``--switch-kernels``. ``auto`` is Triton on CUDA devices where it works.
        device_type: Where the model's tensors are: ``cuda`` or ``cpu``.
        problem: From :func:`triton_problem`.

    Returns:
        ``triton`` or ``torch``.

    Raises:
        ConfigError: If ``choice`` is unknown, or is ``triton`` where its kernels cannot run.
    """
    if choice not in ("auto", "triton", "torch"):
        raise ConfigError(f"--switch-kernels must be 'auto', 'triton' or 'torch', got {choice!r}.")
    if choice == "torch":
        return "torch"
    if device_type != "cuda":
        problem = f"the device is {device_type!r}"
    if problem is None:
        return "triton"
    if choice == "triton":
        raise ConfigError(
            f"--switch-kernels triton needs a CUDA device, Triton and a C compiler, but {problem}. "
            "Correct that, or use --switch-kernels auto or torch."
        )
    return "torch"


def triton_problem() -> str | None:
    """Return why Triton cannot compile kernels in this environment, or None if it can.

    Triton builds a small C module before its first launch, so a missing compiler would stop a run
    in its first step.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("CC"):
        return None if shutil.which(os.environ["CC"]) else f"CC={os.environ['CC']} does not exist"
    if not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler on the PATH (install gcc or clang, or set CC)"
    return None
