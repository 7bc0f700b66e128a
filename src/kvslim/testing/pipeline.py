"""Checks of a packed layer: append, attend, seal. What they ask of codec and recipe alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from kvslim.attention import dispatch, reference
from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.codecs.decode import decode
from kvslim.errors import InputError
from kvslim.files import Contents, Kind, write
from kvslim.layout import TOKEN_PARTS
from kvslim.store.layer import LayerStore
from kvslim.store.state import describe, restore
from kvslim.testing.suite import normal, unequal

_HEADS, _GROUP = 2, 2
_CLOSE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of outputs around 1, by their rounding
_FILE = Kind("kvslim-conformance", 1, "conformance file", "run the check again")
Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Subject(Protocol):
    """What can be checked as a layer."""

    layer_index: int

    @property
    def head_dim(self) -> int:
        """A head_dim that works."""

    def cache(self) -> LayerCache:
        """Return an empty layer."""


def chunk(head_dim: int, tokens: int, seed: int, batch: int = 1) -> Chunk:
    """Query, key and value of N(0,1); (batch, heads, tokens, head_dim)."""
    shapes = ((_HEADS * _GROUP, 1), (_HEADS, 2), (_HEADS, 3))
    query, key, value = (normal(batch, heads, tokens, head_dim, seed=seed + more) for heads, more in shapes)
    return query, key, value


def feed(cache: LayerCache, states: Chunk, cuts: list[int], frozen: Any = None) -> None:
    """Feed a prompt in pieces; `frozen` are parameters to use in place of fitted ones."""
    start = 0
    for size in cuts:
        query, key, value = (each[:, :, start : start + size] for each in states)
        cache.append(key, value)
        assert cache.store is not None
        if frozen is not None:
            for row in cache.store.rows:
                row.frozen = frozen
        cache.attend(query, None, Score(query.shape[-1] ** -0.5))
        start += size


def store_of(cache: LayerCache) -> LayerStore:
    """Return the store of a layer that was fed."""
    assert cache.store is not None
    return cache.store


def state(cache: LayerCache) -> dict[str, torch.Tensor]:
    """Every tensor in use, and the counts, by name."""
    store, found = store_of(cache), {}
    for index, row in enumerate(store.rows):
        found[f"counts of sequence {index}"] = torch.tensor([row.sinks, row.packed, row.tail, store.length])
        view = store.view(index)
        found[f"exact keys of sequence {index}"], found[f"exact values of sequence {index}"] = (
            view.key.clone(),
            view.value.clone(),
        )
        for at, entry in enumerate(view.entries):
            for side in "kv":
                for name, part in store.pool.read(side, [entry.block]).parts.items():
                    used = part[:, :, : entry.valid] if name in TOKEN_PARTS else part
                    found[f"{side} {name} of block {at} of sequence {index}"] = used.clone()
    return found


def lengths(subject: Subject) -> tuple[int, list[int]]:
    """Tokens until the first block is sealed, and lengths around the borders."""
    recipe = subject.cache().recipe
    block = recipe.block
    first = recipe.sinks + (1 if recipe.immediate else recipe.recent + block)
    return first, sorted({1, block - 1, block, block + 1, first - 1, first, first + 1, first + block + 8})


def attention_over_decoded(store: LayerStore, states: Chunk) -> torch.Tensor:
    """Softmax in fp64 over the tokens as they are read back, and over the causal chunk; (heads, chunk, head_dim).

    Of the first sequence. Packed tokens are scored and summed in their own basis, as the packed form defines it.
    """
    query, key, value = (each[0].double() for each in states)
    view, codecs = store.view(0), [packer.codec for packer in store.packers]
    head_dim, new = query.shape[-1], key.shape[1]
    rows = query.reshape(_HEADS, _GROUP * new, head_dim)
    exact = torch.cat([view.key.double(), key], 1), torch.cat([view.value.double(), value], 1)
    scores, packed = rows @ exact[0].mT, 0
    hidden = torch.arange(new)[None] > torch.arange(new).repeat(_GROUP)[:, None]
    scores[..., -new:] = scores[..., -new:].masked_fill(hidden, -torch.inf)
    if view.frozen is not None and view.entries:
        read = [_decoded(store, side, frozen) for side, frozen in zip("kv", view.frozen, strict=True)]
        mapped, bias = view.frozen[0].chain.query(rows.float())
        own = codecs[0].expand_query(mapped).double() @ read[0].mT
        own = own if bias is None else own + bias.double()
        scores, packed = torch.cat([own, scores], -1), own.shape[-1]
    weights = (scores * head_dim**-0.5).softmax(-1)
    out = weights[..., packed:] @ exact[1]
    if packed and view.frozen is not None:
        summed, mass = weights[..., :packed] @ read[1], weights[..., :packed].sum(-1, keepdim=True)
        out = out + view.frozen[1].chain.output(codecs[1].reduce_output(summed.float()), mass.float()).double()
    return out.reshape(_HEADS * _GROUP, new, -1)


def _decoded(store: LayerStore, side: str, frozen: Any) -> torch.Tensor:
    """Packed tokens of the first sequence in their own basis, fp64 (kv_heads, tokens, width)."""
    view, pieces = store.view(0), []
    position = view.origin + view.sinks
    for entry in view.entries:
        x = decode(store.pool.read(side, [entry.block]), frozen.table)
        offset = frozen.offset(torch.tensor([position]), x.shape[-1])
        x = x if offset is None else x + offset.unsqueeze(-2)
        pieces.append(x[0, :, : entry.valid].double())
        position += entry.valid
    return torch.cat(pieces, 1)


# -- the checks ----------------------------------------------------------------------------------------------------


def _borders(subject: Subject) -> Iterator[str]:
    """At every length around the borders, the tokens are all there and attention reads what is stored."""
    for length in lengths(subject)[1]:
        cache = subject.cache()
        feed(cache, chunk(subject.head_dim, length, 7), [length])
        tokens = store_of(cache).rows[0].tokens
        if tokens != length:
            yield f"{tokens} of {length} tokens are held"
        for new in (1, 3):
            yield from _compare(cache, chunk(subject.head_dim, new, 90), f"after {length} tokens", 2e-4)


def _compare(cache: LayerCache, states: Chunk, when: str, close: float) -> Iterator[str]:
    store, score = store_of(cache), Score(states[0].shape[-1] ** -0.5)
    want = attention_over_decoded(store, states)
    for name, attend in (("the reference", reference.attend), (dispatch.explain(store)[0], dispatch.attend)):
        out = attend(states[0], store, states[1:], None, score)
        error = float((out[0].double() - want).abs().max())
        if not error <= close:
            yield f"{when}, {name} is off by {error:.3g} for {states[0].shape[2]} queries (at most {close:g})"
        if out.dtype != states[0].dtype:
            yield f"{when}, {name} answers {states[0].dtype} with {out.dtype}"


def _dtypes(subject: Subject) -> Iterator[str]:
    """Models in fp32, bf16 and fp16 are served in their own dtype."""
    length = lengths(subject)[1][-1]
    for dtype, close in _CLOSE.items():
        cache = subject.cache()
        states = tuple(each.to(dtype) for each in chunk(subject.head_dim, length + 2, 21))
        feed(cache, tuple(each[:, :, :length] for each in states), [length])  # type: ignore[arg-type]
        yield from _compare(cache, tuple(each[:, :, length:] for each in states), str(dtype), close)  # type: ignore[arg-type]


def _chunking(subject: Subject) -> Iterator[str]:
    """How a prompt is cut does not change a byte: all at once, in four pieces, token by token."""
    length = -(-max(200, lengths(subject)[0] + 8) // 4) * 4
    states = chunk(subject.head_dim, length, 31, batch=2)
    whole = subject.cache()
    feed(whole, states, [length])
    frozen, want = store_of(whole).rows[0].frozen, None
    for cuts in ([length], [length // 4] * 4, [1] * length):
        other = subject.cache()
        feed(other, states, cuts, frozen)
        got = state(other)
        want = got if want is None else want
        yield from (f"{name} differs for {len(cuts)} x {cuts[0]} tokens" for name in unequal(want, got)[:3])
    if not store_of(whole).rows[0].packed:
        yield f"nothing was packed of {length} tokens"


def _not_finite(subject: Subject) -> Iterator[str]:
    """NaN and Inf are refused, naming layer and position, and nothing changes."""
    length = lengths(subject)[0] + 5
    cache = subject.cache()
    feed(cache, chunk(subject.head_dim, length, 41, batch=2), [length])
    before = state(cache)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for which, name in ((1, "keys"), (2, "values")):
            states = chunk(subject.head_dim, 6, 43, batch=2)
            states[which][1, 0, 4, 3] = bad
            try:
                cache.append(*states[1:])
                yield f"{bad} in {name} is taken"
                return
            except InputError as error:
                told = f"layer {subject.layer_index}" in str(error) and f"position {length + 4} " in str(error)
                if not told:
                    yield f"{bad} in {name} is refused with '{error}'"
            yield from (f"{part} changed" for part in unequal(before, state(cache))[:3])


def _odd_values(subject: Subject) -> Iterator[str]:
    """zeros, constants, outliers and denormals in keys and values give finite outputs."""
    first, sizes = lengths(subject)
    cache, (query, key, value) = subject.cache(), chunk(subject.head_dim, sizes[-1], 51)
    for states in (key, value):
        states[0, 0, first // 2 :: 5] = 0
        states[0, 0, first // 2 + 1 :: 7] = 2.5
        states[0, 1, first // 2 :: 11, 3] = 1e4
        states[0, 1, first // 2 + 3 :: 9] = 1e-40
    feed(cache, (query, key, value), [sizes[-1]])
    query, key, value = chunk(subject.head_dim, 2, 53)
    cache.append(key, value)
    out = cache.attend(query, None, Score(subject.head_dim**-0.5))
    if not bool(out.isfinite().all()):
        yield "an output is NaN or Inf"


def _operations(subject: Subject) -> Iterator[str]:
    """A crop keeps the bytes of what stays, and a fork leaves its parent as it was."""
    _, sizes = lengths(subject)
    for keep in sizes[:-1]:
        cache = subject.cache()
        feed(cache, chunk(subject.head_dim, sizes[-1], 61), [sizes[-1]])
        before = state(cache)
        table = cache.table.fork()
        fork = cache.fork(table)
        for row, packed in enumerate(fork.crop(keep)):
            table.crop(row, packed)
        held = store_of(fork).rows[0].tokens
        if held > keep:
            yield f"{held} tokens are held after a crop to {keep}"
        if held:
            yield from _compare(fork, chunk(subject.head_dim, 1, 67), f"cropped from {sizes[-1]} to {keep}", 2e-4)
        feed(fork, chunk(subject.head_dim, sizes[-1], 63), [sizes[-1]])
        yield from (f"{name} of the parent changed" for name in unequal(before, state(cache))[:3])


def _files(subject: Subject) -> Iterator[str]:
    """A layer that was written to a file and read again is the same, and goes on alike."""
    _, sizes = lengths(subject)
    cache, other = subject.cache(), subject.cache()
    states = chunk(subject.head_dim, 2 * sizes[-1], 71)
    feed(cache, states, [sizes[-1]])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        write(path, _FILE, *describe(cache.table, {0: store_of(cache)}))
        contents = Contents(path, _FILE)
        stores = restore(contents.header, contents, other.table, partial(_empty, other), mapped=False)
        contents.finish()
    other.store = stores[0]
    yield from (f"{name} is another" for name in unequal(state(cache), state(other))[:3])
    later: Chunk = tuple(each[:, :, sizes[-1] :] for each in states)  # type: ignore[assignment]
    for each in (cache, other):
        feed(each, later, [sizes[-1]])
    yield from (f"{name} is another some tokens later" for name in unequal(state(cache), state(other))[:3])


def _empty(cache: LayerCache, _layer: int, kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype) -> LayerStore:
    return cache.build(kv_heads, head_dims, dtype, torch.device("cpu"))


CHECKS = (_borders, _dtypes, _chunking, _not_finite, _odd_values, _operations, _files)
