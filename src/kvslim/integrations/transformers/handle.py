"""What `update()` hands to the attention function in place of tensors: a packed layer, not a tensor, and loudly so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from kvslim.cache import LayerCache
from kvslim.errors import PackedCacheError

_ALLOWED = frozenset({"shape", "dtype", "device", "ndim"})


def _refuse(what: str, layer: LayerCache) -> NoReturn:
    layer.take_back()  # so that the cache is good for the next call
    raise PackedCacheError(
        f"packed keys or values reached code that wants a plain tensor ({what}); the model does not run on kvslim's "
        "attention. Load it with attn_implementation='kvslim' or call kvslim.enable(model)"
    )


class PackedStates:
    """Keys or values of one layer. Has a shape, dtype and device like the tensor it stands for, and nothing else.

    Parameters
    ----------
    layer : LayerCache
    new : Tensor of shape (batch, kv_heads, chunk, head_dim)
        The current chunk.
    """

    def __init__(self, layer: LayerCache, new: torch.Tensor):
        self.layer = layer
        self.dtype, self.device = new.dtype, new.device
        self.shape = torch.Size((*new.shape[:2], layer.length + new.shape[2], new.shape[3]))
        self.ndim = 4

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name}", self.layer)

    def __getitem__(self, index: Any) -> Any:
        _refuse("indexing", self.layer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = next(argument.layer for argument in _flat((args, kwargs or {})) if isinstance(argument, cls))
        _refuse(getattr(func, "__name__", str(func)), layer)


def _flat(nested: Any) -> Iterator[Any]:
    if isinstance(nested, dict):
        nested = tuple(nested.values())
    if isinstance(nested, (tuple, list)):
        for item in nested:
            yield from _flat(item)
    else:
        yield nested
