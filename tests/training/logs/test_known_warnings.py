"""A command without a log shows the warnings that it does not know, and only those."""

import warnings

import pytest

from megatron_switch.training.logs.known_warnings import known_warnings_hidden


@known_warnings_hidden()
def warn():
    warnings.warn("Could not determine rank from torch.distributed, RANK", stacklevel=1)
    warnings.warn("torch.distributed is disabled, unavailable or uninitialized", stacklevel=1)
    warnings.warn("first line\nPlease use DTensor instead", FutureWarning, stacklevel=1)
    warnings.warn("The disk is about to fail", stacklevel=1)


def test_known_warnings_are_left_out_and_others_are_not():
    with pytest.warns(UserWarning, match="The disk is about to fail") as seen:
        warn()
    assert len(seen) == 1


def test_outside_of_the_block_nothing_is_hidden():
    warn_again = "Could not determine rank from torch.distributed"
    with known_warnings_hidden():
        pass
    with pytest.warns(UserWarning, match=warn_again):
        warnings.warn(warn_again, stacklevel=1)
