"""LayerCache: attention on packed layers, bytes that do not depend on chunking, and what a step may allocate."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dense_model import Geometry, Single, attention, causal, stored
from kvslim.attention.reference import TILE, Score, dense_attention
from kvslim.errors import InputError, RecipeError, StateError

IMMEDIATE = "k=affine:4:asym:scale=32+v=affine:4:asym:scale=32+immediate"
EXACT = "none+block=16+sinks=2+recent=7"


def feed_in_chunks(cache: Single, total: int, size: int, *, batch: int = 1, seed: int = 1) -> list[torch.Tensor]:
    """Feed the same `total` tokens in chunks of `size`; the last one may be shorter."""
    q, k, v = cache.geometry.chunk(batch, total, seed)
    return [
        cache.feed((q[:, :, at : at + size], k[:, :, at : at + size], v[:, :, at : at + size]))
        for at in range(0, total, size)
    ]


# -- attention against softmax written out -----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512])
def test_every_head_dim(head_dim):
    geometry = Geometry(4, 2, head_dim, head_dim)
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(2, 60, head_dim)
    for start, stop in ((0, 41), (41, 42), (42, 60)):
        got = cache.feed((q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop]))
        for row in range(2):
            want = attention(
                q[row, :, start:stop], k[row, :, :stop], v[row, :, :stop], causal(stop - start, stop), geometry.score
            )
            torch.testing.assert_close(got[row], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "geometry", [Geometry(4, 4), Geometry(8, 2), Geometry(6, 1), Geometry(4, 2, 24, 64), Geometry(4, 2, 64, 16)]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 9])
def test_grouped_heads_softcap_and_attention_sinks(geometry, softcap, sinks, queries):
    score = Score(0.4, softcap, torch.linspace(-2, 3, geometry.heads) if sinks else None)
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(1, 70, 5)
    cache.feed((q[:, :, : 70 - queries], k[:, :, : 70 - queries], v[:, :, : 70 - queries]), score=score)
    got = cache.feed((q[:, :, -queries:], k[:, :, -queries:], v[:, :, -queries:]), score=score)
    want = attention(q[0, :, -queries:], k[0], v[0], causal(queries, 70), score)
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
    plain = dense_attention(q[:, :, -queries:], k, v, None, score, causal=True)
    torch.testing.assert_close(plain[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["bool", "float", "half", "per head"])
@pytest.mark.parametrize("queries", [1, 5])
def test_masks(form, queries):
    """Any mask the framework may hand over, with holes anywhere; a query that sees nothing gets zeros."""
    geometry = Geometry()
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(2, 60, 7)
    cache.feed((q[:, :, : 60 - queries], k[:, :, : 60 - queries], v[:, :, : 60 - queries]))
    visible = torch.rand(2, 4, queries, 60, generator=torch.Generator().manual_seed(1)) < 0.6
    if form != "per head":
        visible = visible[:, :1]
    visible[..., 60 - queries :] &= causal(queries, queries)
    visible[:, :, torch.arange(queries), 60 - queries + torch.arange(queries)] = True
    visible[1, :, 0, : 60 - queries] = False
    mask = visible
    if form == "float":
        mask = torch.where(visible, torch.rand(visible.shape) - 0.5, torch.finfo(torch.float32).min)
    elif form == "half":
        mask = torch.zeros(visible.shape, dtype=torch.float16).masked_fill(~visible, torch.finfo(torch.float16).min)
    got = cache.feed((q[:, :, 60 - queries :], k[:, :, 60 - queries :], v[:, :, 60 - queries :]), mask)
    for row in range(2):
        want = attention(q[row, :, 60 - queries :], k[row], v[row], mask[row], geometry.score)
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=0)


def test_one_mask_for_all_sequences():
    geometry = Geometry()
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(3, 40, 8)
    cache.feed((q[:, :, :36], k[:, :, :36], v[:, :, :36]))
    visible = causal(4, 40)
    visible[:, 5:11] = False
    got = cache.feed((q[:, :, 36:], k[:, :, 36:], v[:, :, 36:]), visible[None, None])
    for row in range(3):
        want = attention(q[row, :, 36:], k[row], v[row], visible, geometry.score)
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=0)


def test_a_query_that_sees_nothing_gets_zeros():
    geometry = Geometry()
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(1, 30, 9)
    cache.feed((q[:, :, :29], k[:, :, :29], v[:, :, :29]))
    out = cache.feed((q[:, :, 29:], k[:, :, 29:], v[:, :, 29:]), torch.zeros(1, 1, 1, 30, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_chunk_longer_than_a_tile_and_than_a_pass_of_queries():
    geometry = Geometry(2, 1, 16, 16)
    cache = Single("none+block=64+sinks=4+recent=32", geometry)
    q, k, v = geometry.chunk(1, 2 * TILE + 300, 3)
    first = TILE + 200
    for start, stop in ((0, first), (first, q.shape[2])):
        got = cache.feed((q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop]))
        want = attention(
            q[0, :, start:stop], k[0, :, :stop], v[0, :, :stop], causal(stop - start, stop), geometry.score
        )
        torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)


def test_attention_without_causality():
    geometry = Geometry()
    cache = Single(EXACT, geometry)
    q, k, v = geometry.chunk(1, 50, 4)
    for start, stop in ((0, 35), (35, 50)):
        cache.layer.append(k[:, :, start:stop], v[:, :, start:stop])
        got = cache.layer.attend(q[:, :, start:stop], None, geometry.score, causal=False)
        everything = torch.ones(stop - start, stop, dtype=torch.bool)
        want = attention(q[0, :, start:stop], k[0, :, :stop], v[0, :, :stop], everything, geometry.score)
        torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recipe", [EXACT, "kivi4", "int8", IMMEDIATE])
def test_inputs_that_are_not_contiguous(recipe):
    """Views as models make them: (batch, tokens, heads, dim) turned, and every other channel of something wider."""
    geometry = Geometry(4, 2, 32, 32)
    plain, turned = Single(recipe, geometry), Single(recipe, geometry)
    for seed, tokens in enumerate((70, 1, 40)):
        chunk = geometry.chunk(2, tokens, seed)
        views = []
        for states in chunk:
            wide = torch.full((*states.transpose(1, 2).shape[:-1], 64), torch.nan)
            wide[..., ::2] = states.transpose(1, 2)
            views.append(wide[..., ::2].transpose(1, 2))
            assert not views[-1].is_contiguous()
        assert torch.equal(plain.feed(chunk), turned.feed(tuple(views)))
    for one, other in zip(plain.store.tensors(), turned.store.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "steps", ["rotate", "rotate:kind=orthogonal", "balance/rotate", "center", "center/balance/rotate"]
)
@pytest.mark.parametrize(
    "tail", ["block=16+sinks=3+recent=20", "block=16+sinks=0+recent=0", "block=16+sinks=3+immediate"]
)
def test_a_basis_in_front_of_exact_storage_changes_nothing(steps, tail):
    """Keys with a large mean, values with one: exact, packed and current tokens still meet in one softmax."""
    geometry = Geometry(4, 2, 32, 64)
    value_steps = steps.replace("balance/", "")
    cache = Single(f"k={steps}/none+v={value_steps}/none+{tail}", geometry)
    q, k, v = geometry.chunk(2, 150, 11)
    k, v = k + 3 * torch.linspace(-1, 1, 32), v + 2.0
    for start, stop in ((0, 90), (90, 91), (91, 150)):
        got = cache.feed((q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop]))
        for row in range(2):
            visible = causal(stop - start, stop)
            want = attention(q[row, :, start:stop], k[row, :, :stop], v[row, :, :stop], visible, geometry.score)
            torch.testing.assert_close(got[row], want, atol=1e-4, rtol=0)
    assert cache.store.rows[0].packed >= 80


@pytest.mark.parametrize("recipe", ["kivi4", "int8", IMMEDIATE])
def test_attention_reads_exactly_what_is_stored(recipe):
    """Scores in the packed basis and block by block, against softmax over the decoded tokens."""
    geometry = Geometry(4, 2, 32, 64)
    cache = Single(recipe, geometry)
    feed_in_chunks(cache, 300, 130)
    key, value = stored(cache.layer, 0)
    q, k, v = geometry.chunk(1, 3, 77)
    got = cache.feed((q, k, v))
    want = attention(q[0], torch.cat([key, k[0]], 1), torch.cat([value, v[0]], 1), causal(3, 303), geometry.score)
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["none", "kivi4"])
def test_narrow_dtypes(dtype, recipe):
    geometry = Geometry(4, 2, 32, 32)
    cache = Single(recipe, geometry)
    q, k, v = (t.to(dtype) for t in geometry.chunk(1, 200, 6))
    cache.feed((q[:, :, :199], k[:, :, :199], v[:, :, :199]))
    key, value = stored(cache.layer, 0)
    if recipe == "none":
        assert torch.equal(key, k[0, :, :199].float())
    out = cache.feed((q[:, :, 199:], k[:, :, 199:], v[:, :, 199:]))
    assert out.dtype == dtype
    everything = torch.cat([key, k[0, :, 199:].float()], 1), torch.cat([value, v[0, :, 199:].float()], 1)
    want = attention(q[0, :, 199:].float(), *everything, causal(1, 200), geometry.score)
    torch.testing.assert_close(out[0].float(), want, atol=2e-2 if dtype == torch.bfloat16 else 2e-3, rtol=0)


# -- chunking and single encoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["none", "int8", "kivi4", IMMEDIATE, "kivi2+sinks=0+recent=0", "int8+block=16+recent=5"]
)
@pytest.mark.parametrize("size", [50, 7, 1])
def test_bytes_do_not_depend_on_how_the_prompt_was_cut(recipe, size):
    geometry = Geometry(4, 2, 32, 32)
    once, often = Single(recipe, geometry), Single(recipe, geometry)
    feed_in_chunks(once, 200, 200, batch=2)
    feed_in_chunks(often, 200, size, batch=2)
    assert [(row.sinks, row.packed, row.tail) for row in once.store.rows] == [
        (row.sinks, row.packed, row.tail) for row in often.store.rows
    ]
    packed = 0
    for row in range(2):
        for one, other in zip(once.table.rows[row], often.table.rows[row], strict=True):
            assert one.valid == other.valid
            packed += one.valid
            for side in "kv":
                parts = once.store.pool.read(side, [one.block]).parts
                for name, tensor in often.store.pool.read(side, [other.block]).parts.items():
                    assert torch.equal(tensor, parts[name]), (side, name)
        exact = once.store.view(row), often.store.view(row)
        assert torch.equal(exact[0].key, exact[1].key)
        assert torch.equal(exact[0].value, exact[1].value)
    assert packed == sum(row.packed for row in once.store.rows) > 0


@pytest.mark.parametrize("recipe", ["int8", "kivi4", "none", IMMEDIATE])
@pytest.mark.parametrize("size", [300, 33, 1])
def test_every_token_is_encoded_once(recipe, size, monkeypatch):
    geometry = Geometry(2, 1, 32, 32)
    cache = Single(recipe, geometry)
    feed_in_chunks(cache, 1, 1)
    counts = []
    for packer in cache.store.packers:
        kind, encode = type(packer.codec), type(packer.codec).encode

        def counting(self, x, feedback=None, encode=encode, packer=packer):
            counts.append((id(packer), x.shape[0] * x.shape[2]))
            return encode(self, x, feedback)

        if getattr(kind.encode, "__name__", "") != "counting":
            monkeypatch.setattr(kind, "encode", counting)
    feed_in_chunks(cache, 300, size)
    feed_in_chunks(cache, 60, size)
    encoded = sum(tokens for _, tokens in counts)
    assert encoded == 2 * cache.store.rows[0].packed
    assert cache.store.rows[0].packed > 200


@pytest.mark.parametrize("recent", [0, 5, 32])
def test_the_recent_window_stays_exact(recent):
    """The tail holds the last `recent` tokens at least, and fewer than a block more; sinks stay for ever."""
    cache = Single(f"int8+block=16+sinks=3+recent={recent}", Geometry(2, 1, 16, 16))
    q, k, v = cache.geometry.chunk(1, 150, 2)
    for at in range(150):
        cache.feed((q[:, :, at : at + 1], k[:, :, at : at + 1], v[:, :, at : at + 1]))
        row = cache.store.rows[0]
        assert row.tokens == at + 1
        assert row.sinks == min(3, at + 1)
        assert min(recent, max(0, at - 2)) <= row.tail < recent + 16
        view = cache.store.view(0)
        assert torch.equal(view.key[:, : row.sinks].float(), k[0, :, : row.sinks].half().float())
        assert torch.equal(view.key[:, row.sinks :].float(), k[0, :, at + 1 - row.tail : at + 1].half().float())
    assert cache.store.rows[0].packed % 16 == 0


def test_immediate_keeps_no_tail():
    cache = Single(IMMEDIATE + "+sinks=2", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 45, 4)
    row = cache.store.rows[0]
    assert (row.sinks, row.packed, row.tail) == (2, 43, 0)
    assert cache.store.key.shape[2] == 2


# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operation makes; views of what exists count for nothing."""

    def __init__(self, known: set[int]):
        super().__init__()
        self.known, self.largest, self.calls = known, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.nbytes)
        return out


