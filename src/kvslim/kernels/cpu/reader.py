"""Reader: native attention over one layer. Equals kvslim.attention.reference.attend to 5e-6 of the largest output.

Where it multiplies integers (`takes_integers`) to 2e-4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from kvslim.codecs.levels import integer_unit
from kvslim.kernels.cpu import abi
from kvslim.kernels.cpu.chain import NoNativeFormError
from kvslim.kernels.cpu.library import Library
from kvslim.layout import PackedLayout, part_nbytes

_MAX_WIDTH = 1024  # MAX_DIM of native/rows.h
# multiplications below which a call stays on one thread: about 0.1 ms, what waking another one may cost
_SMALL = 2_000_000
_PART_FIELDS = {part: part for part in ("code", "token", "zero", "channel", "offset")} | {"block": "scale"}

_INTEGER_ISAS = ("avx2", "avx512")  # KVS_INTEGER of native/dots.h


def takes_integers(isa: str, layout: PackedLayout, table: torch.Tensor | None) -> bool:
    """Whether products with a side's levels are integers on `isa`, as native/dots.h has it."""
    segment = layout.segments[0]
    readable = len(layout.segments) == 1 and segment.width % 32 == 0 and segment.bits in (2, 3, 4, 8)
    return isa in _INTEGER_ISAS and readable and table is not None and integer_unit(table) > 0


class Reader:
    """Attention over packed blocks of two layouts.

    Parameters
    ----------
    layouts : (PackedLayout, PackedLayout)
        Of K and V.
    kv_heads : int

    Raises
    ------
    NoNativeFormError
        A layout is wider than the kernels go.
    """

    def __init__(self, layouts: tuple[PackedLayout, PackedLayout], kv_heads: int):
        self._call = abi.Attend(kv_heads=kv_heads)
        self._sides = (self._call.key, self._call.value)
        self._kept: list[object] = []
        for side, layout in zip(self._sides, layouts, strict=True):
            _describe(side, layout, kv_heads)

    def point_at_pool(self, slabs: Sequence[Mapping[str, Mapping[str, torch.Tensor]]], starts: Sequence[int]) -> None:
        """Take the addresses of the pool's slabs; needed again whenever the pool has grown."""
        first = (ctypes.c_int64 * max(1, len(starts)))(*starts)
        self._kept = [first]
        self._call.slab_starts, self._call.slab_count = ctypes.addressof(first), len(starts)
        for name, side in zip("kv", self._sides, strict=True):
            for part, field in _PART_FIELDS.items():
                if slabs and part in slabs[0][name]:
                    addresses = (ctypes.c_void_p * len(slabs))(*(slab[name][part].data_ptr() for slab in slabs))
                    self._kept.append(addresses)
                    getattr(side, field).slabs = ctypes.addressof(addresses)

    def run(
        self,
        library: Library,
        rows: ctypes.Array[abi.Row],
        query: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        chunk: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        *,
        length: int,
        causal: bool,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend; shapes as in the reference, `rows` one per sequence.

        Returns
        -------
        Tensor of shape (batch, heads, chunk, value_head_dim)
            A view of (batch, chunk, heads, value_head_dim), contiguous.
        """
        call = self._call
        query = _rows_contiguous(query)
        chunk = _rows_contiguous(chunk[0]), _rows_contiguous(chunk[1])
        batch, heads, queries, _ = query.shape
        out = query.new_empty(batch, queries, heads, chunk[1].shape[-1])
        call.heads, call.batch, call.queries, call.chunk_tokens = heads, batch, queries, chunk[0].shape[2]
        call.rows = ctypes.addressof(rows)
        call.stored.point(*stored)
        call.chunk.point(*chunk)
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.query_row, call.query_head, call.query_token, _ = query.stride()
        call.query_dtype = call.out_dtype = abi.DTYPES[query.dtype]
        call.mask = None
        if mask is not None:
            if mask.dtype not in abi.DTYPES:
                mask = mask.float()
            mask = _rows_contiguous(mask)
            call.mask, call.mask_dtype = mask.data_ptr(), abi.DTYPES[mask.dtype]
            call.mask_row, call.mask_head, call.mask_query, _ = (
                stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)
            )
        call.length, call.causal, call.scaling, call.softcap = length, causal, scaling, softcap or 0.0
        logits = None if sinks is None else sinks.float().contiguous()
        call.sinks = None if logits is None else logits.data_ptr()
        tokens = sum(row.packed + row.exact + chunk[0].shape[2] for row in rows)
        work = tokens * queries * heads * (chunk[0].shape[-1] + chunk[1].shape[-1])
        threads = torch.get_num_threads() if work > _SMALL else 1
        if library.attend(ctypes.addressof(call), threads):
            raise MemoryError("native attention ran out of memory")
        return out.transpose(1, 2)


def _describe(side: abi.Side, layout: PackedLayout, kv_heads: int) -> None:
    side.head_dim, side.block, side.segments = layout.head_dim, layout.block, len(layout.segments)
    side.width = sum(segment.width for segment in layout.segments)
    if max(side.width, side.head_dim) > _MAX_WIDTH:
        raise NoNativeFormError(f"head_dim={layout.head_dim}: the kernels go to {_MAX_WIDTH} stored channels")
    for target, segment in zip(side.segment, layout.segments, strict=False):
        target.width, target.bits, target.group = segment.width, segment.bits, segment.group
    for part in layout.parts:
        target = getattr(side, _PART_FIELDS[part.name])
        target.head_stride = part_nbytes(part)
        target.block_stride = target.head_stride * kv_heads
        target.dtype, target.count = abi.PART_DTYPES[part.dtype], part.shape[-1]


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where the last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
