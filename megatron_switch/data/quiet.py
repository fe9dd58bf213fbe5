"""Silence for what Megatron and torch say about GPUs and ranks while text is prepared.

Preparing uses neither, so advice about them (install Apex, no CUDA runtime, no rank known) would
only hide what matters. Exceptions pass.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_upstream() -> Iterator[None]:
    """Hide warnings inside the block, and torch's log line about a missing CUDA runtime."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
