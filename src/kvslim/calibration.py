"""Calibration: what a model's keys and queries look like, per layer, before any prompt is seen; and its file format.

Per layer (kv_heads G, head_dim D): ``query_moment`` (G, D, D) = E[q q^T]; ``key_power`` (G, D) = E[(k - mu)^2] about
the means of 128 consecutive tokens; ``key_mean`` (G, D), the mean of the keys as they came; ``random_mean`` (G, D),
that at random positions. Where rotary positions are understood also ``plain_mean`` (G, D) = E[R_-t k], ``rope_pairs``
and ``rope_frequency``. Files are safetensors with a header.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvslim.errors import InputError

FORMAT = "kvslim-calibration"
VERSION = 1


@dataclass(frozen=True, eq=False)  # one is itself: comparing tensors would say nothing useful
class Calibration:
    """Statistics of one model.

    Attributes
    ----------
    fingerprint : str
        Of the model they were taken on.
    source : str
        ``random ids`` or the name of the text.
    tokens : int
    layers : mapping of int to mapping of str to Tensor
        Layer -> name -> tensor, see the module docstring.
    """

    fingerprint: str
    source: str
    tokens: int
    layers: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the file beside `path` and move it there, so that a crash leaves no half file."""
        path = Path(path)
        tensors = {
            f"{layer}.{name}": tensor.contiguous().cpu()
            for layer, each in self.layers.items()
            for name, tensor in each.items()
        }
        header = {"format": FORMAT, "version": str(VERSION), "fingerprint": self.fingerprint, "source": self.source}
        header["tokens"] = str(self.tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        os.close(descriptor)
        try:
            save_file(tensors, name, metadata=header)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, fingerprint: str | None = None) -> Calibration:
        """Read a file; with `fingerprint`, refuse one that was taken on another model.

        Raises
        ------
        InputError
            Missing, truncated, foreign, of a newer version, or of another model.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no calibration file at {path}; make one with `kvslim calibrate --model M --out FILE`")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise InputError(
                f"{path} cannot be read as safetensors ({error}); make it again with `kvslim calibrate`"
            ) from error
        if header.get("format") != FORMAT:
            raise InputError(f"{path} is not a calibration (format '{header.get('format')}', expected '{FORMAT}')")
        if header.get("version") != str(VERSION):
            raise InputError(f"{path} has version {header.get('version')}, this kvslim reads {VERSION}; update kvslim")
        if fingerprint is not None and header["fingerprint"] != fingerprint:
            raise InputError(
                f"{path} was made for another model (fingerprint {header['fingerprint']}, this model's is "
                f"{fingerprint}); "
                "make one with `kvslim calibrate`"
            )
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            layer, _, key = name.partition(".")
            layers.setdefault(int(layer), {})[key] = tensor
        return cls(header["fingerprint"], header["source"], int(header["tokens"]), layers)
