"""Folders and files that a run will write to, tried before it starts.

A checkpoint folder that cannot be written would otherwise fail the first save, and everything
trained until then would be lost. What does not exist yet is tried in the folder that will hold it,
and created only after all other checks: a run that is refused leaves nothing behind.
"""

import errno
import importlib.util
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_switch.errors import ConfigError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_write_targets(args: Namespace) -> None:
    """Write a file into each folder that the arguments name, or into the one that will hold it.

    Args:
        args: Arguments, with the run folder's places filled in.

    Raises:
        ConfigError: Naming the flag and the system's error.
    """
    _check_wandb(args)
    for flag, shown, folder in _targets(args):
        try:
            with tempfile.TemporaryFile(dir=_nearest_existing(folder)):
                pass
        except OSError as error:
            raise _refusal(flag, shown, error) from error
    if args.switch_metrics_file:
        file = Path(args.switch_metrics_file)
        if file.is_dir():
            raise ConfigError(f"--switch-metrics-file {file} is a folder. Give a file's name.")
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(
                f"--switch-metrics-file {file} may not be written. Give another file."
            )


def make_write_targets(args: Namespace) -> None:
    """Make the folders that the arguments name.

    Args:
        args: Arguments, checked by :func:`check_write_targets`.

    Raises:
        ConfigError: Naming the flag and the system's error.
    """
    for flag, shown, folder in _targets(args):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refusal(flag, shown, error) from error


def explain_full_disk(error: OSError, args: Namespace) -> None:
    """Raise ConfigError if a write failed while training because the disk is full.

    A checkpoint that does not fit is explained where it is saved; this is for all else, such as the
    metrics file or the log.

    Args:
        error: What a write raised.
        args: Arguments, with the run folder's places filled in.
    """
    if error.errno in _NO_ROOM:
        places = ", ".join(f"{flag} {shown}" for flag, shown, _ in _targets(args))
        raise ConfigError(
            f"There is no room left for what the run writes: {error}. Free some, or give another "
            f"place ({places or 'TMPDIR'}), and start again: the run continues from its newest "
            "complete checkpoint."
        ) from error


def _targets(args: Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Yield each flag that names a place, the place, and the folder that it needs."""
    folders = {
        "--switch-run-dir": args.switch_run_dir,
        "--save": args.save,
        "--tensorboard-dir": args.tensorboard_dir,
    }
    for flag, folder in folders.items():
        if folder:
            yield flag, Path(folder), Path(folder)
    if args.switch_metrics_file:
        file = Path(args.switch_metrics_file)
        yield "--switch-metrics-file", file, file.parent


def _check_wandb(args: Namespace) -> None:
    """Refuse a W&B run that cannot be opened when training starts."""
    if not args.wandb_project:
        return
    flag = f"--wandb-project {args.wandb_project}"
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"{flag} needs the package wandb, which is not installed. Install it (pip install "
            "wandb), or leave the flag out."
        )
    if not args.wandb_exp_name:
        raise ConfigError(f"{flag} needs a name for this run. Add --wandb-exp-name.")
    if not (args.wandb_save_dir or args.save):
        raise ConfigError(
            f"{flag} needs a folder for what W&B keeps here. Add --wandb-save-dir, --save or "
            "--switch-run-dir."
        )


def _nearest_existing(folder: Path) -> Path:
    """Return ``folder``, or the first of the folders above it that is there."""
    whole = Path(os.path.abspath(folder))
    return next(each for each in (whole, *whole.parents) if each.exists())


def _refusal(flag: str, shown: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Nothing can be written to {flag} {shown}: {error.strerror or error}. "
        "Give a place that can be written and has free space."
    )
