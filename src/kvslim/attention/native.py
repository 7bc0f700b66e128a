"""Native attention on a LayerStore: keeps what its calls have in common, so that a step only fills in what moved."""

from __future__ import annotations

import ctypes
from array import array

import torch

from kvslim.attention.reference import Score
from kvslim.kernels.cpu import abi
from kvslim.kernels.cpu.chain import NoNativeFormError, native_steps
from kvslim.kernels.cpu.library import Library
from kvslim.kernels.cpu.reader import Reader
from kvslim.store.layer import LayerStore, Row


class NativeLayer:
    """Reads one LayerStore.

    Parameters
    ----------
    store : LayerStore

    Raises
    ------
    NoNativeFormError
        Its layouts have no native form.
    """

    def __init__(self, store: LayerStore):
        key, value = store.packers
        self._reader = Reader((key.layout, value.layout), store.kv_heads)
        self._slabs = -1
        self._rows: ctypes.Array[abi.Row] = (abi.Row * 0)()

    def attend(
        self,
        library: Library,
        query: torch.Tensor,
        store: LayerStore,
        chunk: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        score: Score,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """As kvslim.attention.reference.attend; raises NoNativeFormError before anything is read."""
        if len(self._rows) != len(store.rows):
            self._rows = (abi.Row * len(store.rows))()
        holes = [self._fill(self._rows[i], i, row, store) for i, row in enumerate(store.rows)]
        if self._slabs != store.pool.version:
            self._reader.point_at_pool(store.pool.slabs, store.pool.starts)
            self._slabs = store.pool.version
        out = self._reader.run(
            library,
            self._rows,
            query,
            (store.key, store.value),
            chunk,
            mask,
            length=store.length,
            causal=causal,
            scaling=score.scaling,
            softcap=score.softcap,
            sinks=score.sinks,
        )
        del holes  # the call pointed into them
        return out

    def _fill(self, target: abi.Row, index: int, row: Row, store: LayerStore) -> array[int]:
        target.sinks, target.exact, target.packed, target.origin = (
            row.sinks,
            row.sinks + row.tail,
            row.packed,
            row.origin,
        )
        holes = array("q", [column for hole in row.holes for column in hole])
        target.holes, target.hole_count = (holes.buffer_info()[0] if holes else None), len(row.holes)
        target.entries = 0
        if row.packed:
            assert row.frozen is not None
            key, value = (native_steps(*side) for side in zip(store.packers, row.frozen, strict=True))
            if abi.PAGE in value.kinds:
                raise NoNativeFormError("center:kind=page on values")
            target.key_steps, target.key_step_count = key.address, len(key.kinds)
            target.value_steps, target.value_step_count = value.address, len(value.kinds)
            tables = [side.table for side in row.frozen]
            target.key_table, target.value_table = (None if table is None else table.data_ptr() for table in tables)
            target.key_unit, target.value_unit = key.unit, value.unit
            blocks, valid = store.table.arrays(index)
            target.blocks, target.valid, target.entries = blocks.buffer_info()[0], valid.buffer_info()[0], len(blocks)
            target.copied, target.source = store.table.copied(index)
        return holes
