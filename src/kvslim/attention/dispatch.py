"""Which code reads a layer: native kernels where they can, the reference otherwise, and the reason for it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvslim.attention import reference
from kvslim.attention.native import NativeLayer
from kvslim.attention.reference import Score
from kvslim.kernels.cpu.chain import NoNativeFormError
from kvslim.kernels.cpu.library import native, why_not
from kvslim.kernels.cpu.reader import takes_integers
from kvslim.kernels.triton.device import device_target
from kvslim.kernels.triton.form import NoTritonFormError
from kvslim.store.layer import LayerStore

if TYPE_CHECKING:
    from kvslim.attention.triton import TritonLayer

# what reads a store, or why it is the reference
_LAYERS: WeakKeyDictionary[LayerStore, NativeLayer | TritonLayer | str] = WeakKeyDictionary()


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
    try:
        if isinstance(layer, NativeLayer):
            library = native()
            if library is not None:
                return layer.attend(library, query, store, chunk, mask, score, causal=causal)
        elif not isinstance(layer, str):
            return layer.attend(query, store, chunk, mask, score, causal=causal)
    except (NoNativeFormError, NoTritonFormError) as missing:
        _LAYERS[store] = f"no native form: {missing}"
    return reference.attend(query, store, chunk, mask, score, causal=causal)


def explain(store: LayerStore) -> tuple[str, str]:
    """Name of the kernel that reads `store`, and why it is that one."""
    layer = _layer(store)
    if isinstance(layer, str):
        return "reference", f"torch only; {layer}"
    if not isinstance(layer, NativeLayer):
        return "triton", f"fp32 sums, compiled for {layer.family} at first use"
    library = native()
    if library is None:
        return "reference", f"torch only; {why_not()}"
    sides = [takes_integers(library.isa, packer.layout, packer.codec.table()) for packer in store.packers]
    sums = "15-bit queries and weights on integer levels" if any(sides) else "fp32 sums"
    return f"native {library.isa}", f"{sums}, {library.threads} threads"


def _layer(store: LayerStore) -> NativeLayer | TritonLayer | str:
    layer = _LAYERS.get(store)
    if layer is None:
        try:
            layer = NativeLayer(store) if store.device.type == "cpu" else _gpu_layer(store)
        except (NoNativeFormError, NoTritonFormError) as missing:
            layer = f"no native form: {missing}"
        _LAYERS[store] = layer
    return layer


def _gpu_layer(store: LayerStore) -> TritonLayer | str:
    target = device_target(store.device)
    if isinstance(target, str):
        return target
    from kvslim.attention.triton import TritonLayer  # imports triton

    multiprocessors = torch.cuda.get_device_properties(store.device).multi_processor_count
    return TritonLayer(store, target.family, multiprocessors)
