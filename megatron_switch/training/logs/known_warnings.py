"""Warnings that a sound run produces, and what each of them means.

Megatron, torch and their libraries warn of things that a user of this program can do nothing about.
All of them are in the log, the first of each kind with its sentence from this table. A command
without a log hides them, and shows any other warning.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownWarning:
    """One warning that needs no action."""

    pattern: str
    """Regular expression that is found in the warning."""
    meaning: str
    """Why it may be ignored, or which flag it is about."""


KNOWN_WARNINGS = (
    KnownWarning(
        r"GPTModel IS DEPRECATED",
        "Megatron is moving to another model class. In this version GPTModel is complete, and it "
        "is what trains here.",
    ),
    KnownWarning(
        r"one_logger package is required", "NVIDIA's internal telemetry, which nothing here needs."
    ),
    KnownWarning(
        r"MCore's async save is deprecated",
        "Said by every save. Checkpoints are written synchronously unless --async-save is given.",
    ),
    KnownWarning(r"MimoModelConfig is experimental", "Megatron imports it; it is not used."),
    KnownWarning(
        r"moe_ffn_hidden_size is not set",
        "Experts are as wide as the dense layers: --moe-ffn-hidden-size is --ffn-hidden-size.",
    ),
    KnownWarning(
        r"Could not determine (local )?rank",
        "No launcher started this process, so it is the only rank.",
    ),
    KnownWarning(
        r"torch\.distributed\.\w+` is deprecated",
        "Megatron calls torch by names that newer versions rename; they still work.",
    ),
    KnownWarning(
        r"CPU RNG state changed within GPU RNG context",
        "On the CPU both random states are one; the emulation keeps them apart where it matters.",
    ),
    KnownWarning(
        r"The \.grad attribute of a Tensor that is not a leaf",
        "The distributed optimizer looks whether its slices of parameters have gradients; they "
        "need none.",
    ),
    KnownWarning(
        r"Unable to save \w+ indexes because path_to_cache is None",
        "The shuffled order of the samples is built anew at each start. With --data-cache-path it "
        "is kept.",
    ),
    KnownWarning(
        r"Please specify --split when using --data-path",
        "Without --split, 969 of 1000 documents train, 30 validate and 1 tests.",
    ),
    KnownWarning(
        r"Setting args\.overlap_p2p_comm",
        "Only virtual pipeline stages overlap their communication.",
    ),
    KnownWarning(
        r"torch\.distributed is disabled, unavailable or uninitialized",
        "A checkpoint's arguments are read before the ranks have met.",
    ),
    KnownWarning(
        r"Please use DTensor instead|argument order of load has been changed",
        "Megatron calls torch's checkpoint reader in its older way, which works.",
    ),
    KnownWarning(
        r"Initializing zero-element tensors is a no-op",
        "A layer of width 0, such as shared experts that a model lacks, has no values to draw.",
    ),
)
"""The table, in no particular order; a line is explained by the first entry that matches."""


def find_known_warning(line: str) -> KnownWarning | None:
    """Return the entry that a line of output belongs to; None for any other line."""
    return next((known for known in KNOWN_WARNINGS if re.search(known.pattern, line)), None)


@contextmanager
def known_warnings_hidden() -> Iterator[None]:
    """Leave known warnings out inside the block; a function that it decorates is one."""
    with warnings.catch_warnings():
        for known in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=rf"(?s:.*)(?:{known.pattern})")
        yield
