"""One attention layer filled with synthetic keys and values, and what its attention is in float64."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvslim.cache import LayerCache
from kvslim.codecs.decode import decode
from kvslim.codecs.side import Frozen
from kvslim.errors import InputError
from kvslim.recipe import Recipe
from kvslim.store.layer import LayerStore
from kvslim.store.table import BlockAllocator, BlockTable, Entry

_SHAPE = re.compile(r"(\d+)/(\d+)x(\d+)")
_CHUNK = 4096  # tokens appended at once
_TILE = 16  # blocks decoded at once


@dataclass(frozen=True)
class Shape:
    """Query heads, kv heads and head_dim of a layer; ``32/8x128``."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``HEADS/KV_HEADSxHEAD_DIM``; raises InputError."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise InputError(f"shape '{text}': write query heads, kv heads and head_dim as 32/8x128")
        shape = cls(*(int(number) for number in match.groups()))
        if not min(shape.heads, shape.kv_heads, shape.head_dim) or shape.heads % shape.kv_heads:
            raise InputError(f"shape '{text}': query heads must be a multiple of kv heads, and none may be 0")
        return shape


def filled_layer(
    recipe: Recipe,
    shape: Shape,
    tokens: int,
    seed: int = 0,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerCache:
    """Return a layer that holds `tokens` tokens: Gaussian around a mean per channel, as keys are.

    The same tokens on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = LayerCache(recipe, 0, BlockTable(BlockAllocator(), recipe.block))
    spread = 0.5 + torch.rand(shape.kv_heads, 1, shape.head_dim, generator=generator)
    mean = 2 * torch.randn(shape.kv_heads, 1, shape.head_dim, generator=generator)
    for start in range(0, tokens, _CHUNK):
        size = (1, shape.kv_heads, min(_CHUNK, tokens - start), shape.head_dim)
        key = torch.randn(size, generator=generator) * spread + mean
        layer.append(key.to(device, dtype), torch.randn(size, generator=generator).to(device, dtype))
        # queries are read only until parameters are frozen
        count = size[2] if not start else 1
        query = torch.randn(1, shape.heads, count, shape.head_dim, generator=generator)
        layer.settle(query.to(device, dtype), None)
    return layer


def question(
    shape: Shape, seed: int = 1, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Query, and key and value of the token it belongs to."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, shape.heads, 1, shape.head_dim, generator=generator)
    size = (1, shape.kv_heads, 1, shape.head_dim)
    key, value = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    return query.to(device, dtype), (key.to(device, dtype), value.to(device, dtype))


def float64_attention(
    store: LayerStore, query: torch.Tensor, chunk: tuple[torch.Tensor, torch.Tensor], scaling: float
) -> torch.Tensor:
    """Attention of one query position on the dequantized values, in float64; shape (1, heads, 1, head_dim)."""
    view = store.view(0)
    group = query.shape[1] // store.kv_heads
    q = query[0].reshape(store.kv_heads, group, -1)
    key = torch.cat((view.key.double(), chunk[0][0].double()), dim=1)
    value = torch.cat((view.value.double(), chunk[1][0].double()), dim=1)
    scores, values = [q.double() @ key.mT], [value]
    if view.frozen is not None:
        turned, bias = view.frozen[0].chain.query(q.float())
        turned = store.packers[0].codec.expand_query(turned).double()
        starts = torch.arange(len(view.entries), device=store.device) * store.block + view.origin + view.sinks
        for at in range(0, len(view.entries), _TILE):
            entries, start = view.entries[at : at + _TILE], starts[at : at + _TILE]
            keys, values_ = (_tokens(store, view.frozen, side, entries, start) for side in (0, 1))
            packed = turned @ keys.double().mT
            scores.append(packed if bias is None else packed + bias.double())
            mass = torch.ones(store.kv_heads, values_.shape[1], 1, device=store.device)
            summed = store.packers[1].codec.reduce_output(values_)
            values.append(view.frozen[1].chain.output(summed, mass).double())
    weights = torch.softmax(torch.cat(scores, dim=-1) * scaling, dim=-1)
    return (weights @ torch.cat(values, dim=1)).reshape(1, query.shape[1], 1, -1)


def _tokens(
    store: LayerStore, frozen: tuple[Frozen, Frozen], side: int, entries: list[Entry], starts: torch.Tensor
) -> torch.Tensor:
    x = decode(store.pool.read("kv"[side], [entry.block for entry in entries]), frozen[side].table)
    offset = frozen[side].offset(starts, x.shape[-1])
    x = x if offset is None else x + offset.unsqueeze(-2)
    return torch.cat([x[i, :, : entry.valid] for i, entry in enumerate(entries)], dim=1)
