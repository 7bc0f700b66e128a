"""`bench attention`: CPU time of one decode step's attention over a packed layer, against torch on 16 and 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvslim.attention import dispatch, reference
from kvslim.attention.reference import Score
from kvslim.bench.layers import Shape, filled_layer, float64_attention, question
from kvslim.bench.turns import cpu_seconds
from kvslim.layout import block_nbytes
from kvslim.recipe import Recipe
from kvslim.store.layer import LayerStore

BOUND = 2e-4  # of the largest output; a kernel that errs more gets no time


@dataclass(frozen=True)
class AttentionRow:
    """One recipe at one shape and length.

    Attributes
    ----------
    shape, recipe, kernel : str
    tokens, threads : int
    rel_error : float
        Largest error of the output against float64 on the dequantized values, over its largest magnitude.
    cpu_ms : float or None
        Median CPU time of a call, all threads; None where the result is wrong.
    speedup_vs_torch_bf16, speedup_vs_torch_fp32 : float or None
        Of CPU time, against torch's SDPA with the query heads of a kv head folded into rows.
    speedup_vs_reference : float or None
        Against kvslim's own reference; None where it was not measured.
    bytes_read : int
        Packed and exact bytes of K and V that a call reads.
    withheld : str or None
        Why there is no time.
    """

    shape: str
    tokens: int
    recipe: str
    kernel: str
    threads: int
    rel_error: float
    bytes_read: int
    cpu_ms: float | None = None
    speedup_vs_torch_bf16: float | None = None
    speedup_vs_torch_fp32: float | None = None
    speedup_vs_reference: float | None = None
    withheld: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure_attention(
    recipes: Sequence[Recipe],
    shapes: Sequence[Shape],
    lengths: Sequence[int],
    *,
    rounds: int = 9,
    with_reference: bool = False,
    on_cell: Callable[[int], object] = lambda _: None,
) -> list[AttentionRow]:
    """Measure every recipe at every shape and length; all contestants of a cell take turns.

    `on_cell` is called with the number of cells finished since the last call.
    """
    rows = []
    for shape in shapes:
        for tokens in lengths:
            rows += _cell(recipes, shape, tokens, rounds, with_reference)
            on_cell(1)
    return rows


def _cell(
    recipes: Sequence[Recipe], shape: Shape, tokens: int, rounds: int, with_reference: bool
) -> list[AttentionRow]:
    score = Score(shape.head_dim**-0.5)
    query, chunk = question(shape)
    contestants = {
        f"torch {name}": _folded(shape, tokens, dtype)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }
    found = []
    for recipe in recipes:
        layer = filled_layer(recipe, shape, tokens)
        store = layer.store
        assert store is not None
        want = float64_attention(store, query, chunk, score.scaling)
        got = dispatch.attend(query, store, chunk, None, score)
        error = float((got - want).abs().max() / want.abs().max())
        kernel = dispatch.explain(store)[0]
        row = AttentionRow(str(shape), tokens, recipe.label, kernel, torch.get_num_threads(), error, bytes_read(store))
        found.append((row, layer))
        if error <= BOUND:
            contestants[recipe.label] = partial(dispatch.attend, query, store, chunk, None, score)
            if with_reference and kernel != "reference":
                contestants[f"{recipe.label} reference"] = partial(reference.attend, query, store, chunk, None, score)
    taken = cpu_seconds(contestants, rounds)
    return [_timed(row, taken) for row, _ in found]


def _timed(row: AttentionRow, taken: dict[str, float]) -> AttentionRow:
    values = asdict(row)
    if row.recipe not in taken:
        values["withheld"] = f"error {row.rel_error:.1e} is past {BOUND:.0e}"
        return AttentionRow(**values)
    own = taken[row.recipe]
    slow = taken.get(f"{row.recipe} reference")
    values |= {
        "cpu_ms": own * 1e3,
        "speedup_vs_torch_bf16": taken["torch bf16"] / own,
        "speedup_vs_torch_fp32": taken["torch fp32"] / own,
        "speedup_vs_reference": None if slow is None else slow / own,
    }
    return AttentionRow(**values)


def _folded(shape: Shape, tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    """SDPA as transformers runs it at decode: the query heads that share a kv head are rows of one query."""
    query = torch.randn(1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim).to(dtype)
    key, value = (torch.randn(1, shape.kv_heads, tokens, shape.head_dim).to(dtype) for _ in range(2))
    return lambda: scaled_dot_product_attention(query, key, value)


def bytes_read(store: LayerStore) -> int:
    """Packed and exact bytes of the first sequence's keys and values."""
    row = store.rows[0]
    blocks = row.packed / store.block * sum(block_nbytes(packer.layout) for packer in store.packers)
    exact = (row.sinks + row.tail) * sum(
        dim * dtype.itemsize for dim, dtype in zip(store.head_dims, store.dtypes, strict=True)
    )
    return int(store.kv_heads * (blocks + exact))
