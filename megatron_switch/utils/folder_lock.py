"""One process at a time writes into a folder.

The lock is on a file ``.lock`` inside of it and ends with the process, however that ends. A file
system without locks gives none, and that is no error.
"""

import errno
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_switch.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP)  # what some network file systems answer


class FolderLock:
    """The lock of one folder.

    Args:
        folder: The folder; it need not exist yet.
        flag: The flag that names it, for messages.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        self._folder = folder
        self._flag = flag
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Lock the folder, if it exists, until this process ends.

        Raises:
            ConfigError: Another process writes into it.
        """
        if self._lock is not None or not self._folder.exists():
            return
        self._lock = FileLock(self._folder / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"Another process is training in {self._flag} {self._folder}, and two would write "
                "over each other's checkpoints. Wait for it, or give another folder."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def release(self) -> None:
        """Give the lock back before the process ends."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
