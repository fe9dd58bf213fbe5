"""Refuse objects of a checkpoint that are no plain data, before they are unpickled.

Beside its tensors a checkpoint holds pickled objects: states of random generators, and what layers
keep. Unpickling runs whatever a file names. torch knows the types that run nothing, and Megatron
adds its own (``megatron.core.safe_globals``); with these alone an object is read here, or refused.
"""

import pickle
import re
from typing import IO

import torch

from megatron_switch.errors import CheckpointError


def check_types(stream: IO[bytes], name: str) -> None:
    """Raise unless a stored object consists of known types; the stream is at its start afterwards.

    Args:
        stream: What ``torch.save`` wrote.
        name: The object's key in the checkpoint.

    Raises:
        CheckpointError: It names something else; nothing of it was executed.
    """
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} of the checkpoint is no plain data, and was not loaded: {_reason(error)}. "
            "Loading it could run code. Do not use this checkpoint unless you know who wrote it; "
            "--no-load-rng leaves out states of random generators."
        ) from error
    stream.seek(0)


def _reason(error: Exception) -> str:
    """Return what torch found, without its advice to load it nevertheless."""
    found = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
    return f"it names {found[1]}" if found else str(error).splitlines()[-1]
