"""Tiles of the append kernel, [J, M, T, L] as append.py describes them: load and transform, fold, pack and store."""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(65504.0)


@triton.jit
def half(x):
    """Round to fp16, saturating."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST).to(tl.float16)


@triton.jit
def folded(x):
    """Sum over the channels of each group, [J, 1, T, 1], in the order of `scales.total`."""
    J: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[2]
    # of two numbers there is one sum, whatever the order of a reduction
    for _ in tl.static_range(10):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [J, 2, x.shape[1] // 2, T, x.shape[3]]), 1)
    for _ in tl.static_range(10):
        if x.shape[3] > 1:
            x = tl.sum(tl.reshape(x, [J, 1, T, 2, x.shape[3] // 2]), 3)
    return x


@triton.jit
def fold_tokens(x):
    """Sum over tokens, [J, M, 1, L], in the order of `scales.total`."""
    J: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    L: tl.constexpr = x.shape[3]
    for _ in tl.static_range(10):
        if x.shape[2] > 1:
            x = tl.sum(tl.reshape(x, [J, M, 2, x.shape[2] // 2, L]), 2)
    return x


@triton.jit
def hadamard(x, SIZE: tl.constexpr):
    """Butterfly over runs of SIZE channels, normalised (`rotate.butterfly`)."""
    J: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    L: tl.constexpr = x.shape[3]
    for p in tl.static_range(10):
        if 2**p < SIZE:
            if 2**p < L:
                x = crossed(tl.reshape(x, [J * M * T, L // 2 ** (p + 1), 2, 2**p]))
            else:
                x = crossed(tl.reshape(x, [1, J * M * L // 2 ** (p + 1), 2, 2**p // L * T * L]))
            x = tl.reshape(x, [J, M, T, L])
    return x * SIZE**-0.5


@triton.jit
def crossed(pairs):
    """Sum and difference along axis 2 of [A, B, 2, N], in the places of what they are of."""
    second = tl.arange(0, 2)[None, None, :, None]
    plus = tl.sum(pairs, 2, keep_dims=True)
    minus = tl.sum(tl.where(second == 0, pairs, -pairs), 2, keep_dims=True)
    return tl.where(second == 0, plus, minus)


@triton.jit
def load_channels(P, rows, D: tl.constexpr, J: tl.constexpr, M: tl.constexpr, L: tl.constexpr):
    """Rows of D numbers at offsets `rows` [T], as a tile; fp32, padding 0.

    The same vector for all tokens is loaded T times as well: a narrower load would impose its own layout on the tile.
    """
    c = (tl.arange(0, J)[:, None, None, None] * M + tl.arange(0, M)[None, :, None, None]) * L
    c += tl.arange(0, L)[None, None, None, :]
    at = P + rows[None, None, :, None] + c
    if D == J * M * L:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=c < D, other=0.0).to(tl.float32)


@triton.jit
def transformed(
    X, P, MATRIX, page, tokens, mask, x_token, p_step, row, STEPS: tl.constexpr, D: tl.constexpr, J: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Load tokens and apply the chain; a matrix can only be its first step."""
    T: tl.constexpr = tokens.shape[0]
    FIRST: tl.constexpr = STEPS[0] if len(STEPS) > 0 else ""
    same = tl.zeros([T], tl.int32)
    if FIRST == "matrix":
        x = product(X, MATRIX, tokens, mask, x_token, row, D, J, M, L)
    else:
        c = (tl.arange(0, J)[:, None, None, None] * M + tl.arange(0, M)[None, :, None, None]) * L
        c += tl.arange(0, L)[None, None, None, :]
        inside = mask[None, None, :, None] & (c < D)
        x = tl.load(X + (tokens * x_token)[None, None, :, None] + c, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(len(STEPS)):
        if STEPS[i] == "weight":
            x = x * load_channels(P + i * p_step, same, D, J, M, L)
        elif STEPS[i] == "mean":
            x = x - load_channels(P + i * p_step, same, D, J, M, L)
        elif STEPS[i] == "page":
            x = x - load_channels(page, same, D, J, M, L)
        elif STEPS[i] == "hadamard":
            x = hadamard(x, D & -D)
    return x


@triton.jit
def product(X, MATRIX, tokens, mask, x_token, row, D: tl.constexpr, J: tl.constexpr, M: tl.constexpr, L: tl.constexpr):
    """Tokens times a matrix, a channel at a time in fp32: matrix units do not multiply fp32 everywhere."""
    T: tl.constexpr = tokens.shape[0]
    x = tl.zeros([J, M, T, L], tl.float32)
    for k in range(D):
        own = tl.load(X + tokens * x_token + k, mask=mask, other=0.0).to(tl.float32)
        values = load_channels(MATRIX, k * row + tl.zeros([T], tl.int32), D, J, M, L)
        x = tl.fma(own[None, None, :, None] + tl.zeros([J, M, T, L], tl.float32), values, x)
    return x


@triton.jit
def store_packed(codes, to, mask, BITS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr):
    """Pack codes as `bitpack.pack` does and store them from the pointers `to` [1, 1, T, 1] on."""
    if BITS & 8:
        store_plane(codes, to, mask, 8, BITS, D, UNIT)
    if BITS & 4:
        store_plane(codes, to, mask, 4, BITS, D, UNIT)
    if BITS & 2:
        store_plane(codes, to, mask, 2, BITS, D, UNIT)
    if BITS & 1:
        store_plane(codes, to, mask, 1, BITS, D, UNIT)


@triton.jit
def store_plane(codes, to, mask, WIDTH: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr):
    """Pack and store the plane of WIDTH bits: byte i of a unit's SIZE holds its channels i, i + SIZE, i + 2 SIZE ..."""
    T: tl.constexpr = codes.shape[2]
    L: tl.constexpr = codes.shape[3]
    UNITS: tl.constexpr = codes.shape[0] * codes.shape[1] * L // UNIT
    SIZE: tl.constexpr = UNIT * WIDTH // 8
    NEAR: tl.constexpr = L if L < SIZE else SIZE  # channels of the L adjacent ones that go into different bytes
    INNER: tl.constexpr = L // NEAR
    OUTER: tl.constexpr = 8 // WIDTH // INNER
    LOW: tl.constexpr = BITS - BITS % (2 * WIDTH)  # bits of the wider planes
    field = tl.reshape((codes >> LOW) & (2**WIDTH - 1), [UNITS, OUTER, SIZE // NEAR * T, INNER, NEAR])
    # the bits of different channels do not meet
    field = tl.sum(field << (tl.arange(0, INNER) * WIDTH)[None, None, None, :, None], 3)
    packed = tl.sum(field << (tl.arange(0, OUTER) * (WIDTH * INNER))[None, :, None, None], 1)
    packed = tl.reshape(packed, [UNITS, SIZE // NEAR, T, NEAR])
    u = tl.arange(0, UNITS)[:, None, None, None]
    at = u * (UNIT * BITS // 8) + UNIT * LOW // 8 + tl.arange(0, SIZE // NEAR)[None, :, None, None] * NEAR
    at += tl.arange(0, NEAR)[None, None, None, :]
    tl.store(to + at, packed.to(tl.uint8), mask=mask[None, None, :, None] & (u * UNIT < D))
