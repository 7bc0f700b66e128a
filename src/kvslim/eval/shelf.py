"""A folder of results that can be made again: safetensors by key, the oldest removed when it grows too large."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

FOLDER = Path.home() / ".cache" / "kvslim" / "baselines"
LIMIT_NBYTES = 512 * 2**20


class Shelf:
    """Tensors on disk by key.

    Nothing here may fail an evaluation: what cannot be read counts as absent, what cannot be written is made again.

    Parameters
    ----------
    folder : Path, optional
        By default `FOLDER`.
    limit_nbytes : int, optional
        Least recently used files go when all together are larger.
    """

    def __init__(self, folder: Path | None = None, limit_nbytes: int = LIMIT_NBYTES):
        self.folder, self.limit_nbytes = folder or FOLDER, limit_nbytes

    def load(self, key: str) -> torch.Tensor | None:
        """Return the tensor under `key`, or None if there is none or it is damaged."""
        path = self._path(key)
        try:
            tensor = load_file(path)["data"]
            os.utime(path)
        except (OSError, SafetensorError, KeyError):
            return None
        return tensor

    def save(self, key: str, tensor: torch.Tensor) -> None:
        """Keep `tensor` under `key`; a crash half-way leaves no file of that name."""
        path = self._path(key)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        # a full or read-only disk only costs the next run some time
        with contextlib.suppress(OSError, SafetensorError):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"data": tensor.contiguous()}, draft)
            draft.replace(path)
            self._trim()
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _trim(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > self.limit_nbytes:
                file.unlink(missing_ok=True)
