"""Plan: bytes of a cache from shapes alone, and the longest context that fits into so many.

Counted as `KVCache.report` counts: blocks with the unused ones of their slabs, exact slots, parameters frozen per
layer and sequence, and the layers that stay with transformers. Activations come on top and are not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from kvslim.cache import DTYPE_NAMES, build_packers, exact_dtype
from kvslim.codecs.side import Frozen, SidePacker, shared_table
from kvslim.errors import InputError
from kvslim.integrations.transformers.shapes import LayerShape, ModelShape
from kvslim.layout import block_nbytes
from kvslim.recipe import Recipe, Side
from kvslim.store.layer import exact_slots
from kvslim.store.sizes import Feed, packed_tokens, pool_blocks
from kvslim.transforms.base import Sample

BASELINE = "16 bit"
LONGEST = 1 << 30  # tokens; where neither the memory nor the model sets an end
_WINDOW_NBYTES = 8  # transformers' sliding layers keep their window as a tensor


@dataclass(frozen=True)
class Size:
    """Bytes that a cache holds.

    Attributes
    ----------
    nbytes_blocks, nbytes_exact, nbytes_parameters, nbytes_dense : int
        Packed blocks, slots of exact tokens, parameters frozen per layer, and layers left to transformers.
    nbytes_16bit : int
        The same tokens at 16 bits per value.
    """

    nbytes_blocks: int
    nbytes_exact: int
    nbytes_parameters: int
    nbytes_dense: int
    nbytes_16bit: int

    @property
    def nbytes(self) -> int:
        """All of it, as `KVCache.nbytes`."""
        return self.nbytes_blocks + self.nbytes_exact + self.nbytes_parameters + self.nbytes_dense

    @property
    def bits_per_value(self) -> float:
        """Over everything held."""
        return 16 * self.nbytes / self.nbytes_16bit if self.nbytes_16bit else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"bits_per_value": self.bits_per_value, "nbytes": self.nbytes, **asdict(self)}


@dataclass(frozen=True)
class Plan:
    """One recipe on one model; without a recipe, transformers' own cache at 16 bits per value.

    Attributes
    ----------
    shape : ModelShape
    recipe : Recipe or None

    Raises
    ------
    RecipeError
        Recipe and head dims do not fit.
    InputError
        The recipe names a layer past the last.
    """

    shape: ModelShape
    recipe: Recipe | None

    def __post_init__(self) -> None:
        for override in self.recipe.layers if self.recipe else ():
            if override.last >= len(self.shape.layers):
                raise InputError(
                    f"'{override}' is past the last layer; the model has layers 0 to {len(self.shape.layers) - 1}"
                )
        self._packed  # noqa: B018 (refuses head dims that do not fit)

    @property
    def name(self) -> str:
        """The recipe as it was asked for."""
        return BASELINE if self.recipe is None else self.recipe.label or str(self.recipe)

    def size(self, feed: Feed) -> Size:
        """Count what is held once all of `feed` is in."""
        blocks = exact = parameters = 0
        if self._packed and self.recipe is not None:
            sealed, capacity = packed_tokens(self.recipe, feed.context), pool_blocks(self.recipe, feed)
            blocks = capacity * sum(layer.block_nbytes for layer in self._packed)
            exact = feed.batch * sum(layer.exact_nbytes for layer in self._packed)
            if sealed:
                parameters = feed.batch * sum(layer.frozen_nbytes for layer in self._packed) + self._tables_nbytes
            else:
                parameters = feed.batch * sum(layer.moment_nbytes for layer in self._packed)
        dense = sum(_dense_nbytes(layer, feed, self._itemsize) for layer in self._dense)
        values = sum(_values(layer, feed) for layer in self.shape.layers)
        return Size(blocks, exact, parameters, dense, 2 * values)

    def most(self, feed: Feed) -> int:
        """Bytes at the fullest moment on the way to the end of `feed`, between two passes."""
        return max(self.size(stage).nbytes for stage in feed.stages())

    def longest(self, room_nbytes: int, feed: Feed) -> int:
        """Longest context, fed like `feed`, that stays within `room_nbytes`; 0 if none does. Capped by the model's."""
        limit = self.shape.context or LONGEST

        def fits(context: int) -> bool:
            return self.most(replace(feed, context=context)) <= room_nbytes

        least = feed.new_tokens + 1
        if least > limit or not fits(least):
            return 0
        good = least
        while good < limit and fits(min(2 * good, limit)):
            good = min(2 * good, limit)
        bad = min(2 * good, limit + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return good

    # -- inner

    @property
    def _itemsize(self) -> int:
        return 2 if self.recipe is None else self.shape.dtype.itemsize

    @property
    def _dense(self) -> list[LayerShape]:
        return [layer for layer in self.shape.layers if self.recipe is None or layer.reason]

    @cached_property
    def _packed(self) -> list[_PackedLayer]:
        if self.recipe is None:
            return []
        return [
            _PackedLayer.of(self.recipe, index, layer, self.shape)
            for index, layer in enumerate(self.shape.layers)
            if not layer.reason
        ]

    @cached_property
    def _tables_nbytes(self) -> int:
        """Bytes of the code tables, which all layers and sequences share."""
        tables = (table for layer in self._packed for table in layer.tables)
        return sum({table.data_ptr(): table.nbytes for table in tables}.values())


@dataclass(frozen=True)
class _PackedLayer:
    """Bytes of one packed layer: per block of the pool, and per sequence."""

    block_nbytes: int
    exact_nbytes: int
    frozen_nbytes: int
    moment_nbytes: int  # of the queries, until the parameters are frozen
    tables: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, recipe: Recipe, index: int, layer: LayerShape, shape: ModelShape) -> _PackedLayer:
        dims, heads = (layer.key_dim, layer.value_dim), layer.kv_heads
        packers = build_packers(recipe, index, dims, DTYPE_NAMES[shape.dtype])
        slots = exact_slots(recipe.sinks, recipe.recent, recipe.block, recipe.immediate)
        exact = [
            dim * exact_dtype(recipe, packer, shape.dtype).itemsize for dim, packer in zip(dims, packers, strict=True)
        ]
        rotary = int(layer.key_dim * shape.rotary)
        frozen = [
            _frozen_nbytes(side, dim, heads, recipe.block, rotary if keys else 0)
            for side, dim, keys in zip(recipe.sides(index), dims, (True, False), strict=True)
        ]
        tables = (shared_table(packer.codec, torch.device("cpu")) for packer in packers)
        return cls(
            block_nbytes=heads * sum(block_nbytes(packer.layout) for packer in packers),
            exact_nbytes=heads * slots * sum(exact),
            frozen_nbytes=sum(frozen),
            moment_nbytes=4 * heads * layer.key_dim**2 if packers[0].needs_queries else 0,
            tables=tuple(table for table in tables if table is not None),
        )


