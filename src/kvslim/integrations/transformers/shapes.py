"""Shapes: what each layer of a model caches and how many weights it has, from its config alone.

The model is built on the `meta` device, where tensors have shapes and no bytes, and runs once over a few token ids. So
head dims, shared layers and the states of linear layers are what the model's own code makes of its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvslim.errors import InputError, UnsupportedModelError
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.conversion import first_line

_PROBE = 2  # tokens; fewer than any window
WEIGHTS = ("16bit", "int8", "nf4")
_NF4_GROUP = 64  # values per fp32 scale in bitsandbytes


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches.

    Attributes
    ----------
    reason : str
        Why it cannot be packed; empty if it can.
    kv_heads, key_dim, value_dim : int
        0 where the layer holds no keys and values.
    window : int or None
        Tokens that a sliding layer sees.
    states_nbytes : int
        Convolution and recurrent states of one sequence.
    """

    reason: str
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    states_nbytes: int = 0


@dataclass(frozen=True)
class Parameters:
    """A model's weights, counted.

    Attributes
    ----------
    total : int
    linear : int
        Those in linear layers other than the output head, which int8 and nf4 quantize.
    linear_rows : int
        Output channels of these layers.
    """

    total: int
    linear: int
    linear_rows: int

    def nbytes(self, weights: str) -> int:
        """Bytes as ``16bit``, ``int8`` or ``nf4`` (bitsandbytes, scales included)."""
        rest = 2 * (self.total - self.linear)
        if weights == "int8":
            return rest + self.linear + 4 * self.linear_rows
        if weights == "nf4":
            return rest + self.linear // 2 + 4 * self.linear // _NF4_GROUP
        return rest + 2 * self.linear


@dataclass(frozen=True)
class ModelShape:
    """What a cache for a model has to hold.

    Attributes
    ----------
    name : str
    layers : tuple of LayerShape
    dtype : torch.dtype
        That the model computes in.
    rotary : float
        Share of the channels that rotary positions turn.
    context : int or None
        Tokens the model was made for.
    parameters : Parameters or None
    """

    name: str
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    rotary: float = 1.0
    context: int | None = None
    parameters: Parameters | None = None


def model_shape(name: str, config: Any, dtype: torch.dtype) -> ModelShape:
    """Read the shape of a model off its config.

    Raises
    ------
    UnsupportedModelError
        The model cannot hold a packed cache, or its code does not run without weights.
    """
    compat.check_version()
    text = compat.text_config(config)
    kinds = compat.layer_kinds(text)
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(compat.shape_config(config), dtype=dtype)
            cache = DynamicCache(config=text)
            ids = torch.ones(1, _PROBE, dtype=torch.long)
            model(input_ids=ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    except Exception as error:  # a model's code may raise anything
        raise UnsupportedModelError(
            f"the shapes of {name} cannot be read off its config: {first_line(error)}; describe it with --layers, "
            "--kv-heads and --head-dim"
        ) from error
    layers = tuple(_layer_shape(reason, layer) for (_, _, reason), layer in zip(kinds, cache.layers, strict=True))
    limit = compat.context_limit(text)
    return ModelShape(name, layers, dtype, compat.rotary_share(text), limit, _count(model))


def _layer_shape(reason: str, layer: Any) -> LayerShape:
    heads, key_dim, value_dim = 0, 0, 0
    if getattr(layer, "keys", None) is not None:
        heads, key_dim, value_dim = layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]
    states = compat.linear_states(layer)
    window = getattr(layer, "sliding_window", None)
    return LayerShape(reason, heads, key_dim, value_dim, window, sum(state.nbytes for state in states))


def _count(model: Any) -> Parameters:
    head = model.get_output_embeddings()
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
    return Parameters(
        sum(weight.numel() for weight in model.parameters()),
        sum(part.weight.numel() for part in linear),
        sum(part.out_features for part in linear),
    )


def plain_shape(
    layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None, dtype: torch.dtype
) -> ModelShape:
    """Shape of a model of like full-attention layers.

    Raises
    ------
    InputError
        A size is below 1.
    """
    value_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_dim}
    for what, size in sizes.items():
        if size < 1:
            raise InputError(f"{what}={size} is out of range; use 1 or more")
    dims = f"head_dim {head_dim}" if value_dim == head_dim else f"head_dim {head_dim} and {value_dim}"
    name = f"{layers} layers, {kv_heads} kv heads, {dims}"
    return ModelShape(name, (LayerShape("", kv_heads, head_dim, value_dim),) * layers, dtype)