def decode_step(cache: Single, seed: int) -> Largest:
    chunk = cache.geometry.chunk(1, 1, seed)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*cache.store.tensors(), *chunk)}
    with Largest(known) as mode:
        cache.feed(chunk)
    return mode


@pytest.mark.parametrize("recipe", ["none", "int8", "kivi4", IMMEDIATE])
def test_a_step_makes_nothing_of_the_historys_length(recipe, reference_only):
    """At 4k and at 6k tokens the largest tensor of a decode step is one decoded tile; steps that seal included."""
    geometry = Geometry(2, 1, 32, 32)
    tile = TILE * geometry.kv_heads * 32 * 4
    cache = Single(recipe, geometry)
    largest = []
    for prompt in (4096, 2048):
        feed_in_chunks(cache, prompt, 1024)
        steps = [decode_step(cache, seed) for seed in range(33)]
        largest.append(max(step.largest for step in steps))
    assert largest[1] == largest[0] <= 2 * tile
    dense = 4096 * geometry.kv_heads * 32 * 4
    assert largest[0] <= dense / 2


@pytest.mark.parametrize("recipe", ["none", "int8", "kivi4", "slim4"])
def test_a_native_step_makes_the_same_few_torch_calls_at_every_length(recipe, native_kernels):
    geometry = Geometry(2, 1, 32, 32)
    cache = Single(recipe, geometry)
    calls = []
    for prompt in (1024, 3072 - 8):  # the same place within a block
        feed_in_chunks(cache, prompt, 512)
        steps = [decode_step(cache, seed) for seed in range(8)]
        assert max(step.largest for step in steps) <= 8192, "a block that is sealed, not the history"
        calls.append([step.calls for step in steps[:3]])  # kivi4 seals in the fourth
    assert calls[0] == calls[1]
    assert max(calls[0]) <= 40


