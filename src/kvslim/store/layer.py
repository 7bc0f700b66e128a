"""LayerStore: everything one layer holds. Exact tokens in one preallocated buffer, sealed blocks in the pool.

A sequence (row) of a layer is, in order: `sinks` exact first tokens, `packed` tokens in blocks, `tail` exact latest
tokens. Sinks and tail share a buffer of ``sinks + recent + block`` slots per row, so the exact part of a row is one
slice and a decode step copies one token. Padding is never stored: a row remembers which columns were padding as
`holes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from kvslim.calibration import check_fit
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.kernels.encode import encode
from kvslim.layout import PackedBlock
from kvslim.store.pool import Pool
from kvslim.store.table import BlockTable, Entry, Placement
from kvslim.transforms.base import Sample

_BATCH = 8  # blocks encoded at once: bounds the fp32 copies made while a long prompt is sealed
_SAMPLE = 8192  # tokens that transform parameters are fitted on at most


@dataclass
class Row:
    """Counts of one sequence in one layer; see the module docstring."""

    sinks: int = 0
    packed: int = 0
    tail: int = 0
    holes: tuple[tuple[int, int], ...] = ()
    frozen: tuple[Frozen, Frozen] | None = None
    moment: torch.Tensor | None = None  # running sum of q q^T until the parameters are frozen
    queries: int = 0
    origin: int = 0  # position of the first token

    @property
    def tokens(self) -> int:
        """Real tokens of the sequence."""
        return self.sinks + self.packed + self.tail


@dataclass
class Before:
    """What a layer was before a chunk came in. Exact slots are kept only where sealing overwrites them."""

    rows: list[Row]
    length: int
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    exact_shared: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the exact slots that are kept."""
        return sum(tensor.nbytes for tensor in self.exact or ())


@dataclass
class RowView:
    """What attention reads of one sequence. Tensors are views into the store.

    Attributes
    ----------
    key, value : Tensor of shape (kv_heads, sinks + tail, head_dim)
        Exact tokens, sinks first.
    sinks : int
    entries : list of Entry
        Packed blocks with their valid tokens.
    frozen : (Frozen, Frozen) or None
        Parameters of K and V.
    columns : Tensor of shape (tokens,), int64, or None
        Mask column of each stored token, None where they are simply 0, 1, 2, ...
    packed : int
        Tokens in `entries`.
    origin : int
        Position of the sequence's first token.
    """

    key: torch.Tensor
    value: torch.Tensor
    sinks: int
    entries: list[Entry]
    frozen: tuple[Frozen, Frozen] | None
    columns: torch.Tensor | None
    packed: int = 0
    origin: int = 0


def exact_slots(sinks: int, recent: int, block: int, immediate: bool) -> int:
    """Exact slots per row."""
    return sinks + (0 if immediate else recent + block)


def sealable(tokens: int, recent: int, block: int, immediate: bool) -> int:
    """How many of so many tokens after the sinks go into blocks."""
    return tokens if immediate else max(0, tokens - recent) // block * block


