"""Every operation of a KVCache in every state of it: equal to a fresh cache, or refused with nothing changed.

What an operation frees is filled with NaN, so that a stale read shows. Random sequences of operations, forks among
them, run against plain lists of token ids.
"""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvslim
from kvslim.errors import InputError, StateError
from kvslim.integrations.transformers import compat
from tiny_models import build, pair, prompt

TOLERANCE = 2e-4
RECIPES = {
    "tail": "none+block=8+sinks=2+recent=5",
    "no tail": "none+block=8+sinks=2+immediate",
    "no window": "none+block=8+sinks=0+recent=0",
}
# tokens fed before the operation; with the recipes above: nothing, sinks, tail only, a block just sealed, blocks and tail
LENGTHS = {"empty": 0, "sinks": 2, "before a block": 14, "a block": 15, "blocks and tail": 36, "whole blocks": 40}


def forward(model, ids, cache=None, mask=None) -> torch.Tensor:
    """Logits; positions follow the mask."""
    arguments = {} if cache is None else {compat.CACHE_ARGUMENT: cache}
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        arguments |= {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        return model(ids, use_cache=cache is not None, **arguments).logits


def filled(recipe: str, length: int, batch: int = 2, family: str = "llama"):
    """A cache that was fed `length` tokens, and these."""
    packed, _ = pair(family)
    cache, ids = kvslim.KVCache(packed, recipe), prompt(batch, length)
    if length:
        forward(packed, ids, cache)
    return cache, ids


def poison(cache) -> None:
    """NaN in every exact slot and block slot that no sequence holds."""
    valid: dict[int, int] = {}
    for row in cache.table.rows:
        for entry in row:
            valid[entry.block] = max(valid.get(entry.block, 0), entry.valid)
    for layer in cache.layers:
        store = getattr(getattr(layer, "core", None), "store", None)
        if store is None:
            continue
        for index, row in enumerate(store.rows):
            for exact in (store.key, store.value):
                exact[index, :, row.sinks + row.tail :] = torch.nan
        for slab, start in zip(store.pool.slabs, store.pool.starts, strict=True):
            for side in "kv":
                code = slab[side]["code"]
                for at in range(len(code)):
                    code[at, :, valid.get(start + at, 0) :] = torch.nan


def every_byte(cache) -> str:
    """Hash of all tensors that the cache keeps, of the table and of the counts: what is not in use as well."""
    digest = hashlib.sha256(repr((cache.table.rows, cache.get_seq_length())).encode())
    for layer in cache.layers:
        if hasattr(layer, "core"):
            store = layer.core.store
            if store is None:
                continue
            counts = [(row.sinks, row.packed, row.tail, row.holes, row.origin) for row in store.rows]
            digest.update(repr((store.length, counts)).encode())
            tensors = list(store.tensors())
        else:
            tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def crop(cache, ids, count):
    cache.crop(-count)
    return cache, ids[:, : ids.shape[1] - count]


def reorder(cache, ids, order):
    cache.reorder_cache(torch.tensor(order))
    return cache, ids[order] if ids.shape[1] else ids


def repeat(cache, ids, times):
    cache.batch_repeat_interleave(times)
    return cache, ids.repeat_interleave(times, 0) if ids.shape[1] else ids


def select(cache, ids, rows):
    cache.batch_select_indices(torch.tensor(rows))
    return cache, ids[rows] if ids.shape[1] else ids


def fork(cache, ids, _):
    return cache.fork(), ids


def deepcopy(cache, ids, _):
    return copy.deepcopy(cache), ids


def reset(cache, ids, _):
    cache.reset()
    return cache, ids[:, :0]


# name -> operation, argument, tokens that it needs
OPERATIONS = {
    "crop by 1": (crop, 1, 1),
    "crop into the tail": (crop, 2, 2),
    "crop across a border": (crop, 9, 9),
    "crop into a block": (crop, 13, 13),
    "crop to nothing": (crop, None, 0),
    "reorder": (reorder, [1, 0], 0),
    "reorder to one": (reorder, [1, 1], 0),
    "repeat": (repeat, 3, 0),
    "select": (select, [1], 0),
    "fork": (fork, None, 0),
    "deepcopy": (deepcopy, None, 0),
    "reset": (reset, None, 0),
}


@pytest.mark.parametrize("state", LENGTHS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_equal_to_a_fresh_cache(name, recipe, state):
    operation, argument, needed = OPERATIONS[name]
    cache, ids = filled(RECIPES[recipe], LENGTHS[state])
    packed, stock = pair("llama")
    if operation is crop:
        argument = ids.shape[1] if argument is None else argument
        if ids.shape[1] < needed:
            before = every_byte(cache)
            with pytest.raises(StateError, match=f"the cache holds only {ids.shape[1]} tokens"):
                crop(cache, ids, argument)
            assert every_byte(cache) == before
            return
    parent, whole = every_byte(cache), ids
    after, ids = operation(cache, ids, argument)
    if after is not cache:
        assert every_byte(after) == every_byte(cache) == parent
    else:
        poison(after)
    assert after.get_seq_length() == ids.shape[1]
    for seed, more in enumerate((1, 3, 11)):  # the last seals a block over what was freed
        new = prompt(len(ids), more, seed=20 + seed)
        got = forward(packed, new, after)
        ids = torch.cat([ids, new], 1)
        want = forward(stock, ids)[:, -more:]
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    if after is not cache:  # the parent knows nothing of what its copy was fed
        new = prompt(2, 3, seed=30)
        want = forward(stock, torch.cat([whole, new], 1))[:, -3:]
        torch.testing.assert_close(forward(packed, new, cache), want, atol=TOLERANCE, rtol=0)


REFUSED = {
    "crop of more than there is": lambda cache: cache.crop(-41),
    "crop forwards": lambda cache: cache.crop(2),
    "reorder to a row that is not there": lambda cache: cache.reorder_cache(torch.tensor([0, 2])),
    "select of a row that is not there": lambda cache: cache.batch_select_indices(torch.tensor([5])),
    "offload": lambda cache: cache.offload(0),
    "prefetch": lambda cache: cache.prefetch(0),
    "offload of a layer": lambda cache: cache.layers[0].offload(),
    "prefetch of a layer": lambda cache: cache.layers[0].prefetch(),
    "reset of a layer": lambda cache: cache.layers[0].reset(),
    "crop of a layer": lambda cache: cache.layers[0].crop(-1),
    "reorder of a layer": lambda cache: cache.layers[0].reorder_cache(torch.tensor([0])),
}


@pytest.mark.parametrize("state", ["empty", "before a block", "whole blocks"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_changes(what, state):
    cache, _ = filled(RECIPES["tail"], LENGTHS[state])
    if state == "empty" and "not there" in what:
        return  # rows come with the first tokens
    before = every_byte(cache)
    with pytest.raises((StateError, InputError)):
        REFUSED[what](cache)
    assert every_byte(cache) == before


# -- devices and dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["none+block=8+sinks=2+recent=5", "int8+block=8+sinks=2+recent=5", "kivi4", "slim4+block=16"]
)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_a_model_that_changes_its_dtype_between_turns(recipe, dtypes):
    """What is stored stays as it was stored; the answer is that of the second dtype, to its rounding."""
    model = build("llama").to(dtypes[0])
    cache, ids, more = kvslim.KVCache(model, recipe), prompt(2, 60), prompt(2, 9, seed=1)
    forward(model, ids, cache)
    reference = copy.deepcopy(cache)
    want = forward(model, more, reference).float()
    model.to(dtypes[1])
    got = forward(model, more, cache)
    assert got.dtype == dtypes[1]
    assert float((got.float() - want).abs().mean()) < 0.08
    forward(model, prompt(2, 30, seed=2), cache)  # seals what has come in both dtypes
    assert cache.get_seq_length() == 99
    assert cache.layers[0].core.store.key.dtype == reference.layers[0].core.store.key.dtype


@pytest.mark.parametrize("length", [0, 40])
def test_a_model_on_another_device_is_refused(length):
    model = build("llama")
    cache = kvslim.KVCache(model, RECIPES["tail"])
    if length:
        forward(model, prompt(2, length), cache)
    before = every_byte(cache)
    moved = copy.deepcopy(model).to("meta")
    with pytest.raises(InputError, match="layer 0: keys are on the meta device, which holds no values"):
        forward(moved, prompt(2, 3).to("meta"), cache)
    assert every_byte(cache) == before
    forward(model, prompt(2, 3), cache)
    assert cache.get_seq_length() == length + 3


# -- random sequences ----------------------------------------------------------------------------------------------------

MOST = 96  # columns


class Held:
    """A cache and what it should hold: token ids and mask, (rows, columns)."""

    def __init__(self, cache, ids: torch.Tensor, mask: torch.Tensor):
        self.cache, self.ids, self.mask = cache, ids, mask

    def feed(self, new: torch.Tensor, real: torch.Tensor) -> None:
        packed, stock = pair("llama")
        self.ids, self.mask = torch.cat([self.ids, new], 1), torch.cat([self.mask, real], 1)
        got = forward(packed, new, self.cache, self.mask)
        want = forward(stock, self.ids, None, self.mask)[:, -new.shape[1] :]
        seen = real.bool()
        torch.testing.assert_close(got[seen], want[seen], atol=TOLERANCE, rtol=0)


class CacheMachine(RuleBasedStateMachine):
    recipe = RECIPES["tail"]

    @initialize(rows=st.integers(1, 3), pads=st.lists(st.integers(0, 20), min_size=3, max_size=3))
    def begin(self, rows, pads):
        self.rows, self.pads, self.seed = rows, pads, 0
        self.held = [self.empty()]

    def empty(self) -> Held:
        nothing = torch.zeros(self.rows, 0, dtype=torch.long)
        return Held(kvslim.KVCache(pair("llama")[0], self.recipe), nothing, nothing)

    def pick(self, number: int) -> Held:
        return self.held[number % len(self.held)]

    @rule(number=st.integers(0, 3), tokens=st.one_of(st.integers(1, 4), st.integers(1, 40)))
    def feed_one(self, number, tokens):
        self.feed(number, tokens)

    def feed(self, number, tokens):
        held = self.pick(number)
        tokens = min(tokens, MOST - held.ids.shape[1])
        if tokens <= 0:
            return
        self.seed += 1
        real = torch.ones(len(held.ids), tokens, dtype=torch.long)
        if not held.ids.shape[1]:  # left padding comes with the first chunk
            for row in range(len(real)):
                real[row, : min(self.pads[row % 3], tokens - 1)] = 0
        held.feed(prompt(len(real), tokens, seed=self.seed) * real, real)

    @rule(tokens=st.lists(st.integers(1, 6), min_size=3, max_size=3))
    def feed_each_in_turn(self, tokens):
        self.feed_in_turn(tokens)

    def feed_in_turn(self, tokens):
        """Forks that share what they should not step on each other's tokens here."""
        for _ in range(2):
            for number, count in zip(range(len(self.held)), tokens, strict=False):
                self.feed(number, count)

    @rule(number=st.integers(0, 3), count=st.one_of(st.integers(0, 10), st.integers(0, MOST)))
    def crop(self, number, count):
        held = self.pick(number)
        columns = held.ids.shape[1]
        if columns and int(held.mask[:, : columns - count].sum(-1).min() if count < columns else 0) == 0:
            count = 0 if count < columns else columns  # never end inside a row's padding
        count = min(count, columns)
        held.cache.crop(-count)
        held.ids, held.mask = held.ids[:, : columns - count], held.mask[:, : columns - count]
        if count == columns and columns:
            held.cache.reset()  # a fresh start may have any number of rows
            self.fresh(held)

    def fresh(self, held: Held) -> None:
        held.ids = held.mask = torch.zeros(self.rows, 0, dtype=torch.long)

    @rule(
        number=st.integers(0, 3),
        order=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        how=st.sampled_from(["reorder_cache", "batch_select_indices"]),
    )
    def reorder(self, number, order, how):
        held = self.pick(number)
        if held.ids.shape[1]:
            order = [row % len(held.ids) for row in order]
            getattr(held.cache, how)(torch.tensor(order))
            held.ids, held.mask = held.ids[order], held.mask[order]

    @rule(number=st.integers(0, 3), times=st.integers(1, 2))
    def repeat(self, number, times):
        held = self.pick(number)
        if held.ids.shape[1] and len(held.ids) <= 3:
            held.cache.batch_repeat_interleave(times)
            held.ids, held.mask = held.ids.repeat_interleave(times, 0), held.mask.repeat_interleave(times, 0)

    @precondition(lambda self: len(self.held) < 3)
    @rule(number=st.integers(0, 3), deep=st.booleans())
    def fork(self, number, deep):
        held = self.pick(number)
        if not held.ids.shape[1]:
            self.feed(number, 7)
        self.held.append(Held(copy.deepcopy(held.cache) if deep else held.cache.fork(), held.ids, held.mask))
        self.feed_in_turn([1, 2, 3])

    @rule(number=st.integers(0, 3))
    def reset(self, number):
        held = self.pick(number)
        held.cache.reset()
        self.fresh(held)

    @precondition(lambda self: len(self.held) > 1)
    @rule(number=st.integers(0, 3))
    def drop(self, number):
        self.held.pop(number % len(self.held))

    @rule(number=st.integers(0, 3))
    def poison(self, number):
        held = self.pick(number)
        if all(other is held or other.cache.table.allocator is not held.cache.table.allocator for other in self.held):
            poison(held.cache)

    @invariant()
    def lengths_agree(self):
        for held in getattr(self, "held", ()):
            assert held.cache.get_seq_length() == held.ids.shape[1]
            for row, mask in enumerate(held.mask if held.ids.shape[1] else ()):
                store = held.cache.layers[0].core.store
                assert store.rows[row].tokens == int(mask.sum())


class ImmediateCacheMachine(CacheMachine):
    recipe = RECIPES["no tail"]


def quick(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = quick(60)
TestImmediateCacheMachine = ImmediateCacheMachine.TestCase
TestImmediateCacheMachine.settings = quick(40)