@pytest.mark.parametrize("recipe", ["none", "int8", "kivi4", IMMEDIATE, "int8+sinks=0+recent=0"])
def test_bytes_are_those_of_the_tensors(recipe):
    geometry = Geometry(2, 2, 32, 64)
    cache = Single(recipe, geometry)
    for total in (1, 30, 200, 500):
        feed_in_chunks(cache, total, 100, batch=2)
        tensors = list(cache.store.tensors())
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.nbytes}) == len(
            [tensor for tensor in tensors if tensor.nbytes]
        )
        assert cache.store.nbytes == sum(tensor.nbytes for tensor in tensors)
    slots = cache.store.slots
    exact = 2 * 2 * slots * (32 * cache.store.key.itemsize + 64 * cache.store.value.itemsize)
    assert cache.store.key.nbytes + cache.store.value.nbytes == exact


def test_the_exact_part_never_grows():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 10, 10)
    pointer, shape = cache.store.key.data_ptr(), cache.store.key.shape
    feed_in_chunks(cache, 500, 60)
    feed_in_chunks(cache, 70, 1)
    assert (cache.store.key.data_ptr(), cache.store.key.shape) == (pointer, shape)


def test_a_hundred_requests_leave_no_slope():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 400, 400)
    held = []
    for turn in range(100):
        cache.crop(200)
        feed_in_chunks(cache, 200, 200, seed=turn)
        held.append(cache.store.nbytes)
    assert held == [held[0]] * 100


