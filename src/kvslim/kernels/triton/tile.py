"""Device functions: a tile of a side's values out of packed bytes.

Together they equal kvslim.codecs.decode.decode, without the scales that `attend` applies to whole scores and weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def parts_of(F):
    """Parts of a segment; a field alone is no constant to `static_range`."""
    return F.parts


@triton.jit
def part_address(ADDRESSES, slab, block, head, KV_HEADS: tl.constexpr, S: tl.constexpr, part: tl.constexpr):
    """Address of a part of one block and kv head."""
    base = tl.load(ADDRESSES + slab.to(tl.int64) * S.columns_of_all + (S.columns + part))
    return base + (block.to(tl.int64) * KV_HEADS + head) * S.nbytes[part]


@triton.jit
def numbers(address, at, mask, dtype: tl.constexpr):
    """Scales or offsets `at` elements from an address, in fp32; 0 where not `mask`. As kvslim.codecs.decode.read."""
    if dtype == "fp16":
        found = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)
    elif dtype == "bf16":
        found = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0).to(tl.float32)
    elif dtype == "fp32":
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    elif dtype == "e8m0":
        byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0)
        found = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(dtype == "e4m3")
        byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0)
        found = _small_float(byte, 0x80, 3).to(tl.float32) * 256.0
    return found


@triton.jit
def channels(F: tl.constexpr, part: tl.constexpr):
    """Channel, within its segment, of each lane of a part; `F.width` and more where a lane is padding."""
    lane = tl.arange(0, F.lanes)
    return lane // F.run * F.unit_channels + part * F.run + lane % F.run


@triton.jit
def tile(
    code_address,
    token_address,
    zero_address,
    TABLE,
    token,
    live,
    S: tl.constexpr,
    F: tl.constexpr,
    part: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    """Values of one part, (tokens, lanes), with the scales that change within a token; padding is finite."""
    channel = channels(F, part)
    if F.values == "raw":
        mask = live[:, None] & (channel < F.width)[None, :]
        values = numbers(code_address, token[:, None] * F.width + channel[None, :], mask, S.dot)
        if S.dot == "fp16":
            values = values.to(tl.float16)
        elif S.dot == "bf16":
            values = values.to(tl.bfloat16)
    else:
        codes = _plane(code_address, token, live, S, F, part, 0)
        for plane in tl.static_range(1, len(F.planes)):
            codes = codes | (_plane(code_address, token, live, S, F, part, plane) << F.planes[plane].low)
        values = values_of(codes, TABLE, F, LOOKUP)
        if F.group > 0:
            values = _grouped(values, token_address, zero_address, token, live, S, F, part)
    return values


@triton.jit
def _plane(address, token, live, S: tl.constexpr, F: tl.constexpr, part: tl.constexpr, plane: tl.constexpr):
    """One plane's bits of a part's codes, (tokens, lanes), uint8."""
    lane = tl.arange(0, F.lanes)
    if F.parts > 1:
        unit, within = lane // F.run, part * F.run + lane % F.run
    else:
        unit, within = lane // F.unit_channels, lane % F.unit_channels
    P: tl.constexpr = F.planes[plane]
    at = F.start + P.start + unit * F.unit_nbytes + within % P.nbytes
    if F.parts > 1 and plane == 0:
        at = F.start + unit * F.unit_nbytes + lane % F.run  # the same, so that adjacency is plain to see
    base = address.to(tl.pointer_type(tl.uint8))
    if S.nbytes[0] % 16 == 0:
        base = tl.multiple_of(base, 16)  # without this, bytes are loaded one by one
    pointers = base + token[:, None] * S.code_nbytes + at[None, :]
    if F.parts * F.lanes > F.width:
        codes = tl.load(pointers, mask=live[:, None] & (unit * F.unit_channels + within < F.width)[None, :], other=0)
    elif S.ragged:
        codes = tl.load(pointers, mask=live[:, None], other=0)
    else:
        codes = tl.load(pointers)  # a block's slots exist even where no token came yet
    if F.parts > 1 and plane == 0:
        if part > 0:
            codes = codes >> part * P.bits
        if (part + 1) * P.bits < 8:
            codes = codes & (1 << P.bits) - 1
    elif P.bits < 8:
        codes = (codes >> (within // P.nbytes * P.bits).to(tl.uint8)[None, :]) & (1 << P.bits) - 1
    return codes


@triton.jit
def values_of(codes, TABLE, F: tl.constexpr, LOOKUP: tl.constexpr):
    """Values in F.unit, fp16."""
    if F.values == "affine":
        # 0x6400 | code is the fp16 number 1024 + code
        values = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + F.zero // 1)
        if F.zero % 1 > 0:
            values = values - 0.5
    elif F.values == "e2m1":
        values = _small_float(codes, 0x8, 1) * 16384.0
    elif F.values == "e4m3":
        values = _small_float(codes, 0x80, 3)
    elif F.values == "e5m2":
        values = (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    elif LOOKUP == "gather":
        entries = tl.load(TABLE + F.table + tl.arange(0, F.entries))
        flat = tl.reshape(codes.to(tl.int32), [codes.shape[0] * codes.shape[1]])
        values = tl.reshape(tl.gather(entries, flat, 0), codes.shape)
    else:
        values = tl.load(TABLE + F.table + codes.to(tl.int32))
    return values


@triton.jit
def _small_float(codes, SIGN: tl.constexpr, MANTISSA: tl.constexpr):
    """A small float's bits put over those of fp16: the same number times a power of two, subnormal ones included."""
    wide = codes.to(tl.int16)
    if SIGN == 0x80:
        sign = (wide & SIGN) << 8
    else:
        sign = (wide & SIGN) << 12
    return (sign | ((wide & (SIGN - 1)) << (10 - MANTISSA))).to(tl.float16, bitcast=True)


@triton.jit
def _grouped(values, token_address, zero_address, token, live, S: tl.constexpr, F: tl.constexpr, part: tl.constexpr):
    """Values times the scale of each group, plus its zero."""
    runs: tl.constexpr = F.lanes // F.expand
    first = tl.arange(0, runs) * F.expand
    channel = first // F.run * F.unit_channels + part * F.run + first % F.run
    at = token[:, None] * S.scales + (F.scale + channel // F.group)[None, :]
    mask = live[:, None] & (channel < F.width)[None, :]
    split = tl.reshape(values, [values.shape[0], runs, F.expand])
    scale = numbers(token_address, at, mask, S.token) * F.unit
    split = split * scale.to(tl.float16)[:, :, None]
    if S.zero != "":
        split = split + numbers(zero_address, at, mask, S.zero).to(tl.float16)[:, :, None]
    return tl.reshape(split, values.shape)
