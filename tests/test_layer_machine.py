"""Random operations on packed layers against plain lists of columns: same tokens, same attention, nothing leaks."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dense_model import Geometry, PlainRow, attention, causal, stored
from kvslim.cache import LayerCache
from kvslim.recipe import Recipe
from kvslim.store.table import BlockAllocator, BlockTable

LAYERS = (Geometry(4, 2, 8, 8), Geometry(4, 1, 16, 8))  # share one table, as the layers of a model do
MOST = 320  # columns
chunks = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(1, 300))


class Twin:
    """A cache of two packed layers, and the same as plain rows: ``plain[layer][row]``."""

    def __init__(self, table: BlockTable, layers: list[LayerCache], plain: list[list[PlainRow]]):
        self.table, self.layers, self.plain = table, layers, plain

    @property
    def rows(self) -> int:
        return len(self.plain[0])

    @property
    def length(self) -> int:
        return len(self.plain[0][0].real) if self.rows else 0

    @property
    def padded(self) -> bool:
        return any(not bool(row.real.all()) for row in self.plain[0])


class LayerMachine(RuleBasedStateMachine):
    recipe = "none+block=8+sinks=3+recent=5"

    @initialize(rows=st.integers(1, 3))
    def begin(self, rows):
        self.seed = 0
        recipe = Recipe.parse(self.recipe)
        table = BlockTable(BlockAllocator(), recipe.block)
        self.twins = [Twin(table, [LayerCache(recipe, index, table) for index in range(2)], [[], []])]
        self.first_rows = rows

    def pick_twin(self, number: int) -> Twin:
        return self.twins[number % len(self.twins)]

    @rule(number=st.integers(0, 3), tokens=chunks, pads=st.lists(st.integers(0, 12), min_size=3, max_size=3),
          form=st.sampled_from(["none", "bool", "float"]))  # fmt: skip
    def append(self, number, tokens, pads, form):
        twin = self.pick_twin(number)
        tokens = min(tokens, MOST - twin.length)
        if tokens <= 0:
            return
        fresh = not twin.rows
        rows = self.first_rows if fresh else twin.rows
        real = torch.ones(rows, tokens, dtype=torch.bool)
        if fresh:  # left padding comes with the first chunk
            for row in range(rows):
                real[row, : min(pads[row], tokens - 1)] = False
        for index, (layer, geometry) in enumerate(zip(twin.layers, LAYERS, strict=True)):
            self.seed += 1
            q, k, v = geometry.chunk(rows, tokens, self.seed)
            for states in (k, v):
                states.transpose(1, 2)[~real] = 1e4
            if fresh:
                nothing = [t[0, :, :0] for t in (k, v)]
                twin.plain[index] = [PlainRow(*nothing, torch.ones(0, dtype=torch.bool)) for _ in range(rows)]
            plain = [row.append(k[i], v[i], real[i]) for i, row in enumerate(twin.plain[index])]
            total = len(plain[0].real)
            visible = causal(tokens, total) & torch.stack([row.real for row in plain])[:, None]
            mask = None
            if form != "none" or not bool(visible[:, -1].all()):
                mask = visible[:, None]
            if mask is not None and form == "float":
                mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            layer.append(k, v)
            out = layer.attend(q, mask, geometry.score)
            for i, row in enumerate(plain):
                keep = real[i]
                want = attention(q[i], row.key, row.value, visible[i], geometry.score)
                torch.testing.assert_close(out[i][:, keep], want[:, keep], atol=1e-4, rtol=0)
            twin.plain[index] = plain

    @precondition(lambda self: any(twin.rows for twin in self.twins))
    @rule(number=st.integers(0, 3), remove=st.one_of(st.integers(0, 20), st.integers(0, MOST)))
    def crop(self, number, remove):
        twin = self.pick_twin(number)
        length = max(0, twin.length - remove)
        if not twin.rows:
            return
        for layer in twin.layers:
            kept = layer.crop(length)
        for row, tokens in enumerate(kept):
            twin.table.crop(row, tokens)
        twin.plain = [[row.crop(length) for row in rows] for rows in twin.plain]

    @precondition(lambda self: any(twin.rows for twin in self.twins))
    @rule(number=st.integers(0, 3), order=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def pick(self, number, order):
        twin = self.pick_twin(number)
        if not twin.rows:
            return
        order = [row % twin.rows for row in order]
        twin.table.pick(order)
        for layer in twin.layers:
            layer.pick(order)
        twin.plain = [[rows[i] for i in order] for rows in twin.plain]

    @precondition(lambda self: len(self.twins) < 3)
    @rule(number=st.integers(0, 3))
    def fork(self, number):
        twin = self.pick_twin(number)
        table = twin.table.fork()
        self.twins.append(
            Twin(table, [layer.fork(table) for layer in twin.layers], [list(rows) for rows in twin.plain])
        )

    @rule(number=st.integers(0, 3))
    def clear(self, number):
        twin = self.pick_twin(number)
        twin.table.clear()
        for layer in twin.layers:
            layer.clear()
        twin.plain = [[], []]

    @precondition(lambda self: len(self.twins) > 1)
    @rule(number=st.integers(0, 3))
    def drop(self, number):
        self.twins.pop(number % len(self.twins))

    @invariant()
    def every_cache_holds_its_tokens(self):
        for twin in getattr(self, "twins", ()):
            for layer, rows in zip(twin.layers, twin.plain, strict=True):
                assert layer.length == twin.length
                for index, row in enumerate(rows):
                    key, value = stored(layer, index)
                    assert torch.equal(key, row.key[:, row.real])
                    assert torch.equal(value, row.value[:, row.real])

    @invariant()
    def bytes_are_counted(self):
        for twin in getattr(self, "twins", ()):
            for layer in twin.layers:
                if layer.store is not None:
                    assert layer.store.nbytes == sum(tensor.nbytes for tensor in layer.store.tensors())

    @invariant()
    def no_block_is_lost(self):
        """Blocks in use are those that some row holds."""
        allocators = {id(twin.table.allocator): twin.table.allocator for twin in getattr(self, "twins", ())}
        for allocator in allocators.values():
            tables = [twin.table for twin in self.twins if twin.table.allocator is allocator]
            held = {entry.block for table in tables for row in table.rows for entry in row}
            assert allocator.in_use == len(held)


class ImmediateMachine(LayerMachine):
    recipe = "none+block=16+sinks=2+immediate"


def quick(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )


TestLayerMachine = LayerMachine.TestCase
TestLayerMachine.settings = quick(20)
TestImmediateMachine = ImmediateMachine.TestCase
TestImmediateMachine.settings = quick(40)
