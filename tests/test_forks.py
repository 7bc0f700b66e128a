"""Forks: whatever children do, the parent keeps its bytes, and what they share is held once."""

import gc
import hashlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvslim
from kvslim.errors import StateError
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.report import storage_nbytes
from test_adapter import forward
from tiny_models import build, left_padded, pair, prompt

SMALL = "slim4+block=16+sinks=2+recent=5"
PAGES = "slim4p+block=16"  # token by token into blocks: a shared one must be copied first
CASES = [("llama", SMALL), ("llama", PAGES), ("gemma3", SMALL), ("qwen3-next", "int8+block=8+sinks=2+recent=5")]


def fed(family: str, recipe: str, lengths=(70, 51)):
    model, _ = pair(family)
    cache = kvslim.KVCache(model, recipe)
    ids, mask = left_padded(list(lengths))
    forward(model, ids, cache, mask)
    return model, cache, mask


def every_byte(cache) -> str:
    """Hash of every byte that a cache holds: whole blocks, whole exact buffers, parameters, counts, dense layers."""
    digest = hashlib.sha256(repr(cache.table.rows).encode())

    def add(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    for layer in cache.layers:
        if not hasattr(layer, "core"):
            state = vars(layer)
            add(*(value for value in state.values() if isinstance(value, torch.Tensor)))
            for name in ("conv_states", "recurrent_states"):
                add(*(value for value in state.get(name, {}).values() if value is not None))
            digest.update(repr(state.get("cumulative_length")).encode())
            continue
        store = layer.core.store
        add(store.key, store.value)
        digest.update(
            f"{store.length} {[(r.sinks, r.packed, r.tail, r.holes, r.origin, r.queries) for r in store.rows]}".encode()
        )
        for row, entries in zip(store.rows, cache.table.rows, strict=True):
            add(*(tensor for side in row.frozen or () for tensor in side.tensors().values()))
            add(*(() if row.moment is None else (row.moment,)))
            for entry in entries:
                add(*(part for side in "kv" for part in store.pool.read(side, [entry.block]).parts.values()))
    return digest.hexdigest()


class Child:
    """A fork, and the mask of its columns."""

    def __init__(self, cache, mask: torch.Tensor):
        self.cache, self.mask = cache, mask

    def fork(self) -> "Child":
        return Child(self.cache.fork(), self.mask)

    def feed(self, model, tokens: int, seed: int) -> torch.Tensor:
        more = prompt(len(self.mask), tokens, seed)
        self.mask = torch.cat([self.mask, torch.ones_like(more)], dim=1)
        return forward(model, more, self.cache, self.mask)

    def crop(self, count: int) -> None:
        count = min(count, self.mask.shape[1] - 1)
        try:
            self.cache.crop(-count)
        except StateError:  # windows and recurrent states cannot go back
            return
        self.mask = self.mask[:, : self.mask.shape[1] - count]

    def pick(self, order: list[int]) -> None:
        order = [row % len(self.mask) for row in order][: len(self.mask)]
        order += [0] * (len(self.mask) - len(order))
        self.cache.reorder_cache(torch.tensor(order))
        self.mask = self.mask[order]

    def break_off(self) -> None:
        """A pass that ends in its first layer, a packed one: after any other the next pass is refused, to begin again."""
        core = getattr(self.cache.layers[0], "core", None)
        if core is None or any(compat.is_linear(layer) for layer in self.cache.layers):
            return
        if core.store is not None and core.store.rows:
            sizes = ((len(core.store.rows), core.store.kv_heads, 3, dim) for dim in core.store.head_dims)
            self.cache.update(*(torch.ones(size) for size in sizes), 0)


KINDS = ["feed", "feed", "crop", "pick", "fork", "fork parent", "reset", "save", "load", "die", "break off"]


@pytest.mark.parametrize(("family", "recipe"), CASES)
@given(
    steps=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 40)), min_size=4, max_size=12)
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_parent_keeps_every_byte_whatever_children_do(family, recipe, steps, tmp_path_factory):
    model, parent, mask = fed(family, recipe)
    twin = fed(family, recipe)[1]  # never forked
    before, nbytes = every_byte(parent), parent.nbytes
    path = tmp_path_factory.mktemp("forks") / "child.safetensors"
    children = [Child(parent.fork(), mask)]
    for seed, (kind, which, number) in enumerate(steps):
        child = children[which % len(children)] if children else None
        if kind == "fork parent" or child is None:
            children.append(Child(parent.fork(), mask))
        elif kind == "fork":
            children.append(child.fork())
        elif kind == "feed":
            child.feed(model, 1 + number % 23, seed)
        elif kind == "crop":
            child.crop(number)
        elif kind == "pick":
            child.pick([number, which, number + which])
        elif kind == "break off":
            child.break_off()
        elif kind == "save":
            child.cache.save(path)
        elif kind == "load":
            child.cache.save(path)
            children.append(Child(kvslim.KVCache.load(path, model, mmap=bool(number % 2)), child.mask))
        else:
            if kind == "reset":
                child.cache.reset()
            children.remove(child)
        del child
        assert every_byte(parent) == before
        held = {
            entry.block
            for cache in [
                parent,
                *(each.cache for each in children if each.cache.table.allocator is parent.table.allocator),
            ]
            for row in cache.table.rows
            for entry in row
        }
        assert parent.table.allocator.in_use == len(held)
    children.clear()
    gc.collect()
    assert parent.table.allocator.in_use == len({entry.block for row in parent.table.rows for entry in row})
    assert parent.nbytes >= nbytes
    one, other = Child(parent, mask), Child(twin, mask)
    assert torch.equal(one.feed(model, 30, 1), other.feed(model, 30, 1))


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_a_fork_goes_on_as_its_parent_would_have(family, recipe):
    """Also a fork of a fork, after both parents are gone, and while others write."""
    model, parent, mask = fed(family, recipe)
    twin = Child(fed(family, recipe)[1], mask)
    child = Child(parent.fork(), mask)
    grandchild = child.fork()
    child.feed(model, 40, 7)
    Child(parent, mask).feed(model, 40, 8)
    del parent
    child.cache.reset()
    del child
    gc.collect()
    for seed, tokens in enumerate((1, 1, 20, 1, 5)):
        assert torch.equal(grandchild.feed(model, tokens, seed), twin.feed(model, tokens, seed))


