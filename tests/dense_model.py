"""What tests compare with: attention written out in fp64, and a cache that is a plain list of columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.decode import decode
from kvslim.recipe import Recipe
from kvslim.store.table import BlockAllocator, BlockTable


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, score: Score
) -> torch.Tensor:
    """Softmax attention of one sequence in fp64.

    Parameters
    ----------
    query : Tensor of shape (heads, queries, head_dim)
    key, value : Tensor of shape (kv_heads, tokens, head_dim)
    visible : Tensor of shape (queries, tokens) or (heads, queries, tokens), bool or additive float
    score : Score
    """
    group = query.shape[0] // key.shape[0]
    key, value = (t.double().repeat_interleave(group, dim=0) for t in (key, value))
    logits = query.double() @ key.transpose(1, 2) * score.scaling
    if score.softcap is not None:
        logits = torch.tanh(logits / score.softcap) * score.softcap
    hide = visible if visible.dtype != torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    logits = logits + hide.double()
    if score.sinks is not None:
        logits = torch.cat([logits, score.sinks.double().view(-1, 1, 1).expand(-1, logits.shape[1], 1)], dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)  # a query that sees nothing gets nothing
    return (weights[..., : key.shape[1]] @ value).float()


def causal(queries: int, tokens: int) -> torch.Tensor:
    """Visible keys of the last `queries` of `tokens` positions; (queries, tokens)."""
    return torch.arange(tokens)[None] <= torch.arange(tokens - queries, tokens)[:, None]


@dataclass
class PlainRow:
    """One sequence of one layer: keys and values of every column, and which columns are padding."""

    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor

    def append(self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor) -> PlainRow:
        return PlainRow(torch.cat([self.key, key], 1), torch.cat([self.value, value], 1), torch.cat([self.real, real]))

    def crop(self, length: int) -> PlainRow:
        return PlainRow(self.key[:, :length], self.value[:, :length], self.real[:length])


@dataclass
class Geometry:
    """Sizes of a layer."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16

    def chunk(self, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key, value of a chunk."""
        random = torch.Generator().manual_seed(seed)
        shapes = ((self.heads, self.key_dim), (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim))
        q, k, v = (torch.randn(batch, heads, tokens, dim, generator=random) for heads, dim in shapes)
        return q, k, v

    @property
    def score(self) -> Score:
        return Score(self.key_dim**-0.5)


@dataclass
class Single:
    """A LayerCache with a table of its own."""

    recipe: str
    geometry: Geometry = field(default_factory=Geometry)

    def __post_init__(self) -> None:
        recipe = Recipe.parse(self.recipe)
        self.table = BlockTable(BlockAllocator(), recipe.block)
        self.layer = LayerCache(recipe, 0, self.table)

    def feed(
        self,
        chunk: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None = None,
        score: Score | None = None,
    ) -> torch.Tensor:
        query, key, value = chunk
        self.layer.append(key, value)
        return self.layer.attend(query, mask, score or self.geometry.score)

    @property
    def store(self):
        assert self.layer.store is not None
        return self.layer.store

    def crop(self, length: int) -> None:
        for row, tokens in enumerate(self.layer.crop(length)):
            self.table.crop(row, tokens)


def stored(layer: LayerCache, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence as they are read back: sinks, blocks, tail; (kv_heads, tokens, head_dim)."""
    store = layer.store
    assert store is not None
    view = store.view(row)
    sides = []
    for name, exact in (("k", view.key), ("v", view.value)):
        pieces = [exact[:, : view.sinks].float()]
        for block, valid in view.entries:
            table = None if view.frozen is None else view.frozen[0 if name == "k" else 1].table
            pieces.append(decode(store.pool.read(name, [block]), table)[0, :, :valid])
        sides.append(torch.cat([*pieces, exact[:, view.sinks :].float()], dim=1))
    return sides[0], sides[1]
