"""Points of a training run at which something other than the launch takes part.

The session calls every hook and branches on none. A launch uses :class:`RunHooks` itself;
:mod:`megatron_switch.rehearsal` overrides what a single rank without a GPU cannot do.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from megatron_switch.config import SwitchConfig
from megatron_switch.layout.grid import Layout
from megatron_switch.training.preflight.layout import check_model_memory
from megatron_switch.training.preflight.resume import Finished, find_finished

Device = Literal["cuda", "cpu"]


class RunHooks:
    """The hooks of a launch: they change nothing, and check this machine and its checkpoints."""

    def session(self) -> AbstractContextManager[Any]:
        """Return the block around the whole session."""
        return nullcontext()

    def arguments_parsed(self, args: Namespace) -> None:
        """Change parsed arguments, in place, before defaults are filled in."""

    def dispatch_device(self, device: Device) -> Device:
        """Return the device for which ``--switch-dispatch auto`` is resolved.

        Args:
            device: Where the run happens.
        """
        return device

    def settings_resolved(self, args: Namespace, switch: SwitchConfig) -> None:
        """Refuse settings, or change arguments, in place, before Megatron validates them."""

    def arguments_validated(self, args: Namespace) -> None:
        """Change arguments that Megatron has validated, in place."""

    def find_finished(self, args: Namespace) -> Finished | None:
        """Return what ``--load`` names if it has nothing left to train, else None."""
        return find_finished(args)

    def check_memory(self, args: Namespace, layout: Layout, device: Device) -> None:
        """Refuse a model whose weights are larger than the memory of this machine."""
        check_model_memory(
            args, layout, device=device, ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )

    def training(self, args: Namespace, notes: Sequence[str]) -> AbstractContextManager[Any]:
        """Return the block around Megatron's training; process groups exist.

        Args:
            args: Validated arguments.
            notes: What the session printed about the flags.
        """
        return nullcontext()

    def datasets_provider(
        self, args: Namespace, provider: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what provides Megatron with data sets.

        Args:
            args: Validated arguments.
            provider: That of a launch.
        """
        return provider
