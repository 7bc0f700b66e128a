"""Codes and scales of the append kernel, for tiles [J, M, T, L] as append.py describes them; scales [J, 1, T, 1]."""

from __future__ import annotations

import triton
import triton.language as tl

from kvslim.kernels.triton.append_tile import folded, half, load_channels

_TINY = tl.constexpr(2.0**-24)
_LARGEST = tl.constexpr(65504.0)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, ties to even
_E4M3_TOP = tl.constexpr(448.0)
_BIG = tl.constexpr(1024.0)


@triton.jit
def channels(x):
    """Return the number of each channel within its group, [1, M, 1, L]."""
    return tl.arange(0, x.shape[1])[None, :, None, None] * x.shape[3] + tl.arange(0, x.shape[3])[None, None, None, :]


@triton.jit
def without_padding(x, WIDTH: tl.constexpr, FILL: tl.constexpr):
    """FILL in place of what pads a group of WIDTH channels to a power of two."""
    if x.shape[1] * x.shape[3] > WIDTH:
        x = tl.where(channels(x) < WIDTH, x, FILL)
    return x


@triton.jit
def nearest(x, EDGES, BITS: tl.constexpr):
    """Index of the nearest level, ties to the lower one (`codecs.base.nearest`)."""
    code = tl.zeros(x.shape, tl.int32)
    if BITS <= 4:
        for i in tl.static_range(2**BITS - 1):
            code += (x > tl.load(EDGES + i)).to(tl.int32)
    else:
        for i in tl.static_range(BITS):
            step = 1 << (BITS - 1 - i)
            code += tl.where(x > tl.load(EDGES + code + (step - 1)), step, 0)
    return code


@triton.jit
def nearest_level(x, EDGES, LEVELS, BITS: tl.constexpr):
    """Return the nearest level itself."""
    if BITS > 4:
        return tl.load(LEVELS + nearest(x, EDGES, BITS))
    y = tl.zeros(x.shape, tl.float32) + tl.load(LEVELS)
    for i in tl.static_range(2**BITS - 1):
        y = tl.where(x > tl.load(EDGES + i), tl.load(LEVELS + i + 1), y)
    return y


@triton.jit
def fit_ratio(z, y, FIT: tl.constexpr):
    """Ratio of the stored scale to that of z, for the values y of its codes (`scales.fit_ratio`)."""
    if FIT == "ls" or FIT == "search":
        return tl.div_rn(folded(z * y), tl.maximum(folded(y * y), _TINY))
    if FIT == "norm":
        return tl.sqrt_rn(tl.div_rn(folded(z * z), tl.maximum(folded(y * y), _TINY)))
    if FIT == "eden":
        return tl.div_rn(folded(z * z), tl.maximum(folded(z * y), _TINY))
    return tl.full([z.shape[0], 1, z.shape[2], 1], 1.0, tl.float32)


