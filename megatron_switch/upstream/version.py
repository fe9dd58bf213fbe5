"""The release of Megatron-Core that this package was checked against, and nothing else.

Everything here that reaches into Megatron was written and tested with one release. Another
one may work, or train wrong without saying so, and that is not left to chance. What the
package takes from that release is listed by ``tests/upstream/test_contract.py``, which
reads the imports and calls of every module.
"""

from importlib.metadata import PackageNotFoundError, version

from megatron_switch.errors import UpstreamError

SUPPORTED_VERSION = "0.19.2"


def check_version() -> None:
    """Refuse any Megatron-Core but the supported release.

    A local build of that release (``0.19.2+cluster``) is accepted.

    Raises:
        UpstreamError: Another version is installed, or none.
    """
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = "no version"
    if found.partition("+")[0] != SUPPORTED_VERSION:
        raise UpstreamError(
            f"megatron-switch is checked against megatron-core {SUPPORTED_VERSION}, but {found} is "
            f"installed. Run 'pip install megatron-core=={SUPPORTED_VERSION}'."
        )
