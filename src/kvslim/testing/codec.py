"""check_codec: what every codec must keep, on the codec alone and as the two sides of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvslim.bitpack import packed_width
from kvslim.cache import LayerCache
from kvslim.codecs import build_codec
from kvslim.codecs.base import Codec
from kvslim.codecs.decode import decode
from kvslim.codecs.feedback import metric_factor
from kvslim.codecs.none import NoneCodec
from kvslim.codecs.side import SidePacker
from kvslim.errors import InputError
from kvslim.layout import RAW_BITS, STORAGE, PackedBlock, PackedLayout, block_nbytes, is_token_wise
from kvslim.recipe import Recipe, Side
from kvslim.registry import instantiate
from kvslim.store.table import BlockAllocator, BlockTable
from kvslim.testing import pipeline
from kvslim.testing.suite import HEAD_DIMS, normal, refusal, run, same_bytes, unequal

_BLOCK = 32
_HEADS = 2
_EXACT_MSE = 1e-5  # of values that are stored as such: bf16 rounds N(0,1) by half of that
_CONSTANTS = (2.5, -0.3, 7.0, 100.0)


def check_codec(codec: Codec | type[Codec] | str, *, mse_bound: float | None = None) -> None:
    """Hold a codec to all that the library relies on.

    Parameters
    ----------
    codec : Codec, type or str
        A codec, a class of them with defaults for all settings, or text as in a recipe ("affine:4:asym"). It need not
        be registered.
    mse_bound : float, optional
        Mean square error on N(0,1) at any head_dim; what the codec itself states (`Codec.mse_bound`) by default.

    Raises
    ------
    ConformanceError
        Listing every failed check in plain words.
    InputError
        `codec` is nothing that can be checked.
    """
    if isinstance(codec, str):
        codec = build_codec(Side.parse(codec))
    elif isinstance(codec, type):
        codec = codec()
    if not isinstance(codec, Codec):
        raise InputError(f"expected a codec, a class of codecs or text such as 'affine:4', got {codec!r}")
    run(f"codec {codec!r}", _Subject(codec, mse_bound), (*_CHECKS, *pipeline.CHECKS))


@dataclass
class _Subject:
    """A codec under test."""

    codec: Codec
    stated: float | None = None

    @cached_property
    def layouts(self) -> dict[int, PackedLayout]:
        """Layouts by head_dim, as far as the codec takes it."""
        found = {}
        for head_dim in HEAD_DIMS:
            try:
                found[head_dim] = self.codec.layout(head_dim, _BLOCK)
            except Exception:  # judged by a check of its own
                continue
        return found

    @cached_property
    def head_dim(self) -> int:
        """A head_dim that the codec takes: 64, 128, or whatever it can do."""
        return next((dim for dim in (64, 128, *HEAD_DIMS) if dim in self.layouts), 128)

    def factor(self, head_dim: int) -> torch.Tensor | None:
        """U of queries with unequal channels; None where the codec does not ask for it."""
        if not self.codec.needs_queries:
            return None
        queries = normal(_HEADS, 4 * head_dim, head_dim, seed=5) / torch.arange(1, head_dim + 1).sqrt()
        return metric_factor(queries.mT @ queries)

    def parts(self, x: torch.Tensor, heads: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Encode tokens (blocks, kv_heads, tokens, head_dim); `heads` says which of the kv heads they are."""
        factor = self.factor(x.shape[-1])
        return self.codec.encode(x, factor if factor is None else factor[heads])

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """Encode and read back whole blocks."""
        layout = self.codec.layout(x.shape[-1], x.shape[-2])
        return self.codec.reduce_output(decode(PackedBlock(layout, self.parts(x)), self.codec.table()))

    def bound(self, layout: PackedLayout) -> float:
        """Mean square error that is allowed on N(0,1)."""
        stated = self.codec.mse_bound if self.stated is None else self.stated
        if stated is not None:
            return stated
        if layout.segments[0].bits >= RAW_BITS:
            return _EXACT_MSE
        bits = sum(segment.width * segment.bits for segment in layout.segments) / layout.head_dim
        return min(0.5, 32 * 4.0**-bits)

    # -- as two sides of a cache (see pipeline.py)

    layer_index = 3

    def cache(self) -> LayerCache:
        """Return an empty layer that packs K and V with the codec."""
        recipe = Recipe.parse(f"none+block={_BLOCK}+sinks=2+recent=3")
        return _CodecLayer(self.codec, recipe, self.layer_index, BlockTable(BlockAllocator(), _BLOCK))