@triton.jit
def best_multiple(z, EDGES, LEVELS, MULTIPLES, BITS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Multiple of the scale whose codes err least (`scales.best_multiple`)."""
    best = tl.full([z.shape[0], 1, z.shape[2], 1], 1.0, tl.float32)
    most = tl.zeros([z.shape[0], 1, z.shape[2], 1], tl.float32)
    for i in range(COUNT):
        y = nearest_level(z * tl.load(MULTIPLES + COUNT + i), EDGES, LEVELS, BITS)
        y = without_padding(y, WIDTH, 0.0)
        both = folded(z * y)
        gain = tl.div_rn(both * both, tl.maximum(folded(y * y), _TINY))
        best = tl.where(gain > most, tl.load(MULTIPLES + i), best)
        most = tl.maximum(gain, most)
    return best


@triton.jit
def table_codes(
    x, factor, diagonal, row, EDGES, LEVELS, MULTIPLES, BITS: tl.constexpr, FIT: tl.constexpr, KIND: tl.constexpr,
    FEEDBACK: tl.constexpr, COUNT: tl.constexpr, NEARBY: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes and fp16 scale of groups of WIDTH channels (`TableCodec.encode`)."""
    if KIND == "range":
        size = tl.max(tl.max(tl.abs(x), 3, keep_dims=True), 1, keep_dims=True)
    else:
        size = tl.sqrt_rn(tl.div_rn(folded(x * x), WIDTH * 1.0))
    r = half(size).to(tl.float32)
    z = tl.div_rn(x, tl.maximum(r, _TINY))
    multiple = tl.full([x.shape[0], 1, x.shape[2], 1], 1.0, tl.float32)
    if FIT == "search":
        multiple = best_multiple(z, EDGES, LEVELS, MULTIPLES, BITS, COUNT, WIDTH)
    if FEEDBACK:
        codes, ratio = carried_codes(
            z, multiple, factor, diagonal, row, EDGES, LEVELS, MULTIPLES + 2 * COUNT, BITS, FIT, NEARBY, D
        )
    else:
        scaled = tl.div_rn(z, multiple)
        codes = nearest(scaled, EDGES, BITS)
        ratio = fit_ratio(z, without_padding(nearest_level(scaled, EDGES, LEVELS, BITS), WIDTH, 0.0), FIT)
    return codes, half(r * ratio)


@triton.jit
def carried_codes(
    z, multiple, factor, diagonal, row, EDGES, LEVELS, nearby, BITS: tl.constexpr, FIT: tl.constexpr,
    NEARBY: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Codes with write-time feedback and the ratio of the scale (`TableCodec._carried`); one group a token."""
    below = load_channels(diagonal, tl.zeros([z.shape[2]], tl.int32), D, 1, z.shape[1], z.shape[3])
    below = without_padding(below, D, 1.0)
    whole, codes = carry(z, factor, row, EDGES, LEVELS, BITS, D, False)
    whole = tl.div_rn(whole, below)
    codes, ratio, least = carried_at(z, whole, multiple, factor, below, row, EDGES, LEVELS, BITS, FIT, D)
    if FIT == "search":
        for i in range(NEARBY):
            other, other_ratio, loss = carried_at(
                z, whole, multiple * tl.load(nearby + i), factor, below, row, EDGES, LEVELS, BITS, FIT, D
            )
            better = loss < least
            codes = tl.where(better, other, codes)
            ratio = tl.where(better, other_ratio, ratio)
            least = tl.minimum(loss, least)
    return codes, ratio


@triton.jit
def carried_at(
    z, whole, multiple, factor, below, row, EDGES, LEVELS, BITS: tl.constexpr, FIT: tl.constexpr, D: tl.constexpr
):
    """Codes of z / multiple with feedback, ratio of the scale, and the error in the metric of the queries."""
    error, codes = carry(tl.div_rn(z, multiple), factor, row, EDGES, LEVELS, BITS, D, True)
    whole = tl.div_rn(whole, multiple)
    y = whole - tl.div_rn(error, below)
    ratio = fit_ratio(whole, y, FIT)
    left = multiple * (whole - ratio * y)
    return codes, multiple * ratio, folded(left * left)


@triton.jit
def carry(x, factor, row, EDGES, LEVELS, BITS: tl.constexpr, D: tl.constexpr, CODE: tl.constexpr):
    """Carry errors channel by channel (`feedback.code_with_feedback`; not CODE: `feedback.whiten`, undivided)."""
    c = channels(x)
    codes = tl.zeros(x.shape, tl.int32)
    same = tl.zeros([x.shape[2]], tl.int32)
    for j in range(D):
        # one entry and zeros: exact in any order
        error = tl.sum(tl.sum(tl.where(c == j, x, 0.0), 1, keep_dims=True), 3, keep_dims=True)
        if CODE:
            codes = tl.where(c == j, nearest(error, EDGES, BITS), codes)
            error = error - nearest_level(error, EDGES, LEVELS, BITS)
            x = tl.where(c == j, error, x)
        step = load_channels(factor + j * row, same, D, 1, x.shape[1], x.shape[3])
        x = x - tl.where(c > j, step, 0.0) * error
    return x, codes


@triton.jit
def uniform_scale(low, high, BITS: tl.constexpr, KIND: tl.constexpr):
    """Fp16 scale and zero of uniform codes; of ``sym`` ones `high` is the largest magnitude (`AffineCodec._fit`)."""
    if KIND == "asym":
        zero = half(low)
        scale = tl.div_rn(high - zero.to(tl.float32), (2**BITS - 1) * 1.0)
    else:
        zero = tl.zeros(low.shape, tl.float16)
        scale = tl.div_rn(high, (2 ** (BITS - 1) - 1) * 1.0)
    return tl.minimum(tl.maximum(scale, _TINY), _LARGEST).to(tl.float16), zero


@triton.jit
def affine_codes(x, scale, zero, BITS: tl.constexpr, OVER: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr):
    """Uniform codes, their scales and zeros: those given, or each group's own (`AffineCodec.encode`)."""
    if OVER == "group":
        size = x if KIND == "asym" else tl.abs(x)
        PADDED: tl.constexpr = D if x.shape[0] == 1 else x.shape[1] * x.shape[3]
        low = without_padding(size, PADDED, float("inf"))
        high = without_padding(size, PADDED, -float("inf"))
        low = tl.min(tl.min(low, 3, keep_dims=True), 1, keep_dims=True)
        high = tl.max(tl.max(high, 3, keep_dims=True), 1, keep_dims=True)
        scale, zero = uniform_scale(low, high, BITS, KIND)
    steps = tl.div_rn(x - zero.to(tl.float32), scale.to(tl.float32))
    steps = tl.minimum(tl.maximum(steps, -_BIG), _BIG)  # codes end long before; keeps the rounding below exact
    codes = (steps + _ROUND - _ROUND).to(tl.int32)
    if KIND == "asym":
        return tl.minimum(tl.maximum(codes, 0), 2**BITS - 1), scale, zero
    return tl.minimum(tl.maximum(codes + (2 ** (BITS - 1) - 1), 0), 2**BITS - 2), scale, zero


@triton.jit
def microfloat_codes(x, block, EDGES, LEVELS, scale_by, KIND: tl.constexpr):
    """E2M1 codes and scale byte of groups (`MicrofloatCodec.encode`); `block` is the outer scale of e4m3 ones."""
    if KIND == "e8m0":
        peak = tl.max(tl.max(tl.abs(x), 3, keep_dims=True), 1, keep_dims=True)
        byte = tl.minimum((peak * scale_by).to(tl.int32, bitcast=True) >> 23, 254)  # the exponent
        scale = (byte << 23).to(tl.float32, bitcast=True)
        codes, _ = e2m1_codes(x, tl.where(byte > 0, scale, 0.0), EDGES)
    else:
        x = tl.div_rn(x, block)
        peak = tl.max(tl.max(tl.abs(x), 3, keep_dims=True), 1, keep_dims=True)
        codes, byte, error = topped(x, peak, 6.0, EDGES, LEVELS)
        if KIND == "fourorsix":
            codes4, byte4, error4 = topped(x, peak, 4.0, EDGES, LEVELS)
            codes = tl.where(error4 < error, codes4, codes)
            byte = tl.where(error4 < error, byte4, byte)
    return codes, byte.to(tl.uint8)


@triton.jit
def e2m1_codes(x, scale, EDGES):
    """E2M1 codes of x against positive scales, 0 where a scale is 0; and |x| in units of it (`microfloat._coded`)."""
    z = tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)
    return nearest(tl.abs(z), EDGES, 3) + tl.where(z < 0, 8, 0), tl.abs(z)


@triton.jit
def topped(x, peak, TOP: tl.constexpr, EDGES, LEVELS):
    """Codes, E4M3 byte and squared error of groups whose largest magnitude is put on TOP (`microfloat._topped`)."""
    byte = to_e4m3(tl.minimum(tl.div_rn(peak, TOP), _E4M3_TOP))
    scale = from_e4m3(byte)
    codes, z = e2m1_codes(x, scale, EDGES)
    error = (nearest_level(z, EDGES, LEVELS, 3) - z) * scale
    return codes, byte, folded(error * error)


@triton.jit
def float8_codes(x):
    """E4M3 bytes and fp16 scale of tokens (`Float8Codec.encode`)."""
    peak = tl.max(tl.max(tl.abs(x), 3, keep_dims=True), 1, keep_dims=True)
    token = half(tl.div_rn(peak, 1.75))
    z = tl.div_rn(x, tl.maximum(token.to(tl.float32), _TINY))
    z = tl.minimum(tl.maximum(z, -1.75), 1.75) * 256.0
    return to_e4m3(tl.abs(z)) + ((z.to(tl.int32, bitcast=True) >> 24) & 128), token  # zeros keep their sign


@triton.jit
def to_e4m3(x):
    """E4M3 byte of 0 <= x <= 448, ties to even; in arithmetic, because not every target converts."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (x * 512.0 + _ROUND - _ROUND).to(tl.int32)  # below 2^-6 the steps are 2^-9
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def from_e4m3(byte):
    """Value of a non-negative E4M3 byte, fp32."""
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