@lru_cache(maxsize=256)
def _frozen_nbytes(side: Side, head_dim: int, kv_heads: int, block: int, rotary: int) -> int:
    """Bytes of the parameters of one side, found by freezing them on stand-in tokens. `rotary` is 0 for values."""
    packer = SidePacker(side, head_dim, block, "fp16")
    x = torch.ones(kv_heads, 2, head_dim)
    if not rotary:
        return _owned_nbytes(packer.freeze(Sample(x, block=block, tokens=2)))
    moment = torch.eye(head_dim).expand(kv_heads, -1, -1)
    channels = torch.arange(rotary // 2)
    prior = {
        "query_moment": moment,
        **dict.fromkeys(("key_power", "key_mean", "random_mean", "plain_mean"), x[:, 0]),
        "rope_pairs": torch.stack((channels, channels + rotary // 2)),
        "rope_frequency": torch.ones(rotary // 2, dtype=torch.float64),
    }
    return _owned_nbytes(packer.freeze(Sample(x, moment, block, 2, prior)))


def _owned_nbytes(frozen: Frozen) -> int:
    return sum(tensor.nbytes for name, tensor in frozen.tensors().items() if name != "table")


def _dense_nbytes(layer: LayerShape, feed: Feed, itemsize: int) -> int:
    """Bytes of a layer that transformers keeps. A sliding one keeps the last pass whole until the next begins."""
    tokens, extra = feed.context, 0
    if layer.window is not None:
        before = min(feed.context - feed.last_pass, layer.window - 1)
        tokens, extra = before + feed.last_pass, _WINDOW_NBYTES
    width = layer.kv_heads * (layer.key_dim + layer.value_dim)
    return feed.batch * (tokens * width * itemsize + layer.states_nbytes) + extra


def _values(layer: LayerShape, feed: Feed) -> int:
    """Numbers that a plain cache shows for the layer's tokens."""
    tokens = feed.context if layer.window is None else min(feed.context, layer.window - 1)
    return feed.batch * tokens * layer.kv_heads * (layer.key_dim + layer.value_dim)
