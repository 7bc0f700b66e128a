"""Calibration: what a model's keys and queries look like, per layer, before any prompt is seen; and its file format.

Per layer (kv_heads G, head_dim D): ``query_moment`` (G, D, D) = E[q q^T]; ``key_power`` (G, D) = E[(k - mu)^2] about
the means of 128 consecutive tokens; ``key_mean`` (G, D), the mean of the keys as they came; ``random_mean`` (G, D),
that at random positions. Where rotary positions are understood also ``plain_mean`` (G, D) = E[R_-t k], ``rope_pairs``
and ``rope_frequency``. Files are safetensors with a header (docs/files.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvslim.errors import InputError, StateFileError
from kvslim.files import Contents, Kind, Lazy, write
from kvslim.header import Fields

KIND = Kind("kvslim-calibration", 2, "calibration", "make one with `kvslim calibrate`")
_MEANS = ("key_power", "key_mean", "random_mean", "plain_mean")  # one vector per kv head
_FORMS = {  # of the rest: shape and dtype
    "query_moment": ((-1, -1, -1), torch.float32),
    "rope_pairs": ((2, -1), torch.int64),
    "rope_frequency": ((-1,), torch.float64),
}
_ROPE = {"plain_mean", "rope_pairs", "rope_frequency"}  # read together


@dataclass(frozen=True, eq=False)  # one is itself: see `same_as`
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

    def same_as(self, other: Calibration) -> bool:
        """Whether all statistics are the same, bit for bit."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, named ``layer.name``, on the CPU."""
        return {f"{layer}.{name}": tensor.cpu() for layer, each in self.layers.items() for name, tensor in each.items()}

    def facts(self) -> dict[str, Any]:
        """Everything else, JSON-able."""
        return {"fingerprint": self.fingerprint, "source": self.source, "tokens": self.tokens}

    def save(self, path: str | Path) -> None:
        """Write a file, whole or not at all; raises StateFileError."""
        write(path, KIND, self.facts(), {name: Lazy.of(tensor) for name, tensor in self.tensors().items()})

    @classmethod
    def load(cls, path: str | Path, fingerprint: str | None = None) -> Calibration:
        """Read a file; with `fingerprint`, refuse one that was taken on another model.

        Raises
        ------
        StateFileError
            Missing, damaged, foreign, of another version, or of another model.
        """
        contents = Contents(path, KIND)
        found = cls.read(contents, contents.header, "")
        contents.finish()
        if fingerprint is not None and found.fingerprint != fingerprint:
            raise StateFileError(
                f"{path} was made for another model (fingerprint {found.fingerprint}, this model's is {fingerprint}); "
                f"{KIND.again}"
            )
        return found

    @classmethod
    def read(cls, contents: Contents, facts: Fields, prefix: str) -> Calibration:
        """Take a calibration out of a file in which its tensors' names begin with `prefix`."""
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for full in contents.named(prefix):
            layer, _, name = full.removeprefix(prefix).partition(".")
            if layer.isdecimal() and len(layer) < 6:
                layers.setdefault(int(layer), {})[name] = _take(contents, full, name)
        for index, tensors in layers.items():
            _check_layer(f"{contents.path}: layer {index}", tensors)
        return cls(facts.text("fingerprint"), facts.text("source"), facts.integer("tokens"), layers)


def check_fit(tensors: Mapping[str, torch.Tensor], kv_heads: int, head_dim: int) -> None:
    """Raise InputError where a layer's statistics are of other sizes than its keys."""
    for name in {"query_moment", *_MEANS} & tensors.keys():
        if tensors[name].shape[:2] != (kv_heads, head_dim):
            raise InputError(
                f"{name} of the calibration is {tuple(tensors[name].shape)}, the keys have {kv_heads} kv heads of "
                f"{head_dim}; {KIND.again}"
            )


def _take(contents: Contents, full: str, name: str) -> torch.Tensor:
    shape, dtype = _FORMS.get(name, ((-1, -1), torch.float32))
    return contents.take_finite(full, shape, dtype)


def _check_layer(where: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse names that are not known, and sizes and channels that do not fit each other."""
    unknown = tensors.keys() - {*_MEANS, *_FORMS}
    rope = _ROPE & tensors.keys()
    shapes = {tuple(tensors[name].shape) for name in _MEANS if name in tensors}
    moment = tensors.get("query_moment")
    if moment is not None:
        shapes |= {tuple(moment.shape[:2]), (moment.shape[0], moment.shape[2])}
    if unknown or len(shapes) > 1 or rope not in (set(), {"plain_mean"}, _ROPE):
        raise StateFileError(
            f"{where} has {sorted(tensors)} of shapes {sorted(shapes)}, which do not fit; {KIND.again}"
        )
    if rope == _ROPE:
        check_rope(where, tensors["rope_pairs"], tensors["rope_frequency"], tensors["plain_mean"].shape[-1])


def check_rope(where: str, pairs: torch.Tensor, frequency: torch.Tensor, head_dim: int) -> None:
    """Refuse rotary pairs that are not pairs of different channels below `head_dim`, one for each frequency."""
    channels = pairs.flatten()
    inside = not len(channels) or 0 <= int(channels.min()) <= int(channels.max()) < head_dim
    if pairs.shape != (2, len(frequency)) or not inside or len(channels.unique()) != len(channels):
        raise StateFileError(f"{where}: rope_pairs are no pairs of different channels below {head_dim}; {KIND.again}")
