"""check_recipe: what every recipe must keep, on one layer per pair of sides that it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from kvslim.cache import LayerCache, build_packers
from kvslim.codecs import build_codec
from kvslim.codecs.side import SidePacker
from kvslim.layout import bits_per_value
from kvslim.recipe import Recipe
from kvslim.store.table import BlockAllocator, BlockTable
from kvslim.testing import pipeline
from kvslim.testing.suite import HEAD_DIMS, normal, refusal, run
from kvslim.transforms import build_transforms
from kvslim.transforms.base import Sample

_HEADS = 2


def check_recipe(recipe: str | Recipe) -> None:
    """Hold a recipe to all that the library relies on.

    Parameters
    ----------
    recipe : str or Recipe
        Preset name, pair, or recipe string; its codecs and transforms may come from other packages.

    Raises
    ------
    ConformanceError
        Listing every failed check in plain words.
    RecipeError
        The recipe is not understood.
    """
    parsed = Recipe.parse(recipe)
    layers: dict[object, int] = {}
    for layer in range(1 + max((override.last + 1 for override in parsed.layers), default=0)):
        layers.setdefault(parsed.sides(layer), layer)
    for side in {side for layer in layers.values() for side in parsed.sides(layer)}:
        build_codec(side), build_transforms(side)
    for layer in layers.values():
        name = f"recipe '{parsed.label or parsed}', layer {layer}"
        run(name, _Subject(parsed, layer), (*_CHECKS, *pipeline.CHECKS))


@dataclass
class _Subject:
    """A recipe under test, on one layer."""

    recipe: Recipe
    layer_index: int

    @cached_property
    def packers(self) -> dict[int, tuple[SidePacker, SidePacker]]:
        """Key and value side by head_dim, as far as the recipe takes it."""
        found = {}
        for head_dim in HEAD_DIMS:
            try:
                found[head_dim] = build_packers(self.recipe, self.layer_index, (head_dim, head_dim), "fp32")
            except Exception:  # judged by a check of its own
                continue
        return found

    @cached_property
    def head_dim(self) -> int:
        """A head_dim that the recipe takes: 64, 128, or whatever it can do."""
        return next((dim for dim in (64, 128, *HEAD_DIMS) if dim in self.packers), 128)

    def cache(self) -> LayerCache:
        """Return an empty layer."""
        table = BlockTable(BlockAllocator(), self.recipe.block)
        return LayerCache(self.recipe, self.layer_index, table, partial(_prior, self.head_dim))


def _prior(head_dim: int) -> dict[str, torch.Tensor]:
    """Statistics as a calibration has them."""
    half = head_dim // 2
    return {
        "query_moment": torch.eye(head_dim).repeat(_HEADS, 1, 1) + 0.25,
        "key_power": torch.ones(_HEADS, head_dim),
        **{name: torch.ones(_HEADS, head_dim) for name in ("key_mean", "random_mean", "plain_mean")},
        "rope_pairs": torch.stack((torch.arange(half), torch.arange(half) + half)),
        "rope_frequency": torch.linspace(1, 0, half).double(),
    }


# -- the checks ----------------------------------------------------------------------------------------------------


def _text(subject: _Subject) -> Iterator[str]:
    """It is the same recipe when printed and read again."""
    for what, again in (
        ("text", Recipe.parse(str(subject.recipe))),
        ("JSON", Recipe.from_json(subject.recipe.to_json())),
    ):
        if again != subject.recipe:
            yield f"as {what} it becomes {again}"


def _head_dims(subject: _Subject) -> Iterator[str]:
    """A head_dim of 16 to 512 works, or is refused by name with what is allowed."""
    for head_dim in HEAD_DIMS:
        try:
            packers = build_packers(subject.recipe, subject.layer_index, (head_dim, head_dim), "fp32")
            for packer, moment in zip(packers, (torch.eye(head_dim).repeat(_HEADS, 1, 1), None), strict=True):
                sample = Sample(normal(_HEADS, 40, head_dim), moment, subject.recipe.block, 40, _prior(head_dim))
                packer.freeze(sample)
        except Exception as error:
            yield from refusal(error, head_dim)
    if not subject.packers:
        yield "none of them works"


def _bits(subject: _Subject) -> Iterator[str]:
    """Sealed blocks hold the bytes that the layout says."""
    cache, (first, sizes) = subject.cache(), pipeline.lengths(subject)
    length = sizes[-1] + first
    pipeline.feed(cache, pipeline.chunk(subject.head_dim, length, 3), [length])
    pool, recipe = pipeline.store_of(cache).pool, subject.recipe
    values = pool.capacity * recipe.block * _HEADS * subject.head_dim
    want = sum(bits_per_value(packer.layout) * values / 8 for packer in pipeline.store_of(cache).packers)
    held = sum(tensor.nbytes for tensor in pool.tensors())
    if held != round(want):
        yield f"{pool.capacity} blocks hold {held} bytes, the layouts say {want:g}"


def _transforms(subject: _Subject) -> Iterator[str]:
    """Queries and outputs agree with how tokens are transformed."""
    head_dim, recipe = subject.head_dim, subject.recipe
    x, query = normal(1, _HEADS, recipe.block, head_dim) + 0.5, normal(_HEADS, 4, head_dim, seed=1)
    moment, starts = query.mT @ query, torch.tensor([recipe.sinks])
    for side, packer in zip("kv", subject.packers[head_dim], strict=True):
        sample = Sample(x[0], moment if side == "k" else None, recipe.block, recipe.block, _prior(head_dim))
        chain = packer.freeze(sample).chain
        moved, offset = chain.forward(x, starts)[0], chain.offset(starts)
        moved = moved if offset is None else moved + offset[0].unsqueeze(-2)
        if side == "k":
            mapped, bias = chain.query(query)
            got = mapped @ moved.mT if bias is None else mapped @ moved.mT + bias
            want = query @ x[0].mT
        else:
            weights = normal(_HEADS, 4, recipe.block, seed=2).softmax(-1) / 2
            got = chain.output(weights @ moved, weights.sum(-1, keepdim=True))
            want = weights @ x[0]
        error = float((got - want).abs().max() / want.abs().max())
        if not error <= 1e-4:
            yield f"{'scores of keys' if side == 'k' else 'sums of values'} are off by {error:.3g} of their size"


_CHECKS = (_text, _head_dims, _bits, _transforms)
