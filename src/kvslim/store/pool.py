"""Pool: the sealed blocks of one layer. Grows by whole slabs; what is stored is never copied or moved."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvslim.layout import STORAGE, PackedBlock, PackedLayout, block_nbytes

_LARGEST_GROWTH = 64  # blocks; a slab that follows growth one block at a time stays under 1/16 of the pool


def grown(capacity: int, blocks: int) -> int:
    """Blocks that a pool of `capacity` has once it has made room for `blocks`."""
    missing = blocks - capacity
    return capacity if missing <= 0 else capacity + max(missing, min(capacity // 16, _LARGEST_GROWTH))


class Pool:
    """Part tensors of K and V, by block id.

    Parameters
    ----------
    key, value : PackedLayout
    kv_heads : int
    device : torch.device
    """

    def __init__(self, key: PackedLayout, value: PackedLayout, kv_heads: int, device: torch.device):
        self.layouts = {"k": key, "v": value}
        self.kv_heads = kv_heads
        self.device = device
        self.slabs: list[dict[str, dict[str, torch.Tensor]]] = []  # side -> part -> (blocks, kv_heads, ...)
        self.starts: list[int] = []  # first block id of each slab
        self.capacity = 0
        self.version = 0  # changes whenever the slabs do

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, unused blocks included."""
        return self.capacity * self.kv_heads * sum(block_nbytes(layout) for layout in self.layouts.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All slab tensors."""
        for slab in self.slabs:
            for parts in slab.values():
                yield from parts.values()

    def reserve(self, blocks: int) -> None:
        """Make room for block ids below `blocks`."""
        if blocks <= self.capacity:
            return
        count = grown(self.capacity, blocks) - self.capacity
        slab = {
            side: {
                part.name: torch.zeros(
                    (count, self.kv_heads, *part.shape), dtype=STORAGE[part.dtype], device=self.device
                )
                for part in layout.parts
            }
            for side, layout in self.layouts.items()
        }
        self.adopt(slab, count)

    def write(self, side: str, blocks: list[int], packed: PackedBlock) -> None:
        """Store whole blocks; `packed` parts have shape (len(blocks), kv_heads, ...)."""
        for at, slab, rows in self._runs(blocks):
            for name, tensor in packed.parts.items():
                slab[side][name][rows] = tensor[at : at + rows.stop - rows.start]

    def write_tokens(self, side: str, block: int, slot: int, packed: PackedBlock) -> None:
        """Store tokens from `slot` on in one block; parts have shape (1, kv_heads, tokens, ...)."""
        ((_, slab, rows),) = self._runs([block])
        for name, tensor in packed.parts.items():
            slab[side][name][rows, :, slot : slot + tensor.shape[2]] = tensor

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another, both sides."""
        for side in self.layouts:
            self.write(side, [target], self.read(side, [source]))

    def read(self, side: str, blocks: list[int]) -> PackedBlock:
        """Return the parts of `blocks` in order: views where ids follow each other in a slab, else a gathered copy."""
        parts = {part.name: self.read_part(side, part.name, blocks) for part in self.layouts[side].parts}
        return PackedBlock(self.layouts[side], parts)

    def read_part(self, side: str, name: str, blocks: list[int]) -> torch.Tensor:
        """Return one part of `blocks`, as `read` does."""
        pieces = [slab[side][name][rows] for _, slab, rows in self._runs(blocks)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def adopt(self, slab: dict[str, dict[str, torch.Tensor]], blocks: int) -> None:
        """Take tensors that hold `blocks` blocks as the next slab, without copying them."""
        self.slabs.append(slab)
        self.starts.append(self.capacity)
        self.capacity += blocks
        self.version += 1

    def clear(self) -> None:
        """Free all slabs."""
        self.slabs, self.starts, self.capacity = [], [], 0
        self.version += 1

    def _runs(self, blocks: list[int]) -> Iterator[tuple[int, dict[str, dict[str, torch.Tensor]], slice]]:
        """Yield (index into `blocks`, slab, rows of the slab) for runs of consecutive ids."""
        at = 0
        while at < len(blocks):
            which = next(i for i in range(len(self.starts) - 1, -1, -1) if self.starts[i] <= blocks[at])
            start = self.starts[which]
            stop = self.starts[which + 1] if which + 1 < len(self.starts) else self.capacity
            end = at + 1
            while end < len(blocks) and blocks[end] == blocks[end - 1] + 1 and blocks[end] < stop:
                end += 1
            yield at, self.slabs[which], slice(blocks[at] - start, blocks[at] - start + end - at)
            at = end
