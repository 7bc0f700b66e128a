"""Triton attention on a LayerStore: what the kernels need of the store, and the transforms around them, in torch."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from kvslim.attention.reference import Score
from kvslim.kernels.triton.form import NoTritonFormError
from kvslim.kernels.triton.reader import Queries, Reader, Rows, Sums
from kvslim.store.layer import LayerStore
from kvslim.store.table import BlockTable
from kvslim.transforms.center import PageMean

_POSITIONS = 1024  # query positions per launch, so that sums stay bounded in a long prefill

# what was last sent to the device for the layers of a cache, which all need the same: (content, its copy there) by name
_SENT: WeakKeyDictionary[BlockTable, dict[str, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


class TritonLayer:
    """Reads one LayerStore.

    Parameters
    ----------
    store : LayerStore
    family : str
        GPU family, a key of kvslim.kernels.triton.configs.FAMILIES.
    multiprocessors : int

    Raises
    ------
    NoTritonFormError
        Its layouts have no form for the kernels.
    """

    def __init__(self, store: LayerStore, family: str, multiprocessors: int):
        key, value = store.packers
        self.family = family
        self._reader = Reader(
            (key.layout, value.layout),
            (key.codec.table(), value.codec.table()),
            kv_heads=store.kv_heads,
            head_dims=store.head_dims,
            device=store.device,
            family=family,
            multiprocessors=multiprocessors,
        )
        self._version = -1

    def attend(
        self,
        query: torch.Tensor,
        store: LayerStore,
        chunk: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        score: Score,
        *,
        causal: bool = True,
    ) -> torch.Tensor:
        """As kvslim.attention.reference.attend; raises NoTritonFormError before anything is read."""
        self._check(store)
        if self._version != store.pool.version:
            self._reader.point_at_pool(store.pool.slabs)
            self._version = store.pool.version
        rows = _rows(store)
        out = query.new_empty(*query.shape[:3], chunk[1].shape[-1])
        for start in range(0, query.shape[2], _POSITIONS):
            part = query[:, :, start : start + _POSITIONS]
            sums = self._reader.run(
                rows,
                _transformed(part, store, rows),
                part,
                (store.key, store.value),
                chunk,
                mask,
                first_query=start,
                length=store.length,
                causal=causal,
                scaling=score.scaling,
                softcap=score.softcap,
                sinks=score.sinks,
            )
            out[:, :, start : start + _POSITIONS] = (
                _undone(sums, store).unflatten(2, (part.shape[2], -1)).permute(0, 1, 3, 2, 4).flatten(1, 2)
            )
        return out

    @staticmethod
    def _check(store: LayerStore) -> None:
        for row in store.rows:
            if row.frozen is not None and any(isinstance(step, PageMean) for step in row.frozen[1].chain.steps):
                raise NoTritonFormError("center:kind=page on values")


def _rows(store: LayerStore) -> Rows:
    table = store.table
    sent = _SENT.setdefault(table, {})
    blocks, counts, holes = [], [], []
    for index, row in enumerate(store.rows):
        entries = _entries(store, index)
        blocks.append(entries)
        holes.append(row.holes)
        counts.append((len(entries), row.packed, row.sinks, row.sinks + row.tail, len(row.holes)))
    packed = torch.zeros(len(blocks), max(map(len, blocks)), 4, dtype=torch.int32)
    for index, entries in enumerate(blocks):
        packed[index, : len(entries)] = entries
    padding = torch.zeros(len(holes), max(map(len, holes)), 2, dtype=torch.int32)
    for index, ranges in enumerate(holes):
        padding[index, : len(ranges)] = torch.tensor(ranges, dtype=torch.int32).view(-1, 2)
    tensors = {"counts": torch.tensor(counts, dtype=torch.int32), "blocks": packed, "holes": padding}
    on_device = {name: _send(sent, name, tensor, store.device) for name, tensor in tensors.items()}
    most_packed, most_exact = (max(row[column] for row in counts) for column in (1, 3))
    return Rows(**on_device, most_packed=most_packed, most_exact=most_exact)


def _send(
    sent: dict[str, tuple[torch.Tensor, torch.Tensor]], name: str, tensor: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """`tensor` on `device`; the copy of the layer before where it is the same."""
    last = sent.get(name)
    if last is None or last[1].device != device or not torch.equal(last[0], tensor):
        last = sent[name] = tensor, tensor.to(device)
    return last[1]


def _entries(store: LayerStore, index: int) -> torch.Tensor:
    """Slab, block in the slab, packed tokens before it and valid tokens of the blocks that hold a sequence, int32."""
    packed = store.rows[index].packed
    if not packed:
        return torch.zeros(0, 4, dtype=torch.int32)
    ids, valid = (torch.tensor(column, dtype=torch.int32) for column in store.table.arrays(index))
    before = valid.cumsum(0, dtype=torch.int32) - valid
    count = int((before < packed).sum())
    ids, valid, before = ids[:count].clone(), valid[:count], before[:count]
    begun, source = store.table.copied(index)
    if int(ids[-1]) == begun and int(before[-1] + valid[-1]) > packed:
        ids[-1] = source  # an earlier layer is ahead of this one, which has not copied its part of the block yet
    starts = torch.tensor(store.pool.starts, dtype=torch.int32)
    slab = torch.searchsorted(starts, ids, right=True, out_int32=True) - 1
    return torch.stack((slab, ids - starts[slab.long()], before, valid), dim=1)


def _transformed(query: torch.Tensor, store: LayerStore, rows: Rows) -> Queries | None:
    """Queries in the basis of each sequence's packed keys; None where nothing is packed."""
    if not rows.most_packed:
        return None
    batch, heads, positions, _ = query.shape
    split = query.view(batch, store.kv_heads, heads // store.kv_heads, positions, -1).transpose(2, 3).flatten(2, 3)
    width = sum(segment.width for segment in store.packers[0].layout.segments)
    out = torch.zeros(*split.shape[:3], width, dtype=torch.float32, device=query.device)
    bias = torch.zeros(split.shape[:3], dtype=torch.float32, device=query.device)
    pages = None
    for index, row in enumerate(store.rows):
        if row.frozen is None or not row.packed:
            continue
        chain = row.frozen[0].chain
        own = split[index].float()
        mapped, added = chain.query(own)
        out[index] = store.packers[0].codec.expand_query(mapped)
        if added is not None:
            bias[index] = added.squeeze(-1)
        starts = rows.blocks[index, :, 2] + (row.origin + row.sinks)
        offsets = chain.offset_scores(own, starts)
        if offsets is not None:
            pages = bias.new_zeros(*bias.shape, rows.blocks.shape[1]) if pages is None else pages
            pages[index] = offsets
    return Queries(out, bias, pages)


def _undone(sums: Sums, store: LayerStore) -> torch.Tensor:
    """Attention output (batch, kv_heads, rows, value_head_dim): packed sums mapped back, exact ones added."""
    if sums.packed is None or sums.mass is None:
        return sums.exact
    out = sums.exact
    for index, row in enumerate(store.rows):
        if row.frozen is not None and row.packed:
            packed = store.packers[1].codec.reduce_output(sums.packed[index])
            out[index] += row.frozen[1].chain.output(packed, sums.mass[index].unsqueeze(-1))
    return out