@pytest.mark.parametrize("recipe", ["none", "int8", "kivi4", IMMEDIATE])
def test_what_is_not_in_use_is_never_read(recipe):
    """NaN in unused exact slots and in unused slots of blocks: the output is that of the clean cache."""
    geometry = Geometry(4, 2, 32, 32)
    clean, poisoned = Single(recipe, geometry), Single(recipe, geometry)
    for cache in (clean, poisoned):
        feed_in_chunks(cache, 300, 120, batch=2)
        cache.crop(217)  # ends inside a block
        feed_in_chunks(cache, 9, 4, batch=2, seed=5)
    store = poisoned.store
    unused = 0
    for index, row in enumerate(store.rows):
        for exact in (store.key, store.value):
            exact[index, :, row.sinks + row.tail :] = torch.nan
        used = {entry.block: entry.valid for entry in poisoned.table.rows[index]}
        for slab, start in zip(store.pool.slabs, store.pool.starts, strict=True):
            for side in "kv":
                layout = store.pool.layouts[side]
                for part in layout.parts:
                    if part.name not in ("code", "token", "zero") or slab[side][part.name].dtype == torch.uint8:
                        continue
                    for block, valid in used.items():
                        if start <= block < start + len(slab[side][part.name]) and index == 0:
                            slab[side][part.name][block - start, :, valid:] = torch.nan
                            unused += store.block - valid
        holders = {entry.block for entries in poisoned.table.rows for entry in entries}
        for slab, start in zip(store.pool.slabs, store.pool.starts, strict=True):
            for parts in slab.values():
                for tensor in parts.values():
                    for at in range(len(tensor)):
                        if start + at not in holders:
                            tensor[at] = 255 if tensor.dtype == torch.uint8 else torch.nan
    if recipe in ("none", IMMEDIATE):
        assert unused > 0
    chunk = geometry.chunk(2, 3, 99)
    got, want = poisoned.feed(chunk), clean.feed(chunk)
    assert torch.equal(got, want)
    chunk = geometry.chunk(2, 140, 98)  # seals over the poisoned slots
    assert torch.equal(poisoned.feed(chunk), clean.feed(chunk))
    chunk = geometry.chunk(2, 1, 97)
    assert torch.equal(poisoned.feed(chunk), clean.feed(chunk))


