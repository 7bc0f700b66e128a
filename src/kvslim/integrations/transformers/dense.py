"""Layers that transformers keeps: copies for forks, and their state as plain values and tensors, and back.

Only classes whose whole state is understood are saved; any other is refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvslim.errors import StateError
from kvslim.files import Contents, Lazy
from kvslim.header import Fields

_KNOWN = tuple(
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
    if hasattr(cache_utils, name)
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_KERNEL = 1 << 12
_STATES = {"conv": "conv_states", "recurrent": "recurrent_states"}


def copy_layer(layer: Any) -> Any:
    """Return a copy that does not see later tokens; keys and values, which are only ever replaced, are shared."""
    return copy.copy(layer) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else copy.deepcopy(layer)


def check_known(index: int, layer: Any) -> None:
    """Raise StateError where the state of a layer is not understood."""
    if type(layer) not in _KNOWN:
        raise StateError(
            f"layer {index}: {type(layer).__name__} has a state that kvslim does not know how to save; nothing was "
            "written. Save the token ids and feed them again"
        )


def describe(index: int, layer: Any) -> tuple[dict[str, Any], dict[str, Lazy]]:
    """Return header and tensors of one layer."""
    header: dict[str, Any] = {"layer": index, "kind": type(layer).__name__, "keys": False}
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        header["keys"] = True
        tensors |= {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicSlidingWindowLayer):
        header |= {"window": layer.sliding_window, "seen": layer.cumulative_length, "record_past": layer.record_past}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        header |= {"record_past": layer.record_past, "states": []}
        for at in range(layer.number_of_states):
            found = {f"{kind}.{at}": getattr(layer, name)[at] for kind, name in _STATES.items()}
            tensors |= {name: state for name, state in found.items() if state is not None}
            header["states"].append(
                {"fed": bool(layer.has_previous_state[at]), "kernel": layer.conv_kernel_size[at] or 0}
            )
    return header, {f"{index}.dense.{name}": Lazy.of(tensor) for name, tensor in tensors.items()}


def restore(fields: Fields, contents: Contents, layer: Any, length: int, device: torch.device) -> None:
    """Fill a new layer of the model with what `describe` described; raises StateFileError."""
    if fields.text("kind") != type(layer).__name__:
        fields.refuse("kind", f"'{type(layer).__name__}', as the model has it")
    prefix = f"{fields.integer('layer')}.dense."
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    if sliding:
        fields.integer("window", layer.sliding_window, layer.sliding_window)
        layer.record_past = fields.flag("record_past")
        layer.cumulative_length = fields.integer("seen", length, length)
    if isinstance(layer, DynamicLayer) and fields.flag("keys"):
        keys, values = (_floats(contents, prefix + name, device) for name in ("keys", "values"))
        shapes = tuple(keys.shape), tuple(values.shape)
        kept = min(length, layer.sliding_window - 1) if sliding else length
        fits = kept <= keys.shape[-2] <= length if sliding and layer.record_past else keys.shape[-2] == kept
        if keys.ndim != 4 or shapes[0][:3] != shapes[1][:3] or not fits:
            fields.refuse("layer", f"keys and values of {kept} tokens each, not of shapes {shapes}")
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        _restore_states(fields, contents, layer, prefix, device)


def _restore_states(fields: Fields, contents: Contents, layer: Any, prefix: str, device: torch.device) -> None:
    layer.record_past = fields.flag("record_past")
    states = fields.each("states")
    if len(states) != layer.number_of_states:
        fields.refuse("states", f"{layer.number_of_states} of them")
    for at, each in enumerate(states):
        layer.has_previous_state[at] = each.flag("fed")
        for kind, name in _STATES.items():
            if contents.form(f"{prefix}{kind}.{at}") is None:
                continue
            state = _floats(contents, f"{prefix}{kind}.{at}", device)
            kernel = each.integer("kernel", 0, _LARGEST_KERNEL)
            arguments = {"conv_kernel_size": kernel} if kind == "conv" else {}
            layer.lazy_initialization(**{name: state}, state_idx=at, **arguments)
            getattr(layer, name)[at] = state


def _floats(contents: Contents, name: str, device: torch.device) -> torch.Tensor:
    shape, dtype = contents.form(name) or ((), torch.float32)
    if dtype not in _FLOATS:
        dtype = torch.float32
    return contents.take_finite(name, (-1,) * max(2, len(shape)), dtype).to(device)
