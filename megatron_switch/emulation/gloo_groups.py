"""gloo groups of one rank, all on the same transport device.

torch gives every gloo group a device of its own, and each device a thread that wakes every 10 ms.
Megatron makes dozens of groups a rank, size one included: eight ranks on two cores then lose a
fifth of their time to threads that find nothing to do. A device serves any number of groups.
"""

from datetime import timedelta
from typing import Any


class GroupsOnOneDevice:
    """Stands for ``torch.distributed.ProcessGroupGloo`` where torch makes groups."""

    def __init__(self, original: Any) -> None:
        """Begin without a device.

        Args:
            original: The class that groups are instances of.
        """
        self._original = original
        self._device: Any = None

    def __call__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any
    ) -> Any:
        """Make a group.

        Args:
            store: Where its ranks meet.
            rank: This rank's place in it.
            size: Its ranks.
            timeout: How long a collective may take.
            **settings: Further options of this version of torch.
        """
        if self._device is None:  # not earlier: its thread does not survive a fork
            self._device = self._original.create_default_device()
        options = self._original._Options()
        options._devices = [self._device]
        options._timeout = timeout
        for name, value in settings.items():
            setattr(options, name, value)
        return self._original(store, rank, size, options)

    def __instancecheck__(self, instance: object) -> bool:
        """Say whether a group is gloo's, as the class does."""
        return isinstance(instance, self._original)

    def __getattr__(self, name: str) -> Any:
        """Return what the class has under that name."""
        return getattr(self._original, name)
