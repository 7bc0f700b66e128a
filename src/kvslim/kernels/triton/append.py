"""The append kernel: transform, centre, scale, search, code and pack; nothing between is written to memory.

Equals SidePacker.encode (kvslim.codecs.side) byte for byte: sums fold an axis in half as `scales.total` does, Hadamard
passes are those of `rotate.butterfly`, divisions and roots are rounded to nearest and no product is fused with a sum.
One exception: a random orthogonal rotation is summed in fp32 here and in fp64 there, so that values within 1e-6 of an
edge between two codes may fall on its other side (docs/gpu.md has the share).

A tile is [J, M, T, L]: scale group, channels of it that lie L apart, tokens, L adjacent channels; padded with zeros to
powers of two. Of an axis that comes later a compiler gives more to the lanes of a warp: L and the tokens lie in lanes,
the 16 values that a thread holds are the upper bits of the channel. Folding from the top then stays within a thread
until its last few steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvslim.kernels.triton.append_codes import affine_codes, float8_codes, microfloat_codes, table_codes, uniform_scale
from kvslim.kernels.triton.append_tile import fold_tokens, half, load_channels, store_packed, transformed

# strides are not specialized, and `row` is D where a compiler must not see it: of an address that it knows to be
# aligned it loads four channels into one thread, which takes the lanes from them
_PLAIN = ("heads", "count", "x_block", "x_head", "x_token", "p_step", "p_head", "row")


@triton.jit
def extremes(
    X, P, MATRIX, page, count, x_token, p_step, row, STEPS: tl.constexpr, D: tl.constexpr, J: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, L: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Lowest and highest value of each channel over a block [J, M, 1, L]; of ``sym`` codes the largest magnitude."""
    low = tl.full([J, M, 1, L], float("inf"), tl.float32)
    high = tl.full([J, M, 1, L], -float("inf"), tl.float32)
    for start in range(0, count, T):
        t = start + tl.arange(0, T)
        x = transformed(X, P, MATRIX, page, t, t < count, x_token, p_step, row, STEPS, D, J, M, L)
        if KIND != "asym":
            x = tl.abs(x)
        valid = (t < count)[None, None, :, None]
        low = tl.minimum(low, tl.min(tl.where(valid, x, float("inf")), 2, keep_dims=True))
        high = tl.maximum(high, tl.max(tl.where(valid, x, -float("inf")), 2, keep_dims=True))
    return low, high