class _CodecLayer(LayerCache):
    """A layer whose sides are packed by a codec that no registry needs to know."""

    def __init__(self, codec: Codec, *args: Any):
        super().__init__(*args)
        self._codec = codec

    def packers(self, head_dims: tuple[int, int], dtype: str) -> tuple[SidePacker, SidePacker]:
        codec = self._codec
        if type(codec) is NoneCodec:
            codec = dataclasses.replace(codec, dtype=dtype)
        key, value = (SidePacker.of(codec, head_dim, self.recipe.block) for head_dim in head_dims)
        return key, value


# -- the checks ----------------------------------------------------------------------------------------------------


def _settings(subject: _Subject) -> Iterator[str]:
    """Settings are a frozen dataclass that a recipe can spell."""
    codec: Any = subject.codec
    if not dataclasses.is_dataclass(codec):
        yield f"{type(codec).__name__} is no dataclass"
        return
    try:
        hash(codec)
    except TypeError as error:
        yield f"cannot be hashed ({error}); write @dataclass(frozen=True)"
    fields = [(field.name, getattr(codec, field.name)) for field in dataclasses.fields(codec)]
    args = tuple(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in fields)
    if instantiate(type(codec), type(codec).__name__, args) != codec:
        yield f"the arguments {':'.join(args)} give another codec"


def _head_dims(subject: _Subject) -> Iterator[str]:
    """A head_dim of 16 to 512 works, or is refused by name with what is allowed."""
    for head_dim in HEAD_DIMS:
        try:
            subject.codec.layout(head_dim, _BLOCK)
        except Exception as error:
            yield from refusal(error, head_dim)
    if not subject.layouts:
        yield "none of them works"


def _stored_bytes(subject: _Subject) -> Iterator[str]:
    """The layout says which bytes are stored."""
    for head_dim, layout in subject.layouts.items():
        parts = subject.parts(normal(3, _HEADS, _BLOCK, head_dim))
        names = [part.name for part in layout.parts]
        if list(parts) != names:
            yield f"head_dim={head_dim}: parts are {list(parts)}, the layout has {names}"
            continue
        for part in layout.parts:
            tensor = parts[part.name]
            got, want = (tuple(tensor.shape), tensor.dtype), ((3, _HEADS, *part.shape), STORAGE[part.dtype])
            if got != want:
                yield f"head_dim={head_dim}: {part.name} is {got[0]} {got[1]}, the layout says {want[0]} {want[1]}"
        stored = sum(tensor.nbytes for tensor in parts.values())
        if stored != 3 * _HEADS * block_nbytes(layout):
            yield f"head_dim={head_dim}: {stored} bytes are stored, the layout says {3 * _HEADS * block_nbytes(layout)}"


def _table(subject: _Subject) -> Iterator[str]:
    """The code table is one fp32 vector of finite levels, one for every code."""
    table = subject.codec.table()
    for head_dim, layout in subject.layouts.items():
        raw = layout.segments[0].bits >= RAW_BITS
        levels = 0 if raw else sum(2**segment.bits for segment in layout.segments)
        if raw != (table is None):
            yield f"head_dim={head_dim}: codes are {'values' if raw else 'codes'}, and the table is {table}"
        elif table is not None and tuple(table.shape) != (levels,):
            yield f"head_dim={head_dim}: it has shape {tuple(table.shape)} for {levels} codes"
    if table is None:
        return
    again = subject.codec.table()
    if table.dtype != torch.float32 or not bool(table.isfinite().all()):
        yield f"it is {table.dtype}, with {int((~table.isfinite()).sum())} levels that are not finite"
    if again is None or not same_bytes(table, again):
        yield "a second call gives another one"


