"""Which code reads a layer: native kernels where they can, the reference otherwise, and the reason for it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from kvslim.attention import reference
from kvslim.attention.native import NativeLayer
from kvslim.attention.reference import Score
from kvslim.kernels.cpu.chain import NoNativeFormError
from kvslim.kernels.cpu.library import native, why_not
from kvslim.kernels.cpu.reader import takes_integers
from kvslim.store.layer import LayerStore

_LAYERS: WeakKeyDictionary[LayerStore, NativeLayer | str] = WeakKeyDictionary()  # or why there is none


def attend(
    query: torch.Tensor,
    store: LayerStore,
    chunk: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    score: Score,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention of a chunk over everything stored and itself; shapes as in `reference.attend`."""
    layer = _layer(store)
    if isinstance(layer, str) or (library := native()) is None:
        return reference.attend(query, store, chunk, mask, score, causal=causal)
    try:
        return layer.attend(library, query, store, chunk, mask, score, causal=causal)
    except NoNativeFormError as missing:
        _LAYERS[store] = str(missing)
        return reference.attend(query, store, chunk, mask, score, causal=causal)


def explain(store: LayerStore) -> tuple[str, str]:
    """Name of the kernel that reads `store`, and why it is that one."""
    layer = _layer(store)
    if isinstance(layer, str):
        return "reference", f"torch only; no native form: {layer}"
    library = native()
    if library is None:
        return "reference", f"torch only; {why_not()}"
    sides = [takes_integers(library.isa, packer.layout, packer.codec.table()) for packer in store.packers]
    sums = "15-bit queries and weights on integer levels" if any(sides) else "fp32 sums"
    return f"native {library.isa}", f"{sums}, {library.threads} threads"


def _layer(store: LayerStore) -> NativeLayer | str:
    layer = _LAYERS.get(store)
    if layer is None:
        try:
            layer = "a GPU" if store.device.type != "cpu" else NativeLayer(store)
        except NoNativeFormError as missing:
            layer = str(missing)
        _LAYERS[store] = layer
    return layer
