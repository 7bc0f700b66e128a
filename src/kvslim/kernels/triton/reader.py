"""Reader: attention over one layer's packed blocks and exact tokens in Triton, on plain tensors.

Slabs of a pool are separate allocations, and vLLM has one for all pages, so the kernels take addresses: a table of the
parts' first bytes per slab, and per sequence a table of (slab, block in the slab, first token, valid tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvslim.kernels.triton.attend import attend_shares, merge_shares
from kvslim.kernels.triton.configs import FAMILIES, Config, compiler_options, config, splits
from kvslim.kernels.triton.form import (
    ADDRESSES,
    NoTritonFormError,
    SideForm,
    kernel_table,
    part_names,
    power_of_two,
    side_form,
    stepped,
)
from kvslim.layout import PackedLayout

_ALIGNMENT = 16  # bytes, of every part of a slab
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Rows:
    """What the sequences of a batch hold.

    Attributes
    ----------
    counts : Tensor of shape (batch, 5), int32
        Blocks, packed tokens, sinks, exact tokens with the sinks, holes.
    blocks : Tensor of shape (batch, most blocks, 4), int32
        Slab, block in the slab, packed tokens before it, valid tokens.
    holes : Tensor of shape (batch, most holes, 2), int32
        Column ranges of padding, which is not stored.
    most_packed, most_exact : int
        Most packed and exact tokens of a sequence.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    holes: torch.Tensor
    most_packed: int
    most_exact: int


@dataclass(frozen=True)
class Queries:
    """Queries in the basis of packed keys.

    Attributes
    ----------
    rows : Tensor of shape (batch, kv_heads, rows, width), fp32
        The rows of a kv head are ``position * group + head in group``.
    bias : Tensor of shape (batch, kv_heads, rows), fp32
        Added to the scores of every packed token.
    pages : Tensor of shape (batch, kv_heads, rows, blocks), fp32, or None
        Added to those of each block.
    """

    rows: torch.Tensor
    bias: torch.Tensor
    pages: torch.Tensor | None


@dataclass(frozen=True)
class Sums:
    """Normalized sums, rows as in `Queries`.

    Attributes
    ----------
    packed : Tensor of shape (batch, kv_heads, rows, width), fp32, or None
        Of packed values in their basis.
    mass : Tensor of shape (batch, kv_heads, rows), fp32, or None
        Probability of all packed tokens.
    exact : Tensor of shape (batch, kv_heads, rows, value_head_dim), fp32
    """

    packed: torch.Tensor | None
    mass: torch.Tensor | None
    exact: torch.Tensor


