"""`bench append`: CPU time of encoding whole blocks, transforms included, per token vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.bench.layers import Shape, filled_layer
from kvslim.bench.turns import cpu_seconds
from kvslim.kernels.encode import encode, explain
from kvslim.layout import PackedBlock
from kvslim.recipe import Recipe

_FIT_TOKENS = 1024  # that parameters are frozen on


@dataclass(frozen=True)
class AppendRow:
    """One side of a recipe at one shape.

    Attributes
    ----------
    shape, recipe, side, kernel : str
        Side: k or v.
    blocks, threads : int
        Blocks encoded at once: 1 is the burst of a seal while decoding.
    equal : bool
        Whether the bytes are those of the reference.
    ns_per_vector : float or None
        CPU time per token and kv head, all threads; None where bytes differ.
    speedup_vs_reference : float or None
    """

    shape: str
    recipe: str
    side: str
    kernel: str
    blocks: int
    threads: int
    equal: bool
    ns_per_vector: float | None = None
    speedup_vs_reference: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure_append(
    recipes: Sequence[Recipe],
    shapes: Sequence[Shape],
    blocks: Sequence[int],
    *,
    rounds: int = 9,
    on_cell: Callable[[int], object] = lambda _: None,
) -> list[AppendRow]:
    """Measure both sides of every recipe at every shape and number of blocks."""
    rows = []
    for shape in shapes:
        for recipe in recipes:
            layer = filled_layer(recipe, shape, _FIT_TOKENS)
            store = layer.store
            assert store is not None
            frozen = store.rows[0].frozen
            assert frozen is not None
            for count in blocks:
                x = torch.randn(count, shape.kv_heads, recipe.block, shape.head_dim)
                starts = torch.arange(count) * recipe.block
                vectors = count * shape.kv_heads * recipe.block
                for side, packer, own in zip("kv", store.packers, frozen, strict=True):
                    fast = _call(encode, packer, x, own, starts)
                    slow = _call(lambda packer, *rest: packer.encode(*rest), packer, x, own, starts)
                    kernel = explain(packer, own, x.device)[0]
                    row = AppendRow(
                        str(shape), recipe.label, side, kernel, count, torch.get_num_threads(), _same(fast(), slow())
                    )
                    rows.append(_timed(row, fast, slow, vectors, rounds))
                on_cell(1)
    return rows


def _call(function: Callable[..., PackedBlock], *arguments: Any) -> Callable[[], PackedBlock]:
    return lambda: function(*arguments)


def _same(one: PackedBlock, other: PackedBlock) -> bool:
    return all(
        torch.equal(one.parts[name].view(torch.uint8), other.parts[name].view(torch.uint8)) for name in one.parts
    )


def _timed(
    row: AppendRow, fast: Callable[[], PackedBlock], slow: Callable[[], PackedBlock], vectors: int, rounds: int
) -> AppendRow:
    if not row.equal:
        return row
    taken = cpu_seconds({"fast": fast, "slow": slow}, rounds)
    return AppendRow(
        **asdict(row)
        | {"ns_per_vector": taken["fast"] / vectors * 1e9, "speedup_vs_reference": taken["slow"] / taken["fast"]}
    )
