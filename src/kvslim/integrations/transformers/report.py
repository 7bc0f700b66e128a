"""Report: what a cache applied, and what it holds, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.attention.dispatch import explain
from kvslim.cache import LayerCache
from kvslim.kernels import encode
from kvslim.layout import bits_per_value
from kvslim.recipe import Recipe
from kvslim.store.layer import LayerStore


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes
    ----------
    layer : int
    packed : bool
    reason : str
        Why it is not packed, or the key and value sides it is packed with.
    values : int
        Numbers that a plain cache would hold for the tokens present (K and V, padding left out).
    values_in_blocks : int
        Those of them that are in sealed blocks.
    nbytes_blocks : float
        Bytes that the layout takes for them.
    kernel, kernel_reason : str
        What reads a packed layer, and why it is that.
    encoders : tuple of str
        What packs its keys and its values, with the reason where that is the reference; empty before the first seal.
    """

    layer: int
    packed: bool
    reason: str
    values: int
    values_in_blocks: int = 0
    nbytes_blocks: float = 0.0
    kernel: str = ""
    kernel_reason: str = ""
    encoders: tuple[str, ...] = ()

    @classmethod
    def of_packed(cls, index: int, core: LayerCache) -> LayerReport:
        """Describe a packed layer."""
        key, value = core.recipe.sides(index)
        sides = f"k={key} v={value}"
        store = core.store
        if store is None:
            return cls(index, True, sides, 0)
        width = store.kv_heads * sum(store.head_dims)
        packed = sum(row.packed for row in store.rows)
        nbytes = sum(
            packed * store.kv_heads * dim * bits_per_value(packer.layout) / 8
            for packer, dim in zip(store.packers, store.head_dims, strict=True)
        )
        tokens = sum(row.tokens for row in store.rows)
        return cls(index, True, sides, tokens * width, packed * width, nbytes, *explain(store), _encoders(store))

    @classmethod
    def of_dense(cls, index: int, layer: Any, reason: str) -> LayerReport:
        """Describe a layer that transformers keeps."""
        states = [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]
        return cls(index, False, reason, sum(t.numel() for t in states))


@dataclass(frozen=True)
class Report:
    """What a cache holds. ``str(report)`` is for people, `to_dict` for programs.

    Attributes
    ----------
    recipe, label : str
    layers_packed, layers_total : int
    nbytes : int
        Every storage reachable from the cache: blocks, exact tokens, parameters, layers left to transformers.
    nbytes_16bit : int
        The same tokens at 16 bits per value.
    bits_per_value : float
        ``8 * nbytes / values``: everything held.
    bits_per_value_packed : float
        Of the tokens in sealed blocks alone, all parts of the block.
    peak_nbytes : int
        Most bytes held at once, the chunk of the layer at work included.
    calibration_nbytes : int
        Statistics that belong to the model and serve all its caches; not part of the above.
    kernel, kernel_reason : str
        What reads the packed bytes, and why it is that; several where layers differ.
    layers : tuple of LayerReport
    """

    recipe: str
    label: str
    layers_packed: int
    layers_total: int
    nbytes: int
    nbytes_16bit: int
    bits_per_value: float
    bits_per_value_packed: float
    peak_nbytes: int
    calibration_nbytes: int
    kernel: str
    kernel_reason: str
    layers: tuple[LayerReport, ...]

    @classmethod
    def of(cls, recipe: Recipe, layers: list[LayerReport], nbytes: int, peak: int, calibration: int) -> Report:
        """Sum up the layers."""
        kernels = {layer.kernel: layer.kernel_reason for layer in layers if layer.kernel}
        return cls(
            recipe=str(recipe),
            label=recipe.label or str(recipe),
            layers_packed=sum(layer.packed for layer in layers),
            layers_total=len(layers),
            nbytes=nbytes,
            **bits_held(layers, nbytes),
            peak_nbytes=peak,
            calibration_nbytes=calibration,
            kernel=", ".join(kernels) or "none yet",
            kernel_reason="; ".join(dict.fromkeys(reason for reason in kernels.values() if reason)),
            layers=tuple(layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys with their units."""
        return asdict(self)

    def __str__(self) -> str:
        bits = f"{self.bits_per_value:.2f} bits per value with everything ({self.bits_per_value_packed:.2f}"
        lines = [
            f"recipe         {self.label}",
            f"layers packed  {self.layers_packed} of {self.layers_total}",
            f"held           {_size(self.nbytes)}, {bits} in sealed blocks)",
            f"at 16 bits     {_size(self.nbytes_16bit)}",
            f"peak           {_size(self.peak_nbytes)}",
            f"kernel         {self.kernel}" + (f" ({self.kernel_reason})" if self.kernel_reason else ""),
        ]
        encoders = dict.fromkeys(text for layer in self.layers for text in layer.encoders)
        if encoders:
            lines.append(f"packed by      {'; '.join(encoders)}")
        if self.calibration_nbytes:
            lines.append(f"calibration    {_size(self.calibration_nbytes)} more, once per model, for all its caches")
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if not layer.packed:
                reasons.setdefault(layer.reason, []).append(layer.layer)
        lines += [f"not packed     {_ranges(numbers)}: {reason}" for reason, numbers in reasons.items()]
        return "\n".join(lines)


def _encoders(store: LayerStore) -> tuple[str, ...]:
    frozen = next((row.frozen for row in store.rows if row.frozen is not None), None)
    if frozen is None:
        return ()
    found = []
    for letter, packer, own in zip("kv", store.packers, frozen, strict=True):
        name, reason = encode.explain(packer, own, store.device)
        found.append(f"{letter} {name}" + (f" ({reason})" if reason else ""))
    return tuple(found)


def bits_held(layers: Iterable[LayerReport], nbytes: int) -> dict[str, Any]:
    """What `nbytes` mean for the values of some layers: bytes at 16 bits, both kinds of bits per value (see Report)."""
    layers = list(layers)
    values = sum(layer.values for layer in layers)
    in_blocks = sum(layer.values_in_blocks for layer in layers)
    return {
        "nbytes_16bit": 2 * values,
        "bits_per_value": 8 * nbytes / values if values else 0.0,
        "bits_per_value_packed": 8 * sum(layer.nbytes_blocks for layer in layers) / in_blocks if in_blocks else 0.0,
    }


def storage_nbytes(root: Any) -> int:
    """Bytes of every distinct torch storage reachable from `root` through attributes and containers."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, type(None), type, torch.dtype, torch.device)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and hasattr(item, "__tensor_flatten__"):
            # a tensor made of tensors (optimum-quanto) has no storage of its own
            stack.extend(getattr(item, name) for name in item.__tensor_flatten__()[0])
        elif isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return sum(storages.values())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