def test_padding_never_enters_statistics():
    """A padded row holds the bytes of the same text fed alone, whatever the padding contains."""
    geometry = Geometry(2, 1, 32, 32)
    q, k, v = geometry.chunk(1, 150, 3)
    solo = Single("kivi4", geometry)
    solo.feed((q, k, v))
    padded = Single("kivi4", geometry)
    wide = [torch.cat([torch.full((1, t.shape[1], 37, 32), 5e4), t], dim=2) for t in (q, k, v)]
    visible = causal(187, 187) & (torch.arange(187) >= 37)
    padded.feed(tuple(wide), visible[None, None])
    row = padded.store.rows[0]
    assert (row.tokens, row.holes) == (150, ((0, 37),))
    assert padded.layer.length == 187
    for one, other in zip(stored(solo.layer, 0), stored(padded.layer, 0), strict=True):
        assert torch.equal(one, other)


# -- refusals leave the state as it was --------------------------------------------------------------------------------


def snapshot(cache: Single) -> tuple[int, list[tuple[int, int, int]], list[torch.Tensor]]:
    rows = [(row.sinks, row.packed, row.tail) for row in cache.store.rows]
    return cache.layer.length, rows, [tensor.clone() for tensor in cache.store.tensors()]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_nan_and_inf_are_refused_by_position(bad, side):
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 100, 100, batch=2)
    before = snapshot(cache)
    _q, k, v = cache.geometry.chunk(2, 9, 5)
    (k if side == "keys" else v)[1, 0, 4, 3] = bad
    with pytest.raises(InputError, match=f"layer 0: {side} contain NaN or Inf at position 104 of sequence 1"):
        cache.layer.append(k, v)
    after = snapshot(cache)
    assert before[:2] == after[:2]
    assert all(torch.equal(one, other) for one, other in zip(before[2], after[2], strict=True))
    cache.feed(cache.geometry.chunk(2, 9, 6))
    assert cache.layer.length == 109