class Reader:
    """Attention over packed blocks of two layouts.

    Parameters
    ----------
    layouts : (PackedLayout, PackedLayout)
        Of K and V.
    tables : (Tensor or None, Tensor or None)
        TABLE of each side.
    kv_heads : int
    head_dims : (int, int)
    device : torch.device
    family : str
        A key of `configs.FAMILIES`.
    multiprocessors : int

    Raises
    ------
    NoTritonFormError
        A layout that the kernels do not read.
    """

    def __init__(
        self,
        layouts: tuple[PackedLayout, PackedLayout],
        tables: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        kv_heads: int,
        head_dims: tuple[int, int],
        device: torch.device,
        family: str,
        multiprocessors: int,
    ):
        self.key, self.value = (
            side_form(layout, table, side, arithmetic=FAMILIES[family].arithmetic, widest=FAMILIES[family].widest)
            for layout, table, side in zip(layouts, tables, "kv", strict=True)
        )
        self._tables = [
            kernel_table(form, table).to(device) for form, table in zip((self.key, self.value), tables, strict=True)
        ]
        self.kv_heads, self.head_dims = kv_heads, head_dims
        self.device, self.family, self.multiprocessors = device, family, multiprocessors
        self._addresses = torch.zeros(0, ADDRESSES, dtype=torch.int64, device=device)

    def point_at_pool(self, slabs: Sequence[Mapping[str, Mapping[str, torch.Tensor]]]) -> None:
        """Take the addresses of the pool's slabs; needed again whenever the pool has grown."""
        rows = [
            [slab[side][name].data_ptr() if name in slab[side] else 0 for side in "kv" for name in part_names()]
            for slab in slabs
        ]
        if any(address % _ALIGNMENT for row in rows for address in row):
            raise NoTritonFormError(f"a pool whose parts are not aligned to {_ALIGNMENT} bytes")
        self._addresses = torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, ADDRESSES)

    def run(
        self,
        rows: Rows,
        queries: Queries | None,
        query: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        chunk: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        *,
        first_query: int,
        length: int,
        causal: bool,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> Sums:
        """Attend.

        Parameters
        ----------
        rows : Rows
        queries : Queries or None
            None where no sequence has packed tokens.
        query : Tensor of shape (batch, heads, positions, head_dim)
            As the model made them: those of the chunk from `first_query` on.
        stored : (Tensor, Tensor)
            Exact keys and values of the store, (batch, kv_heads, slots, head_dim), contiguous.
        chunk : (Tensor, Tensor)
            Of shape (batch, kv_heads, chunk, head_dim).
        mask : Tensor of shape (batch, 1 or heads, whole chunk, columns), bool or float, or None
        first_query, length : int
            Place of the first query in the chunk; columns stored.
        causal, scaling, softcap, sinks
            As in the reference.
        """
        batch, heads, positions, _ = query.shape
        group = heads // self.kv_heads
        count = positions * group
        query, chunk = self._one_dtype(query, stored, chunk)
        width = max(self.value.width if queries is not None else 0, self.head_dims[1])
        lanes = [power_of_two(size) for size in self.head_dims]
        widths = (self.key.width, self.value.width) if queries is not None else ()
        own = config(self.family, max(*lanes, *map(power_of_two, widths)), count)
        tiles = -(-count // own.rows)
        programs = tiles * self.kv_heads * batch
        shares = 0 if queries is None else splits(self.family, rows.most_packed, programs, self.multiprocessors)
        exact_shares = splits(self.family, rows.most_exact + chunk[0].shape[2], programs, self.multiprocessors)
        packed = self._packed_arguments(queries, count)
        sums = query.new_empty(batch, self.kv_heads, count, shares + exact_shares, width, dtype=torch.float32)
        state = query.new_empty(batch, self.kv_heads, count, shares + exact_shares, 2, dtype=torch.float32)
        kind, seen, strides = _mask_arguments(mask, query)
        forms = (self.key, self.value) if queries is not None else (None, None)
        attend_shares[tiles * (shares + exact_shares), self.kv_heads, batch](
            *packed, self._addresses, rows.blocks, *self._tables, query, *stored, *chunk, rows.counts, seen, rows.holes,
            sums, state, count, first_query, chunk[0].shape[2], length, rows.blocks.shape[1], rows.holes.shape[1],
            shares, exact_shares, stored[0].shape[2], width, *query.stride()[:3], *chunk[0].stride()[:3],
            *chunk[1].stride()[:3], *strides, scaling, softcap or 0.0,
            **constants(self.family, own, forms, self.head_dims), KV_HEADS=self.kv_heads, GROUP=group, MASK_KIND=kind,
            CAUSAL=causal and mask is None, SOFTCAP=softcap is not None,
            PAGES=queries is not None and queries.pages is not None, **compiler_options(self.family, own),
        )  # fmt: skip
        return self._merge(sums, state, sinks, shares, exact_shares, group)

    def _packed_arguments(self, queries: Queries | None, count: int) -> tuple[torch.Tensor, ...]:
        """Queries scaled by powers of two into the range of the dot's dtype, what that rounds off, scale, biases."""
        none = torch.empty(0, dtype=torch.float32, device=self.device)
        if queries is None:
            return (none,) * 5
        _, exponent = torch.frexp(queries.rows.abs().amax(-1))
        factor = torch.ldexp(torch.ones_like(queries.bias), exponent)
        scaled = queries.rows / factor[..., None]
        high = scaled.to(_DTYPES[self.key.dot])
        rest = (scaled - high.float()).to(high.dtype) if self.key.offset else high
        pages = none if queries.pages is None else queries.pages
        return high.contiguous(), rest.contiguous(), factor, queries.bias.contiguous(), pages

    def _one_dtype(
        self, query: torch.Tensor, stored: tuple[torch.Tensor, torch.Tensor], chunk: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Queries in the dtype that exact tokens are multiplied in; fp32 where they differ."""
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, *chunk))
        if len({query.dtype, key.dtype, value.dtype, *(x.dtype for x in stored)}) > 1:
            query = query.float()
        return query, (key, value)

    def _merge(
        self,
        sums: torch.Tensor,
        state: torch.Tensor,
        sinks: torch.Tensor | None,
        shares: int,
        exact_shares: int,
        group: int,
    ) -> Sums:
        batch, kv_heads, count, _, width = sums.shape
        packed_width = self.value.width if shares else 0
        packed = sums.new_empty(batch, kv_heads, count, packed_width)
        mass = sums.new_empty(batch, kv_heads, count)
        exact = sums.new_empty(batch, kv_heads, count, self.head_dims[1])
        merge_shares[count, kv_heads, batch](
            sums, state, sums if sinks is None else sinks.contiguous(), packed, mass, exact, count, shares,
            exact_shares, width, packed_width, KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=self.head_dims[1],
            LANES=power_of_two(width), HAS_SINKS=sinks is not None,
        )  # fmt: skip
        return Sums(packed, mass, exact) if shares else Sums(None, None, exact)


def _mask_arguments(mask: torch.Tensor | None, query: torch.Tensor) -> tuple[str, torch.Tensor, tuple[int, int, int]]:
    """Kind of the mask, the mask, and its strides by sequence, head and query."""
    if mask is None:
        return "none", query, (0, 0, 0)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    batch, head, position = (
        stride if size > 1 else 0 for stride, size in zip(mask.stride()[:3], mask.shape[:3], strict=True)
    )
    kind = "bool" if mask.dtype == torch.bool else "float"
    return kind, mask.view(torch.uint8) if kind == "bool" else mask, (batch, head, position)


def constants(
    family: str, own: Config, forms: tuple[SideForm | None, SideForm | None], head_dims: tuple[int, int]
) -> dict[str, Any]:
    """Compile-time arguments of `attend_shares` that follow from what is stored; no forms where nothing is packed."""
    key, value = (None if form is None else stepped(form, own.tokens) for form in forms)
    lanes, value_lanes = (power_of_two(size) for size in head_dims)
    return {
        "K": key, "V": value, "HEAD_DIM": head_dims[0], "VALUE_DIM": head_dims[1],
        "ROWS_TILE": own.rows, "TOKENS": own.tokens, "EXACT_TOKENS": own.exact_tokens,
        "LANES": min(own.lanes, lanes), "VALUE_LANES": value_lanes,
        "LOOKUP": FAMILIES[family].lookup, "RELOAD": own.reload,
    }  # fmt: skip
