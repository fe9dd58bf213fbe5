"""Write a file atomically.

The text goes to a temporary file in the same folder, is flushed to the disk, and is then renamed
over the old one. A reader finds the old content or the new one, never a mixture and never nothing,
also after a crash of the process or the machine.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def renamed_into_place(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Yield a text file that becomes ``path`` when the block ends without an exception.

    Args:
        path: File to create or replace. Its folder must exist.

    Raises:
        OSError: The folder cannot be written.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", text=True)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files for the owner only; a file written in place would obey the umask.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Write a text that replaces what was at ``path``, as :func:`renamed_into_place` does."""
    with renamed_into_place(path) as file:
        file.write(text)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