def test_values_that_fp16_cannot_hold():
    geometry = Geometry(2, 1, 32, 32)
    q, k, v = geometry.chunk(1, 5, 1)
    k[0, 0, 3, 3] = 7e4
    cache = Single("kivi4", geometry)
    with pytest.raises(InputError, match=r"layer 0: keys reach 7e\+04, past the 65504 of fp16; add '\+exact=fp32'"):
        cache.layer.append(k, v)
    assert cache.layer.length == 0
    Single("kivi4+exact=fp32", geometry).feed((q, k, v))
    Single("none", geometry).feed((q, k, v))  # keeps fp32 as it is
    with pytest.raises(InputError, match="65504 of fp16"):
        Single("kivi4+exact=fp16", geometry).layer.append(k.bfloat16(), v.bfloat16())


@pytest.mark.parametrize(
    ("shape", "says"),
    [((3, 1, 4, 32), r"\(3, 1, 32"), ((2, 2, 4, 32), r"\(2, 2, 32"), ((2, 1, 4, 16), r"\(2, 1, 16")],
)
def test_shapes_of_another_model_are_refused(shape, says):
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 40, 40, batch=2)
    states = torch.randn(shape)
    with pytest.raises(InputError, match=rf"layer 0: .*{says}.*the cache holds \(2, 1, 32, 32.*new cache"):
        cache.layer.append(states, states)
    assert cache.layer.length == 40


def test_a_cleared_layer_takes_another_shape():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 100, 100)
    cache.table.clear()
    cache.layer.clear()
    cache.geometry = Geometry(4, 2, 64, 64)
    feed_in_chunks(cache, 100, 100, batch=3)
    assert stored(cache.layer, 2)[0].shape == (2, 100, 64)


def test_a_mask_of_the_wrong_width():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 40, 40)
    with pytest.raises(InputError, match=r"mask has 41 columns.*40 \+ 2"):
        cache.feed(cache.geometry.chunk(1, 2, 3), torch.ones(1, 1, 2, 41, dtype=torch.bool))


def test_padding_that_becomes_visible():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    visible = causal(20, 20) & (torch.arange(20) >= 6)
    cache.feed(cache.geometry.chunk(1, 20, 1), visible[None, None])
    with pytest.raises(InputError, match="columns 0-5 of sequence 0 were padding"):
        cache.feed(cache.geometry.chunk(1, 1, 2), torch.ones(1, 1, 1, 21, dtype=torch.bool))


def test_attending_without_a_chunk():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    feed_in_chunks(cache, 5, 5)
    with pytest.raises(StateError, match="layer 0: no chunk is waiting"):
        cache.layer.attend(torch.zeros(1, 2, 1, 32), None, cache.geometry.score)


def test_gradients_are_refused():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    _, k, v = cache.geometry.chunk(1, 5, 1)
    with pytest.raises(StateError, match="gradients"):
        cache.layer.append(k.requires_grad_(), v)
    with torch.no_grad():
        cache.layer.append(k, v)


def test_a_dtype_that_is_no_float():
    cache = Single("kivi4", Geometry(2, 1, 32, 32))
    with pytest.raises(InputError, match=r"torch\.float64; use float16, bfloat16 or float32"):
        cache.layer.append(torch.zeros(1, 1, 2, 32, dtype=torch.float64), torch.zeros(1, 1, 2, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("int8+immediate", "block statistics"),
        ("k=affine:4:scale=24+v=none", "group=24 does not divide head_dim=32"),
        ("k=afine:4+v=none", "Did you mean 'affine'?"),
        ("k=rotat/affine:4+v=none", "Did you mean 'rotate'?"),
        ("k=affine:9+v=none", "affine:bits=9"),
        ("k=affine:4:aysm+v=none", "Did you mean 'asym'?"),
    ],
)
def test_sides_that_cannot_be_built(recipe, says):
    cache = Single(recipe, Geometry(2, 1, 32, 32))
    with pytest.raises(RecipeError) as caught:
        cache.feed(cache.geometry.chunk(1, 4, 1))
    assert says in str(caught.value)
