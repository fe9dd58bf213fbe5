"""What this package takes from Megatron-Core beyond its public interface."""

from importlib.metadata import version

from megatron_switch.errors import UpstreamError

SUPPORTED_VERSION = "0.19.2"


def check_version() -> None:
    """Raise UpstreamError unless the Megatron-Core that is installed was checked against."""
    found = version("megatron-core")
    if found.split("+")[0] != SUPPORTED_VERSION:
        raise UpstreamError(
            f"megatron-switch is checked against megatron-core {SUPPORTED_VERSION}, but {found} is "
            f"installed. Run 'pip install megatron-core=={SUPPORTED_VERSION}'."
        )