def _segments(subject: _Subject) -> Iterator[str]:
    """segments, groups and parts of the layout fit each other."""
    for head_dim, layout in subject.layouts.items():
        shapes = {part.name: part.shape for part in layout.parts}
        width, groups = sum(segment.width for segment in layout.segments), 0
        raw = layout.segments[0].bits >= RAW_BITS
        code = width if raw else sum(packed_width(segment.width, segment.bits) for segment in layout.segments)
        for segment in layout.segments:
            if segment.group and segment.width % segment.group:
                yield f"head_dim={head_dim}: groups of {segment.group} do not divide {segment.width} channels"
            groups += segment.width // segment.group if segment.group else 0
        want = {"code": (_BLOCK, code), "token": (_BLOCK, groups), "zero": (_BLOCK, groups), "block": (1,)}
        want.update(channel=(width,), offset=(width,))
        if (layout.head_dim, layout.block) != (head_dim, _BLOCK):
            yield f"head_dim={head_dim}, block={_BLOCK} give a layout of {layout.head_dim}, {layout.block}"
        for name in {"code", *(("token",) if groups else ())} - shapes.keys():
            yield f"head_dim={head_dim}: part '{name}' is missing"
        for name, shape in shapes.items():
            if want.get(name) != tuple(shape):
                yield f"head_dim={head_dim}: part '{name}' of shape {tuple(shape)}; readers know {want}"


def _round_trip(subject: _Subject) -> Iterator[str]:
    """Values of N(0,1) come back within the stated error."""
    for head_dim, layout in subject.layouts.items():
        x = normal(4, _HEADS, _BLOCK, head_dim, seed=head_dim)
        error = float((subject.decoded(x) - x).square().mean())
        if not error <= subject.bound(layout):
            yield f"head_dim={head_dim}: mean square error {error:.3g}, stated {subject.bound(layout):.3g}"


def _constants(subject: _Subject) -> Iterator[str]:
    """Zeros stay zero, and constants come back within the stated error."""
    layout = subject.layouts[subject.head_dim]
    x = torch.zeros(1 + len(_CONSTANTS), _HEADS, _BLOCK, subject.head_dim)
    for block, constant in enumerate(_CONSTANTS, 1):
        x[block] = constant
    back = subject.decoded(x)
    if not float(back[0].abs().max()) < 1e-6:
        yield f"0 comes back as {float(back[0].abs().max()):.3g}"
    for block, constant in enumerate(_CONSTANTS, 1):
        error = float((back[block] - constant).square().mean()) / constant**2
        if not error <= subject.bound(layout) + 1e-6:
            yield f"{constant} comes back with a relative mean square error of {error:.3g}"


def _odd(head_dim: int) -> torch.Tensor:
    """One block with rows of zeros, constants, an outlier, denormals, and of very small and very large size."""
    x = normal(1, _HEADS, _BLOCK, head_dim)
    x[0, 0, 3], x[0, 0, 4] = 0, 2.5
    x[0, 1, 5, 7] = 1e4
    x[0, 1, 6], x[0, 1, 7] = 1e-40, x[0, 1, 7] * 1e-6
    x[0, 1, 8] *= 1e4
    x[0, 0, :, 9] = 3.25
    return x


