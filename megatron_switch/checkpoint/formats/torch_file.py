"""Files of tensors that ``torch.save`` wrote (``pytorch_model.bin``): read, and never executed.

torch reads them with ``weights_only``, mapped into memory where their format allows it. Since
torch 1.6 they are zip archives with a checksum of every tensor, which is compared before the first
tensor is given out.
"""

import re
import zipfile
import zlib
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_switch.checkpoint.formats.tensor_source import Region, TensorInfo
from megatron_switch.errors import CheckpointError


class TorchFile:
    """A file written by torch: mapped into memory where its format allows it, never executed."""

    def __init__(self, path: Path) -> None:
        """Map the file, or read it.

        Raises:
            CheckpointError: It is damaged, or holds more than tensors by name.
        """
        self._path = path
        self._checked = False
        self._lock = Lock()
        try:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            values = _load_old(path)
        except Exception as error:
            raise _unsafe(path, error) from error
        if not isinstance(values, dict) or not all(
            isinstance(name, str) and _is_plain(value) for name, value in values.items()
        ):
            raise CheckpointError(
                f"{path} is expected to hold dense tensors by name, and nothing else."
            )
        self._values: dict[str, Tensor] = values
        self.tensors = {
            key: TensorInfo(tuple(value.shape), value.dtype, path) for key, value in values.items()
        }

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it; see :class:`TensorSource`.

        Raises:
            CheckpointError: Bytes of the file are not those that torch wrote.
        """
        with self._lock:  # once, by the first of several threads
            if not self._checked:
                _check_sums(self._path)
            self._checked = True
        value = self._values[key]
        if region is not None:
            value = value[region.slices_in(Region.whole(value.shape))]
        return value.clone(memory_format=torch.contiguous_format)


def _is_plain(value: Any) -> bool:
    """Whether something is a tensor with a number for each of its elements."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _load_old(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _unsafe(path, error) from error


def _unsafe(path: Path, error: Exception) -> CheckpointError:
    # torch's message advises to let the file execute its code; only its finding is passed on.
    found = re.search(r"Unsupported [^\n.]+|GLOBAL \S+", str(error))
    reason = found[0] if found else (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{path} cannot be read as plain tensors ({reason}). Nothing in it was executed. Copy it "
        "again if it is damaged; if it holds more than tensors and you know who wrote it, save it "
        "as safetensors first."
    )


def _check_sums(path: Path) -> None:
    """Compare a file with its own checksums, which torch itself never reads.

    A file of the format before torch 1.6 has none, and neither has one that was saved after
    ``torch.serialization.set_crc32_options(False)``: all of them are 0 then.

    Raises:
        CheckpointError: Naming the record that differs.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            has_sums = any(record.CRC for record in file.infolist())
            damaged = file.testzip() if has_sums else None
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: its checksum of {damaged} is another one. Copy or download it "
            "again."
        )
