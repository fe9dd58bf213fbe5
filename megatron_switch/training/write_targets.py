"""Places that a run will write to, tried before it starts.

A checkpoint folder that cannot be written is otherwise found out at the first save, and everything
learnt until then is lost.
"""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

from megatron_switch.errors import ConfigError


def check_write_targets(args: Namespace) -> None:
    """Make the folders that the arguments name, and write a file into each.

    Args:
        args: Arguments, with the run folder's places filled in.

    Raises:
        ConfigError: Naming the flag and what the system says.
    """
    folders = {
        "--switch-run-dir": args.switch_run_dir,
        "--save": args.save,
        "--tensorboard-dir": args.tensorboard_dir,
    }
    for flag, folder in folders.items():
        if folder:
            _try_folder(flag, Path(folder))
    if args.switch_metrics_file:
        file = Path(args.switch_metrics_file)
        if file.is_dir():
            raise ConfigError(f"--switch-metrics-file {file} is a folder. Give a file's name.")
        _try_folder("--switch-metrics-file", file.parent, shown=file)
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(
                f"--switch-metrics-file {file} may not be written. Give another file."
            )


def _try_folder(flag: str, folder: Path, *, shown: Path | None = None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"Nothing can be written to {flag} {shown or folder}: {error.strerror or error}. "
            "Give a place that can be written, with room for what the run leaves there."
        ) from error
