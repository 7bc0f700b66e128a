"""Step: one forward pass through the layers of a cache, which can be taken back until every layer is through."""

from __future__ import annotations

from collections.abc import Callable

from kvslim.store.table import BlockTable, Entry


class Step:
    """What it takes to undo the pass that is under way. Nothing is kept between passes.

    Parameters
    ----------
    table : BlockTable
        Shared by the layers.
    """

    def __init__(self, table: BlockTable):
        self.table = table
        self.layers = 1  # that take in tokens in every pass; the last one ends it
        self.open = False
        self.length = 0  # columns in the cache before the pass
        self.nbytes = 0  # of copies kept for undoing
        self.lost: set[int] = set()  # layers that a failed pass changed for good
        self.through: set[int] = set()  # layers that have taken in their tokens
        self._undo: dict[int, Callable[[], None] | None] = {}
        self._rows: list[list[Entry]] = []  # of the table, before the pass

    def __contains__(self, layer: int) -> bool:
        return layer in self._undo

    def begin(self, length: int) -> None:
        """Start a pass on a cache of `length` columns, unless one is under way."""
        if not self.open:
            self.open, self.length = True, length
            self._rows = self.table.snapshot()

    def enter(self, layer: int, undo: Callable[[], None] | None, nbytes: int = 0) -> None:
        """Note how to set `layer` back to what it was before the pass; None where that is not possible."""
        possible = self._undo.get(layer, undo) is not None
        self._undo[layer] = undo if possible else None
        self.nbytes += nbytes

    def leave(self, layer: int) -> None:
        """Note that `layer` has taken in its tokens."""
        self.through.add(layer)
        if len(self.through) >= self.layers:
            self.close()

    def undo(self) -> None:
        """Set every layer back to what it was before the pass; harmless where none is under way."""
        if not self.open:
            return
        for layer, undo in self._undo.items():
            if undo is None:
                self.lost.add(layer)
            else:
                undo()
        self.table.restore(self._rows)
        self.close()

    def close(self) -> None:
        """Forget how to undo."""
        self.open, self.nbytes = False, 0
        self.through, self._undo, self._rows = set(), {}, []
