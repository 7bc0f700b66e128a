"""Block tables: which sealed blocks a sequence consists of, and who still needs a block.

All packed layers of a cache (and of its forks) share block ids, so one table per sequence serves them all. Rows are
lists of immutable entries; reorder, repeat, select, fork and crop only touch these lists and the reference counts.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvslim.errors import StateError


class Entry(NamedTuple):
    """One block of a sequence.

    Attributes
    ----------
    block : int
        Block id in every layer's pool.
    valid : int
        Leading tokens of the block that belong to the sequence.
    """

    block: int
    valid: int


class Placement(NamedTuple):
    """Where tokens go: `tokens` tokens of a sequence into `block` from slot `slot` on.

    Where there is a `source`, the slots before `slot` are copied from that block first.
    """

    block: int
    slot: int
    tokens: int
    source: int | None = None


class BlockAllocator:
    """Block ids with reference counts; freed ids are handed out again, lowest first."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._free: list[int] = []

    @property
    def in_use(self) -> int:
        """Blocks that some sequence still holds."""
        return len(self._counts) - len(self._free)

    def allocate(self) -> int:
        """Return a block id with one reference."""
        if self._free:
            block = heapq.heappop(self._free)
            self._counts[block] = 1
            return block
        self._counts.append(1)
        return len(self._counts) - 1

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._counts[block]

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block."""
        for block in blocks:
            if self._counts[block] < 1:
                raise StateError(f"block {block} is released more often than it was taken")
            self._counts[block] -= 1
            if self._counts[block] == 0:
                heapq.heappush(self._free, block)


class BlockTable:
    """The block lists of all sequences (rows) of one cache.

    Parameters
    ----------
    allocator : BlockAllocator
        Shared by forks.
    block : int
        Tokens per block, P.
    """

    def __init__(self, allocator: BlockAllocator, block: int):
        self.allocator = allocator
        self.block = block
        self.rows: list[list[Entry]] = []
        self._sources: dict[int, tuple[int, int]] = {}  # row -> (block begun in the last pass, block it continues)
        self._arrays: dict[int, tuple[array[int], array[int]]] = {}

    def start(self, rows: int) -> None:
        """Begin with `rows` empty sequences."""
        self.clear()
        self.rows = [[] for _ in range(rows)]

    def adopt(self, rows: list[list[Entry]], blocks: int) -> list[int]:
        """Begin with `rows` over new blocks, which are returned; entries count them from 0, and hold each of them."""
        self.clear()
        taken = [self.allocator.allocate() for _ in range(blocks)]
        self.rows = [[Entry(taken[block], valid) for block, valid in row] for row in rows]
        for row in self.rows:
            self.allocator.retain(entry.block for entry in row)
        self.allocator.release(taken)
        return taken

    def clear(self) -> None:
        """Let go of all blocks."""
        for row in self.rows:
            self.allocator.release(entry.block for entry in row)
        self.rows, self._sources, self._arrays = [], {}, {}

    def tokens(self, row: int) -> int:
        """Tokens in the blocks of `row`."""
        return sum(entry.valid for entry in self.rows[row])

    def entries(self, row: int, tokens: int) -> list[Entry]:
        """Return the entries that cover the first `tokens` tokens, the last one cut to fit.

        Fewer tokens than the row has means a layer that an earlier one is ahead of: it has not copied its part of a
        block begun in this pass yet, and gets the block to copy from.
        """
        covered: list[Entry] = []
        for entry in self.rows[row]:
            if tokens <= 0:
                break
            covered.append(Entry(entry.block, min(entry.valid, tokens)))
            tokens -= entry.valid
        if covered and tokens < 0 and covered[-1].block == self._copied(row)[0]:
            covered[-1] = Entry(self._sources[row][1], covered[-1].valid)
        return covered

    def arrays(self, row: int) -> tuple[array[int], array[int]]:
        """Return block ids and valid tokens of `row` as int32 arrays; they grow with the row and are not to be kept."""
        blocks, valid = self._arrays.setdefault(row, (array("i"), array("i")))
        entries = self.rows[row]
        if len(blocks) > len(entries):
            del blocks[len(entries) :], valid[len(entries) :]
        if blocks:  # only the last block of a row is ever filled up or replaced by a copy
            blocks[-1], valid[-1] = entries[len(blocks) - 1]
        for block, count in entries[len(blocks) :]:
            blocks.append(block)
            valid.append(count)
        return blocks, valid

    def copied(self, row: int) -> tuple[int, int]:
        """Block begun in the last pass as a copy, and the block it continues; -1 where there is none."""
        return self._sources.get(row, (-1, -1))

    def _copied(self, row: int) -> tuple[int, int] | tuple[None, None]:
        """Block begun in the last pass as a copy, and the block it continues."""
        return self._sources.get(row, (None, None))

    def place(self, row: int, first: int, last: int, *, whole: bool) -> list[Placement]:
        """Return the slots of tokens `first` to `last`, taking new blocks where the row does not reach that far yet.

        The first layer that seals extends the row; the layers after it find the slots already there. With `whole`, new
        tokens always begin a new block. Otherwise the row's last block is filled up first; a shared one is never
        written, so a copy takes its place.
        """
        entries = self.rows[row]
        missing = last - self.tokens(row)
        if missing > 0:
            self._sources.pop(row, None)
        if missing > 0 and not whole and entries and entries[-1].valid < self.block:
            block, valid = entries[-1]
            if self.allocator.references(block) > 1:
                shared, block = block, self.allocator.allocate()
                self.allocator.release([shared])
                self._sources[row] = block, shared
            take = min(missing, self.block - valid)
            entries[-1] = Entry(block, valid + take)
            missing -= take
        while missing > 0:
            entries.append(Entry(self.allocator.allocate(), min(missing, self.block)))
            missing -= self.block
        placements, start = [], self.tokens(row)
        for block, valid in reversed(entries):
            start -= valid
            slot, stop = max(first - start, 0), min(last - start, valid)
            if slot < stop:
                copied, source = self._copied(row)
                placements.append(Placement(block, slot, stop - slot, source if block == copied else None))
            if start <= first:
                break
        return placements[::-1]

    def crop(self, row: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of `row`; blocks past them are let go."""
        self._sources.pop(row, None)
        kept = self.entries(row, tokens)
        self.allocator.release(entry.block for entry in self.rows[row][len(kept) :])
        self.rows[row] = kept
        self._arrays.pop(row, None)

    def pick(self, order: list[int]) -> None:
        """Make row ``i`` what row ``order[i]`` was: reorder, repeat and select in one."""
        picked = [list(self.rows[i]) for i in order]
        for row in picked:
            self.allocator.retain(entry.block for entry in row)
        self.clear()
        self.rows = picked

    def snapshot(self) -> list[list[Entry]]:
        """Return the rows as they are, for `restore`; holds no blocks."""
        return [list(row) for row in self.rows]

    def restore(self, rows: list[list[Entry]]) -> None:
        """Be what `snapshot` returned, a pass ago: what has been taken since is let go."""
        for row in rows:
            self.allocator.retain(entry.block for entry in row)
        self.clear()
        self.rows = rows

    def fork(self) -> BlockTable:
        """Return a table with the same sequences; blocks are shared. Without sequences, it is a table of its own."""
        other = BlockTable(self.allocator if self.rows else BlockAllocator(), self.block)
        other.rows = [list(row) for row in self.rows]
        for row in other.rows:
            self.allocator.retain(entry.block for entry in row)
        return other

    def __del__(self) -> None:
        # a cache that is dropped must not keep the blocks it shares with its forks alive
        self.clear()