@pytest.mark.parametrize("after", ["fork", "save"])
def test_a_fork_in_the_middle_of_a_pass_is_one_before_it(after, tmp_path):
    model, cache, mask = fed("llama", PAGES)
    before = every_byte(cache)
    Child(cache, mask).break_off()
    if after == "save":
        cache.save(tmp_path / "c")
        other = kvslim.KVCache.load(tmp_path / "c", model)
    else:
        other = cache.fork()
    assert every_byte(cache) == before
    assert torch.equal(Child(cache, mask).feed(model, 9, 1), Child(other, mask).feed(model, 9, 1))


def test_many_forks_of_one_prefix_cost_one_prefix():
    """Bytes held by 16 forks of 2,000 tokens: before they go on, and after 20 tokens each."""
    model = build("llama", max_position_embeddings=4096)
    for recipe, most_before, most_after in (("slim4", 1.01, 5.2), ("slim4p", 1.01, 1.6)):
        parent = kvslim.KVCache(model, recipe)
        forward(model, prompt(1, 2000), parent)
        one = storage_nbytes(parent)
        forks = [parent.fork() for _ in range(16)]
        assert storage_nbytes([parent, *forks]) <= most_before * one
        for number, fork in enumerate(forks):
            forward(model, prompt(1, 20, seed=number), fork)
        together = storage_nbytes([parent, *forks])
        exact = sum(layer.core.store.key.nbytes + layer.core.store.value.nbytes for layer in parent.layers)
        assert together <= most_after * one, together / one
        if recipe == "slim4":  # each fork: exact tokens of its own, nothing else
            assert together - one == pytest.approx(16 * exact, rel=0.01)


def test_windows_of_dense_layers_are_shared_until_they_move():
    model, parent, mask = fed("gemma3", SMALL)
    forks = [parent.fork() for _ in range(16)]
    assert storage_nbytes([parent, *forks]) == storage_nbytes(parent)
    before = every_byte(parent)
    Child(forks[0], mask).feed(model, 3, 1)
    assert storage_nbytes([parent, *forks]) > storage_nbytes(parent)
    assert every_byte(parent) == before


def test_a_pass_that_fails_gives_a_fork_back_what_it_shared():
    """Exact tokens are shared with the parent, a block is sealed over them, then the pass is undone."""
    model, parent, mask = fed("llama", SMALL)
    child = Child(parent.fork(), mask)
    before = every_byte(parent)
    broken = child.fork()
    store = broken.cache.layers[0].core.store
    chunk = torch.ones(2, store.kv_heads, 20, 32)
    broken.cache.update(chunk, chunk, 0)
    broken.cache.layers[0].core.attend(torch.ones(2, 4, 20, 32), None, kvslim.attention.reference.Score(1.0))
    assert every_byte(parent) == before
    broken.cache.crop(0)  # undoes it
    assert every_byte(broken.cache) == before == every_byte(parent)
    assert torch.equal(broken.feed(model, 30, 2), child.feed(model, 30, 2))