def _odd_rows(subject: _Subject) -> Iterator[str]:
    """outliers, denormals and rows of any size stay finite, and cost little more than a row that is dropped."""
    x = _odd(subject.head_dim)
    for name, part in subject.parts(x).items():
        if part.is_floating_point() and not bool(part.isfinite().all()):
            yield f"{name} holds NaN or Inf"
    back = subject.decoded(x)
    if not bool(back.isfinite().all()):
        yield f"{int((~back.isfinite()).sum())} values come back as NaN or Inf"
        return
    most = max(1.05, 4 * subject.bound(subject.layouts[subject.head_dim]))
    if float((back - x).square().sum()) > most * float(x.square().sum()):
        yield f"the error, {float((back - x).norm()):.3g}, is larger than the values, {float(x.norm()):.3g}"


def _independence(subject: _Subject) -> Iterator[str]:
    """A block and a kv head are packed on their own."""
    x = normal(3, _HEADS, _BLOCK, subject.head_dim) * torch.tensor([1.0, 30.0, 0.01])[:, None, None, None]
    whole = subject.parts(x)
    for block in range(3):
        alone = subject.parts(x[block : block + 1])
        for name in unequal(alone, {name: part[block : block + 1] for name, part in whole.items()}):
            yield f"{name} of a block depends on the blocks beside it"
    for head in range(_HEADS):
        one = slice(head, head + 1)
        for name in unequal(subject.parts(x[:, one], one), {name: part[:, one] for name, part in whole.items()}):
            yield f"{name} of a kv head depends on the others"


def _tokens(subject: _Subject) -> Iterator[str]:
    """Without block statistics, a token's bytes do not depend on the tokens beside it."""
    if not is_token_wise(subject.layouts[subject.head_dim]):
        return
    x = normal(2, _HEADS, _BLOCK, subject.head_dim)
    whole = subject.parts(x)
    for start, stop in ((0, 1), (0, _BLOCK - 1), (_BLOCK - 1, _BLOCK), (5, 17)):
        some = subject.parts(x[:, :, start:stop])
        for name in unequal(some, {name: part[:, :, start:stop] for name, part in whole.items()}):
            yield f"{name} of tokens {start} to {stop - 1} differs when they come alone"


def _determinism(subject: _Subject) -> Iterator[str]:
    """The same tokens give the same bytes, however they lie in memory, and stay as they are."""
    x = normal(2, _HEADS, _BLOCK, subject.head_dim)
    given, first = x.clone(), subject.parts(x)
    if not torch.equal(x, given):
        yield "encode() changed its input"
    first = {name: part.clone() for name, part in first.items()}
    wide = torch.full((2, _BLOCK, _HEADS, 2 * subject.head_dim), torch.nan)
    wide[..., ::2] = given.transpose(1, 2)
    for what, again in (("a second time", given), ("from a strided view", wide[..., ::2].transpose(1, 2))):
        for name in unequal(first, subject.parts(again)):
            yield f"{name} differs {what}"


def _stored_width(subject: _Subject) -> Iterator[str]:
    """Queries in the stored width score as the values read back do, and sums come back as values do."""
    layout = subject.layouts[subject.head_dim]
    x = normal(1, _HEADS, _BLOCK, subject.head_dim)
    stored = decode(PackedBlock(layout, subject.parts(x)), subject.codec.table())[0]
    query, weights = normal(_HEADS, 3, subject.head_dim, seed=1), normal(_HEADS, 3, _BLOCK, seed=2).softmax(-1)
    back = subject.codec.reduce_output(stored)
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {
        "expand_query": (subject.codec.expand_query(query) @ stored.mT, query @ back.mT),
        "reduce_output": (subject.codec.reduce_output(weights @ stored), weights @ back),
    }
    for name, (got, want) in pairs.items():
        if got.shape != want.shape or not torch.allclose(got, want, atol=1e-3, rtol=1e-3):
            yield f"{name}() does not agree with reduce_output(decode())"


_CHECKS = (
    _settings,
    _head_dims,
    _segments,
    _stored_bytes,
    _table,
    _round_trip,
    _constants,
    _odd_rows,
    _independence,
    _tokens,
    _determinism,
    _stored_width,
)