class LayerStore:
    """Tokens of one layer for all sequences of a cache.

    Parameters
    ----------
    packers : (SidePacker, SidePacker)
        K and V.
    table : BlockTable
        Shared by the layers of a cache.
    kv_heads : int
    head_dims : (int, int)
        Of K and V.
    sinks, recent : int
    immediate : bool
        No tail: tokens are packed one by one.
    dtypes : (torch.dtype, torch.dtype)
        Of the exact tokens of K and V.
    device : torch.device
    pool : Pool, optional
        That of the cache this one is forked from.
    prior : callable, optional
        Calibration of this layer; it belongs to the model and is not counted here.
    """

    def __init__(
        self,
        packers: tuple[SidePacker, SidePacker],
        table: BlockTable,
        *,
        kv_heads: int,
        head_dims: tuple[int, int],
        sinks: int,
        recent: int,
        immediate: bool,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        pool: Pool | None = None,
        prior: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ):
        self.packers = packers
        self.prior = prior
        self.table = table
        self.kv_heads, self.head_dims = kv_heads, head_dims
        self.sinks, self.recent, self.immediate = sinks, recent, immediate
        self.dtypes, self.device = dtypes, device
        self.pool = pool or Pool(packers[0].layout, packers[1].layout, kv_heads, device)
        self.rows: list[Row] = []
        self.key_mean_share = 0.0  # |mean key| / rms key, largest over heads, once parameters are frozen
        self.length = 0  # columns seen, padding included: what the framework calls the sequence length
        self.key = self.value = torch.empty(0)
        self._exact_shared = False  # with forks, until the next token comes in

    # -- what is held ---------------------------------------------------------------------------------------------

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.table.block

    @property
    def slots(self) -> int:
        """Exact slots per row."""
        return exact_slots(self.sinks, self.recent, self.block, self.immediate)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor this layer keeps alive."""
        yield from (self.key, self.value)
        yield from self.pool.tensors()
        yield from self._parameters()
        yield from (row.moment for row in self.rows if row.moment is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors`."""
        own = self.key.nbytes + self.value.nbytes + self.pool.nbytes
        own += sum(tensor.nbytes for tensor in self._parameters())
        return own + sum(row.moment.nbytes for row in self.rows if row.moment is not None)

    def _parameters(self) -> Iterable[torch.Tensor]:
        """Frozen tensors, each once: forks share all of them, sequences their code tables."""
        frozen = {id(side): side for row in self.rows for side in row.frozen or ()}.values()
        return {id(tensor): tensor for side in frozen for tensor in side.tensors().values()}.values()

    def view(self, index: int) -> RowView:
        """Return what attention reads of sequence `index`."""
        row = self.rows[index]
        exact = row.sinks + row.tail
        columns = None
        if row.holes:
            keep = torch.ones(self.length, dtype=torch.bool, device=self.device)
            for start, stop in row.holes:
                keep[start:stop] = False
            columns = keep.nonzero().squeeze(-1)
        entries = self.table.entries(index, row.packed) if row.packed else []
        return RowView(
            self.key[index, :, :exact],
            self.value[index, :, :exact],
            row.sinks,
            entries,
            row.frozen,
            columns,
            row.packed,
            row.origin,
        )

    # -- append and seal ------------------------------------------------------------------------------------------

    def start(self, rows: int) -> None:
        """Begin with `rows` empty sequences."""
        self.rows = [Row() for _ in range(rows)]
        self.length, self._exact_shared = 0, False
        shape = (rows, self.kv_heads, self.slots)
        self.key = torch.zeros((*shape, self.head_dims[0]), dtype=self.dtypes[0], device=self.device)
        self.value = torch.zeros((*shape, self.head_dims[1]), dtype=self.dtypes[1], device=self.device)

    def settle(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        real: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> Before:
        """Take in a chunk whose attention is done, and seal what left the recent window.

        If that fails the layer is as before; what comes back undoes it later (`restore`).

        Parameters
        ----------
        key, value : Tensor of shape (batch, kv_heads, chunk, head_dim)
        query : Tensor of shape (batch, heads, chunk, head_dim)
            For parameters that depend on queries; read only until they are frozen.
        real : Tensor of shape (batch, chunk), bool, or None
            False where the column is padding; None where none is.
        positions : Tensor of shape (batch or 1, chunk), int64, or None
            Position ids; only the first one of a sequence is read. None: a sequence begins at 0.
        """
        before = Before([replace(row) for row in self.rows], self.length)
        try:
            for index, row in enumerate(self.rows):
                k, v, q = key[index], value[index], query[index]
                if positions is not None and not row.tokens:
                    first = 0 if real is None else int(real[index].int().argmax())
                    row.origin = int(positions[index if len(positions) > 1 else 0, first])
                if real is not None and not bool(real[index].all()):
                    keep = real[index].nonzero().squeeze(-1)
                    k, v, q = k[:, keep], v[:, keep], q[:, keep]
                    row.holes = _add_holes(row.holes, self.length, real[index])
                self._settle_row(index, row, k, v, q, before)
        except BaseException:
            self.restore(before)
            raise
        self.length += key.shape[2]
        return before

    def restore(self, before: Before) -> None:
        """Be again what `before` says; blocks taken since are the table's business."""
        self.rows, self.length = before.rows, before.length
        if before.exact is not None:
            self.key, self.value = before.exact
            self._exact_shared = before.exact_shared

    def _settle_row(
        self, index: int, row: Row, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, before: Before
    ) -> None:
        if row.frozen is None and self.packers[0].needs_queries:
            self._observe(row, q)
        first = min(self.sinks - row.sinks, k.shape[1]) if row.packed == row.tail == 0 else 0
        if first:
            self._write_exact(index, row.sinks, k[:, :first], v[:, :first])
            row.sinks += first
            k, v = k[:, first:], v[:, first:]
        total = row.tail + k.shape[1]
        seal = sealable(total, self.recent, self.block, self.immediate)
        if not seal:
            self._write_exact(index, row.sinks + row.tail, k, v)
            row.tail = total
            return
        tails = [side[index, :, row.sinks : row.sinks + row.tail] for side in (self.key, self.value)]
        spans = [_Span(tail, new) for tail, new in zip(tails, (k, v), strict=True)]
        if row.frozen is None:
            row.frozen = self._freeze(row, spans)
        self._seal(index, row, spans, seal)
        if row.tail and before.exact is None:
            before.exact, before.exact_shared = self._kept_exact(), self._exact_shared
        row.packed += seal
        row.tail = total - seal
        # the span may still read the tail's old place, so it is copied out before it is written back
        self._write_exact(index, row.sinks, *(span.take(seal, total).clone() for span in spans))

    def _seal(self, index: int, row: Row, spans: list[_Span], count: int) -> None:
        places = self.table.place(index, row.packed, row.packed + count, whole=not self.immediate)
        self.pool.reserve(max(place.block for place in places) + 1)
        for place in places:
            if place.source is not None:
                self.pool.copy(place.source, place.block)
        assert row.frozen is not None
        done, position = 0, row.origin + row.sinks + row.packed
        for group in _groups(places, self.block):
            size = sum(place.tokens for place in group)
            firsts = [position + done - group[0].slot + i * self.block for i in range(len(group))]
            starts = torch.tensor(firsts, device=self.device)
            for name, span, packer, frozen in zip("kv", spans, self.packers, row.frozen, strict=True):
                x = span.take(done, done + size)
                x = x.unflatten(1, (len(group), -1)).transpose(0, 1)  # [blocks, G, tokens, D]
                earlier = self._earlier(index, name, packer.codec.earlier_blocks, row.packed + done)
                packed = encode(packer, x, frozen, starts, earlier)
                if size == len(group) * self.block:
                    self.pool.write(name, [place.block for place in group], packed)
                else:
                    self.pool.write_tokens(name, group[0].block, group[0].slot, packed)
            done += size

    def _earlier(self, index: int, side: str, count: int, packed: int) -> list[tuple[PackedBlock, int]]:
        """Return the last `count` blocks of the first `packed` tokens of a row, each with its valid tokens."""
        entries = self.table.entries(index, packed)[-count:] if count else []
        return [(self.pool.read(side, [entry.block]), entry.valid) for entry in entries]

    def _observe(self, row: Row, q: torch.Tensor) -> None:
        rows = q.float().reshape(self.kv_heads, -1, q.shape[-1])  # the heads of a group lie next to each other
        moment = rows.transpose(-1, -2) @ rows
        row.moment = moment if row.moment is None else row.moment + moment
        row.queries += rows.shape[1]

    def _freeze(self, row: Row, spans: list[_Span]) -> tuple[Frozen, Frozen]:
        moment = None if row.moment is None else row.moment / max(row.queries, 1)
        block, tokens = self.block, spans[0].length
        prior = {name: tensor.to(self.device) for name, tensor in self.prior().items()}
        check_fit(prior, self.kv_heads, self.head_dims[0])
        sample = _thin(spans[0].take(0, tokens)).float()  # one side at a time: fp32 copies stand in a prefill's peak
        self.key_mean_share = max(self.key_mean_share, _mean_share(sample))
        key = self.packers[0].freeze(Sample(sample, moment, block, tokens, prior))
        del sample
        value = self.packers[1].freeze(Sample(_thin(spans[1].take(0, tokens)).float(), block=block, tokens=tokens))
        row.moment, row.queries = None, 0
        return key, value

    def _kept_exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._exact_shared:  # the write that comes now will make this store a copy of its own
            return self.key, self.value
        return self.key.clone(), self.value.clone()

    def _write_exact(self, index: int, slot: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if not k.shape[1]:
            return
        if self._exact_shared:
            self.key, self.value, self._exact_shared = self.key.clone(), self.value.clone(), False
        self.key[index, :, slot : slot + k.shape[1]] = k
        self.value[index, :, slot : slot + v.shape[1]] = v

    # -- operations -----------------------------------------------------------------------------------------------

    def real_tokens(self, row: Row, length: int) -> int:
        """Real tokens among the first `length` columns of `row`."""
        return length - sum(min(stop, length) - start for start, stop in row.holes if start < length)

    def crop(self, length: int) -> list[int]:
        """Keep the first `length` columns; return how many tokens of each row stay in blocks."""
        for row in self.rows:
            keep = self.real_tokens(row, length)
            row.holes = tuple((start, min(stop, length)) for start, stop in row.holes if start < length)
            row.tail = max(0, min(row.tail, keep - row.sinks - row.packed))
            row.packed = max(0, min(row.packed, keep - row.sinks))
            row.sinks = min(row.sinks, keep)
            if keep == 0:
                row.frozen = row.moment = None
                row.queries = row.origin = 0
        self.length = length
        return [row.packed for row in self.rows]

    def pick(self, order: list[int]) -> None:
        """Make row ``i`` what row ``order[i]`` was."""
        self.rows = [replace(self.rows[i]) for i in order]
        at = torch.tensor(order, dtype=torch.long, device=self.device)
        self.key, self.value = self.key.index_select(0, at), self.value.index_select(0, at)
        self._exact_shared = False

    def fork(self, table: BlockTable) -> LayerStore:
        """Return a store with the same tokens; blocks are shared, exact tokens until one of the two gets another."""
        other = LayerStore(
            self.packers,
            table,
            kv_heads=self.kv_heads,
            head_dims=self.head_dims,
            sinks=self.sinks,
            recent=self.recent,
            immediate=self.immediate,
            dtypes=self.dtypes,
            device=self.device,
            pool=self.pool,
            prior=self.prior,
        )
        other.rows = [replace(row) for row in self.rows]
        other.length = self.length
        other.key, other.value = self.key, self.value
        self._exact_shared = other._exact_shared = True
        return other

    def clear(self) -> None:
        """Forget all tokens. Slabs are freed once no fork holds a block."""
        self.rows, self.length = [], 0
        self.key = self.value = torch.empty(0)
        self._exact_shared = False
        if self.table.allocator.in_use == 0:
            self.pool.clear()


class _Span:
    """The tail followed by new tokens, read by range without joining them unless a range straddles both."""

    def __init__(self, tail: torch.Tensor, new: torch.Tensor):
        self.tail, self.new = tail, new
        self.length = tail.shape[1] + new.shape[1]

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Tokens `start` to `stop`, shape (kv_heads, stop - start, head_dim), in the dtype of exact tokens.

        New tokens pass through that dtype as well: otherwise the bytes of a token would depend on whether it waited in
        the tail, that is on how the prompt was cut.
        """
        edge = self.tail.shape[1]
        if stop <= edge:
            return self.tail[:, start:stop]
        new = self.new[:, max(start - edge, 0) : stop - edge].to(self.tail.dtype)
        return new if start >= edge else torch.cat([self.tail[:, start:], new], dim=1)


def _mean_share(keys: torch.Tensor) -> float:
    """|mean| / rms of keys (kv_heads, tokens, head_dim), the largest over heads: 1 where all keys are alike."""
    rms = torch.linalg.vector_norm(keys, dim=(1, 2)) / (keys.shape[1] * keys.shape[2]) ** 0.5
    return float((keys.mean(1).square().mean(-1).sqrt() / rms.clamp_min(1e-30)).max())


def _groups(places: list[Placement], block: int) -> Iterator[list[Placement]]:
    """Whole blocks by the batch, and what fills only part of a block alone."""
    batch: list[Placement] = []
    for place in places:
        if place.tokens < block:
            if batch:
                yield batch
            yield [place]
            batch = []
            continue
        batch.append(place)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _thin(x: torch.Tensor) -> torch.Tensor:
    """Evenly spaced tokens, at most `_SAMPLE`."""
    return x[:, :: max(1, -(-x.shape[1] // _SAMPLE))]


def _add_holes(holes: tuple[tuple[int, int], ...], offset: int, real: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Append the runs of padding in `real` (chunk,) to `holes`, as column ranges."""
    found = list(holes)
    for column in (~real).nonzero().squeeze(-1).tolist():
        at = offset + column
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return tuple(found)