@triton.jit(do_not_specialize=_PLAIN)
def append_sums(
    X, P, MATRIX, PAGES, SUMS,
    heads, count, x_block, x_head, x_token, p_step, p_head, row,
    STEPS: tl.constexpr, D: tl.constexpr, J: tl.constexpr, M: tl.constexpr, T: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Sum transformed tokens that lie as many apart as there are programs: SUMS (blocks, heads, programs, D).

    Folding these sums in turn gives what `scales.total` gives over the whole block.
    """
    head = tl.program_id(1)
    own = tl.program_id(2).to(tl.int64) * heads + head
    apart = tl.num_programs(0)
    X += tl.program_id(2).to(tl.int64) * x_block + head.to(tl.int64) * x_head
    t = tl.program_id(0) + apart * tl.arange(0, T)
    x = transformed(
        X, P + head * p_head, MATRIX, PAGES + own * row, t, t < count, x_token, p_step, row, STEPS, D, J, M, L
    )  # fmt: skip
    # what a transform made of tokens that are not there
    x = fold_tokens(tl.where((t < count)[None, None, :, None], x, 0.0))
    c = (tl.arange(0, J)[:, None, None, None] * M + tl.arange(0, M)[None, :, None, None]) * L
    c += tl.arange(0, L)[None, None, None, :]
    tl.store(SUMS + (own * apart + tl.program_id(0)) * D + c, x, mask=c < D)


@triton.jit(do_not_specialize=_PLAIN)
def append(
    X, P, MATRIX, PAGES, SUMS, FACTOR, DIAGONAL, EDGES, LEVELS, MULTIPLES, CODE, SCALE, ZERO,
    heads, count, x_block, x_head, x_token, p_step, p_head, row, scale_by,
    STEPS: tl.constexpr, CODEC: tl.constexpr, BITS: tl.constexpr, OVER: tl.constexpr, FIT: tl.constexpr,
    KIND: tl.constexpr, FEEDBACK: tl.constexpr, APART: tl.constexpr, COUNT: tl.constexpr, NEARBY: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, J: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Encode X [blocks, heads, count, D], given by strides; all else is contiguous. Settings are those of AppendForm.

    P : vectors of the steps, (steps, heads or 1, D) by strides. MATRIX : (D, D). PAGES : (blocks, heads, D).
    SUMS : of `append_sums` with APART programs; 0 where no mean is stored.
    FACTOR, DIAGONAL : `feedback.carry_steps`, (heads, D, D) and (heads, D).
    EDGES, LEVELS : of the table. MULTIPLES : COUNT multiples, their inverses, NEARBY further ones.
    CODE, SCALE, ZERO : the parts: SCALE is token, block or channel; ZERO is zero, offset, or e2m1's block.
    """
    head = tl.program_id(1)
    own = tl.program_id(2).to(tl.int64) * heads + head
    X += tl.program_id(2).to(tl.int64) * x_block + head.to(tl.int64) * x_head
    P += head * p_head
    page = PAGES + own * row
    j = tl.arange(0, J)[:, None, None, None]
    c = (j * M + tl.arange(0, M)[None, :, None, None]) * L + tl.arange(0, L)[None, None, None, :]
    first = tl.program_id(0) * T
    last = tl.minimum(first + T, count)
    scale = tl.zeros([1, 1, 1, 1], tl.float32)
    zero = tl.zeros([1, 1, 1, 1], tl.float16)
    mean = tl.zeros([1, 1, 1, 1], tl.float32)
    if APART > 0:
        sums = load_channels(SUMS + own * APART * row, row * tl.arange(0, APART), D, J, M, L)
        stored_mean = half(tl.div_rn(fold_tokens(sums), count.to(tl.float32)))
        tl.store(ZERO + own * D + c, stored_mean, mask=c < D)
        mean = stored_mean.to(tl.float32)
    if OVER != "group":
        first = 0
        last = count
        low, high = extremes(X, P, MATRIX, page, count, x_token, p_step, row, STEPS, D, J, M, T, L, KIND)
        if OVER == "channel":
            scale, zero = uniform_scale(low, high, BITS, KIND)
            tl.store(SCALE + own * D + c, scale, mask=c < D)
            if KIND == "asym":
                tl.store(ZERO + own * D + c, zero, mask=c < D)
        else:
            top = scale + tl.max(tl.max(tl.max(high, 3, keep_dims=True), 1, keep_dims=True), 0, keep_dims=True)
            if CODEC == "e2m1":
                top = tl.div_rn(top, scale_by)
                scale = tl.maximum(tl.where(top > 0, top, 1.0), 2.0**-120)
                tl.store(ZERO + own + tl.zeros([1, 1, 1, 1], tl.int32), scale)
            else:
                scale, zero = uniform_scale(top, top, BITS, KIND)
                tl.store(SCALE + own + tl.zeros([1, 1, 1, 1], tl.int32), scale)
    for start in range(first, last, T):
        t = start + tl.arange(0, T)
        mask = t < count
        x = transformed(X, P, MATRIX, page, t, mask, x_token, p_step, row, STEPS, D, J, M, L)
        if APART > 0:
            x = x - mean
        if CODEC == "table":
            codes, token = table_codes(
                x, FACTOR + head * row * row, DIAGONAL + head * row, row, EDGES, LEVELS, MULTIPLES, BITS, FIT, KIND,
                FEEDBACK, COUNT, NEARBY, D, WIDTH,
            )  # fmt: skip
        elif CODEC == "e4m3":
            codes, token = float8_codes(x)
        elif CODEC == "e2m1":
            codes, token = microfloat_codes(x, scale, EDGES, LEVELS, scale_by, KIND)
        else:
            codes, token, origin = affine_codes(x, scale, zero, BITS, OVER, KIND, D)
        rows = (own * count + t)[None, None, :, None]
        if OVER == "group" or CODEC == "e2m1":
            at = rows * (D // WIDTH) + j
            stored = mask[None, None, :, None] & (j * WIDTH < D)
            tl.store(SCALE + at, token, mask=stored)
            if KIND == "asym":
                tl.store(ZERO + at, origin, mask=stored)
        store_packed(codes, CODE + rows * (D * BITS // 8), mask, BITS, D, UNIT)
