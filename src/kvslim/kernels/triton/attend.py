"""Attention over sinks, packed blocks, tail and chunk of one layer, in one launch and a reduction.

Equals kvslim.attention.reference.attend to 2e-3 of the largest output where values are multiplied in fp16 or bf16, to
2e-4 where they are fp32. The context of a sequence is split: the first `PACKED_SPLITS` programs of a kv head take a
share of its blocks each, the others a share of its exact tokens, so that sums of packed values stay in their own basis
until `merge` has added them up, once per query.

Rows of a program are queries that share a kv head: ``row = position * group + head in group``. Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvslim.kernels.triton.tile import channels, numbers, part_address, parts_of, tile

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-2.0e38)  # of a finite additive mask, which must not become -inf in base 2
_TOKEN, _ZERO, _CHANNEL, _OFFSET, _SCALE = (tl.constexpr(part) for part in range(1, 6))


@triton.jit
def _logits(raw, scaling, softcap, SOFTCAP: tl.constexpr):
    """Raw scores to base-2 logits."""
    logits = raw * scaling
    if SOFTCAP:
        # tanh x = 1 - 2 / (e^2x + 1)
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * _LOG2E / softcap)) + 1.0))
    return logits * _LOG2E


@triton.jit
def _visible(logits, MASK, column, live, row, in_range, batch, head, mask_strides, G: tl.constexpr, KIND: tl.constexpr):
    """Logits, -inf where not visible. KIND is ``none``, ``bool`` or ``float``."""
    if KIND != "none":
        at = batch * mask_strides[0] + (head * G + row % G) * mask_strides[1] + (row // G) * mask_strides[2]
        pointers = MASK + at.to(tl.int64)[:, None] + column[None, :]
        both = in_range[:, None] & live[None, :]
        if KIND == "bool":
            logits = tl.where(tl.load(pointers, mask=both, other=0) != 0, logits, float("-inf"))
        else:
            bias = tl.load(pointers, mask=both, other=0.0).to(tl.float32)
            logits += tl.where(bias == float("-inf"), bias, tl.maximum(bias, _LOWEST) * _LOG2E)
    return tl.where(live[None, :], logits, float("-inf"))


@triton.jit
def _columns(index, HOLES, batch, holes, holes_width, KIND: tl.constexpr):
    """Mask column of the sequence's tokens: padding columns are not stored and are skipped."""
    column = index
    if KIND != "none":
        for hole in range(holes):
            start = tl.load(HOLES + (batch * holes_width + hole) * 2)
            stop = tl.load(HOLES + (batch * holes_width + hole) * 2 + 1)
            column += tl.where(column >= start, stop - start, 0)
    return column


@triton.jit
def _weigh(logits, top, total):
    """One step of the running softmax: weights, what earlier sums fade by, new maximum and total."""
    new = tl.maximum(top, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet stays at -inf
    weights = tl.exp2(logits - safe[:, None])
    fade = tl.exp2(top - safe)
    return weights, fade, new, total * fade + tl.sum(weights, 1)


@triton.jit
def _load_queries(QUERY, at, in_range, S: tl.constexpr, VOLATILE: tl.constexpr):
    """The parts of transformed queries, (rows, lanes) each."""
    parts = ()
    for s in tl.static_range(len(S.codes)):
        for part in tl.static_range(parts_of(S.codes[s])):
            channel = channels(S.codes[s], part)
            mask = in_range[:, None] & (channel < S.codes[s].width)[None, :]
            pointers = QUERY + at[:, None] + (S.codes[s].first + channel)[None, :]
            parts = parts + (tl.load(pointers, mask=mask, other=0.0, volatile=VOLATILE),)
    return parts


@triton.jit
def _side(ADDRESSES, slab, block, head, KV_HEADS: tl.constexpr, S: tl.constexpr):
    """Addresses of a block's parts; those of absent ones are read by nobody."""
    addresses = ()
    for part in tl.static_range(6):
        if S.nbytes[part] > 0:
            addresses = addresses + (part_address(ADDRESSES, slab, block, head, KV_HEADS, S, part),)
        else:
            addresses = addresses + (0,)
    return addresses


@triton.jit
def _block_vector(address, F: tl.constexpr, part: tl.constexpr, dtype: tl.constexpr):
    """Per-channel numbers of a block, of the lanes of one part; 0 in padding."""
    channel = channels(F, part)
    return numbers(address, F.first + channel, channel < F.width, dtype)


@triton.jit
def _block_scale(address, S: tl.constexpr):
    scale = 1.0
    if S.scale != "":
        scale = numbers(address, 0, True, S.scale)
    return scale


@triton.jit
def _token_scale(address, token, live, S: tl.constexpr, F: tl.constexpr):
    """Scales that hold for a whole token of a segment, in F.unit; 0 where not `live`. Those of groups are `tile`'s."""
    if F.group > 0:
        scale = tl.where(live, 1.0, 0.0)
    elif S.token == "":
        scale = tl.where(live, F.unit, 0.0)
    else:
        scale = numbers(address, token * S.scales + F.scale, live, S.token) * F.unit
    return scale


@triton.jit
def _segment_scores(queries, at, TABLE, token, live, S: tl.constexpr, F: tl.constexpr, LOOKUP: tl.constexpr):
    """q'.x' of one segment without the block's scale, (rows, tokens)."""
    scores = tl.zeros([queries[0].shape[0], token.shape[0]], tl.float32)
    mass = tl.zeros([queries[0].shape[0]], tl.float32)
    for part in tl.static_range(parts_of(F)):
        query = queries[F.place + part]
        if S.channel != "":
            scaled = query.to(tl.float32) * _block_vector(at[_CHANNEL], F, part, S.channel)[None, :]
            query = scaled.to(query.dtype)
        values = tile(at[0], at[_TOKEN], at[_ZERO], TABLE, token, live, S, F, part, LOOKUP)
        scores = tl.dot(query, tl.trans(values), scores, input_precision="ieee")
        if S.zero != "" and F.group == 0:
            mass += tl.sum(query.to(tl.float32), 1)
    scores *= _token_scale(at[_TOKEN], token, live, S, F)[None, :]
    if S.zero != "" and F.group == 0:
        zero = numbers(at[_ZERO], token * S.scales + F.scale, live, S.zero)
        scores += mass[:, None] * zero[None, :]
    return scores


@triton.jit
def _packed_scores(queries, rests, at, TABLE, token, live, S: tl.constexpr, LOOKUP: tl.constexpr):
    """q'.x' of packed tokens, (rows, tokens)."""
    scores = _segment_scores(queries, at, TABLE, token, live, S, S.codes[0], LOOKUP)
    for s in tl.static_range(1, len(S.codes)):
        scores += _segment_scores(queries, at, TABLE, token, live, S, S.codes[s], LOOKUP)
    scores *= _block_scale(at[_SCALE], S)
    if S.offset != "":
        # offsets may be far larger than what is coded, so that the queries' second half counts
        bias = tl.zeros([scores.shape[0]], tl.float32)
        for s in tl.static_range(len(S.codes)):
            for part in tl.static_range(parts_of(S.codes[s])):
                offset = _block_vector(at[_OFFSET], S.codes[s], part, S.offset)
                query = queries[S.codes[s].place + part].to(tl.float32)
                query += rests[S.codes[s].place + part].to(tl.float32)
                bias += tl.sum(query * offset[None, :], 1)
        scores += bias[:, None]
    return scores


@triton.jit
def _largest_scale(at, token, live, S: tl.constexpr):
    """Largest factor that weights of this step take before they meet the values."""
    largest = tl.max(tl.abs(_token_scale(at[_TOKEN], token, live, S, S.codes[0])))
    for s in tl.static_range(1, len(S.codes)):
        largest = tl.maximum(largest, tl.max(tl.abs(_token_scale(at[_TOKEN], token, live, S, S.codes[s]))))
    return largest * tl.abs(_block_scale(at[_SCALE], S))


@triton.jit
def _add_segment(
    sums, weights, fade, unit, at, TABLE, token, live, S: tl.constexpr, F: tl.constexpr, LOOKUP: tl.constexpr
):
    """Parts of one segment's sums, in `unit`, with the weighted values of this step."""
    factor = _token_scale(at[_TOKEN], token, live, S, F) * (_block_scale(at[_SCALE], S) / unit)
    scaled = weights * factor[None, :]
    grown = ()
    for part in tl.static_range(parts_of(F)):
        values = tile(at[0], at[_TOKEN], at[_ZERO], TABLE, token, live, S, F, part, LOOKUP)
        old = sums[F.place + part] * fade[:, None]
        if S.channel == "":
            new = tl.dot(scaled.to(values.dtype), values, old, input_precision="ieee")
        else:
            new = tl.dot(scaled.to(values.dtype), values, input_precision="ieee")
        if S.zero != "" and F.group == 0:
            zero = numbers(at[_ZERO], token * S.scales + F.scale, live, S.zero)
            new += (tl.sum(weights * zero[None, :], 1) * (_block_scale(at[_SCALE], S) / unit))[:, None]
        if S.channel != "":
            new = old + new * _block_vector(at[_CHANNEL], F, part, S.channel)[None, :]
        if S.offset != "":
            mass = tl.sum(weights, 1) / unit
            new += mass[:, None] * _block_vector(at[_OFFSET], F, part, S.offset)[None, :]
        grown = grown + (new,)
    return grown


@triton.jit
def _packed_share(
    split, splits, batch, head, row, in_range, QUERY, REST, FACTOR, BIAS, PAGE, ADDRESSES, BLOCKS, KEY_TABLE,
    VALUE_TABLE, ROWS, MASK, HOLES, SUM, STATE, rows, out, width, entries_width, holes_width, mask_strides,
    scaling, softcap,
    K: tl.constexpr, V: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    MASK_KIND: tl.constexpr, SOFTCAP: tl.constexpr, PAGES: tl.constexpr, LOOKUP: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """Attend to a share of a sequence's blocks; the sum stays in the basis of the values."""
    PER_BLOCK: tl.constexpr = (K.block + TOKENS - 1) // TOKENS
    entries, packed = tl.load(ROWS + batch * 5), tl.load(ROWS + batch * 5 + 1)
    sinks, holes = tl.load(ROWS + batch * 5 + 2), tl.load(ROWS + batch * 5 + 4)
    share = tl.cdiv(entries * PER_BLOCK, splits)
    lane = (batch * KV_HEADS + head).to(tl.int64) * rows + row
    queries = _load_queries(QUERY, lane * K.width, in_range, K, False)
    rests = queries
    if K.offset != "":
        rests = _load_queries(REST, lane * K.width, in_range, K, False)
    factor = tl.load(FACTOR + lane, mask=in_range, other=0.0)
    bias = tl.load(BIAS + lane, mask=in_range, other=0.0)
    top = tl.full([row.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    unit = 1e-30  # of the sums: the largest scale so far, so that scaled weights suit fp16
    sums = ()
    for s in tl.static_range(len(V.codes)):
        for _ in tl.static_range(parts_of(V.codes[s])):
            sums = sums + (tl.zeros([row.shape[0], V.codes[s].lanes], tl.float32),)
    for step in range(split * share, tl.minimum((split + 1) * share, entries * PER_BLOCK)):
        entry = step // PER_BLOCK
        place = BLOCKS + (batch * entries_width + entry).to(tl.int64) * 4
        slab, block, start = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        valid = tl.minimum(tl.load(place + 3), packed - start)
        token = step % PER_BLOCK * TOKENS + tl.arange(0, TOKENS)
        live = token < valid
        at = _side(ADDRESSES, slab, block, head, KV_HEADS, K)
        held = queries
        if RELOAD:
            held = _load_queries(QUERY, lane * K.width, in_range, K, True)
        scores = _packed_scores(held, rests, at, KEY_TABLE, token, live, K, LOOKUP) * factor[:, None] + bias[:, None]
        if PAGES:
            scores += tl.load(PAGE + lane * entries_width + entry, mask=in_range, other=0.0)[:, None]
        logits = _logits(scores, scaling, softcap, SOFTCAP)
        column = _columns(sinks + start + token, HOLES, batch, holes, holes_width, MASK_KIND)
        logits = _visible(logits, MASK, column, live, row, in_range, batch, head, mask_strides, GROUP, MASK_KIND)
        weights, fade, top, total = _weigh(logits, top, total)
        at = _side(ADDRESSES, slab, block, head, KV_HEADS, V)
        larger = tl.maximum(unit, _largest_scale(at, token, live, V))
        fade *= unit / larger
        unit = larger
        grown = ()
        for s in tl.static_range(len(V.codes)):
            grown = grown + _add_segment(sums, weights, fade, unit, at, VALUE_TABLE, token, live, V, V.codes[s], LOOKUP)
        sums = grown
    tl.store(STATE + out * 2, top, mask=in_range)
    tl.store(STATE + out * 2 + 1, total, mask=in_range)
    for s in tl.static_range(len(V.codes)):
        for part in tl.static_range(parts_of(V.codes[s])):
            channel = channels(V.codes[s], part)
            tl.store(
                SUM + out[:, None] * width + (V.codes[s].first + channel)[None, :],
                sums[V.codes[s].place + part] * unit,
                mask=in_range[:, None] & (channel < V.codes[s].width)[None, :],
            )


@triton.jit
def _load_exact_queries(QUERY, at, in_range, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, VOLATILE: tl.constexpr):
    """The model's queries in parts of LANES channels, (rows, LANES) each."""
    parts = ()
    for part in tl.static_range((HEAD_DIM + LANES - 1) // LANES):
        channel = part * LANES + tl.arange(0, LANES)
        mask = in_range[:, None] & (channel < HEAD_DIM)[None, :]
        parts = parts + (tl.load(QUERY + at[:, None] + channel[None, :], mask=mask, other=0.0, volatile=VOLATILE),)
    return parts


@triton.jit
def _exact_tokens(
    top, total, summed, queries, QUERY, at, KEY, VALUE, key_stride, value_stride, first, last, sinks, packed, position,
    row, in_range, batch, head, MASK, HOLES, holes, holes_width, mask_strides, scaling, softcap,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    MASK_KIND: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Attend to exact tokens `first` to `last` of a buffer; those from `sinks` on stand `packed` places further on."""
    value_channel = tl.arange(0, summed.shape[1])
    for step in range(first, last, TOKENS):
        token = step + tl.arange(0, TOKENS)
        live = token < last
        held = queries
        if RELOAD:
            held = _load_exact_queries(QUERY, at, in_range, HEAD_DIM, LANES, True)
        scores = tl.zeros([row.shape[0], TOKENS], tl.float32)
        for part in tl.static_range((HEAD_DIM + LANES - 1) // LANES):
            channel = part * LANES + tl.arange(0, LANES)
            mask = live[:, None] & (channel < HEAD_DIM)[None, :]
            key = tl.load(KEY + token.to(tl.int64)[:, None] * key_stride + channel[None, :], mask=mask, other=0.0)
            key = key.to(held[part].dtype)
            scores = tl.dot(held[part], tl.trans(key), scores, input_precision="ieee")
        logits = _logits(scores, scaling, softcap, SOFTCAP)
        column = _columns(token + tl.where(token < sinks, 0, packed), HOLES, batch, holes, holes_width, MASK_KIND)
        logits = _visible(logits, MASK, column, live, row, in_range, batch, head, mask_strides, GROUP, MASK_KIND)
        if CAUSAL:
            logits = tl.where(token[None, :] <= position[:, None], logits, float("-inf"))
        weights, fade, top, total = _weigh(logits, top, total)
        mask = live[:, None] & (value_channel < VALUE_DIM)[None, :]
        value = tl.load(
            VALUE + token.to(tl.int64)[:, None] * value_stride + value_channel[None, :], mask=mask, other=0.0
        )
        value = value.to(queries[0].dtype)
        summed = tl.dot(weights.to(value.dtype), value, summed * fade[:, None], input_precision="ieee")
    return top, total, summed


@triton.jit
def _exact_share(
    split, splits, batch, head, row, in_range, QUERY, STORED_KEY, STORED_VALUE, CHUNK_KEY, CHUNK_VALUE, ROWS, MASK,
    HOLES, SUM, STATE, first_query, chunk, length, out, width, holes_width, slots, query_strides, key_strides,
    value_strides, mask_strides, scaling, softcap,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    LANES: tl.constexpr, VALUE_LANES: tl.constexpr, MASK_KIND: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Attend to a share of a sequence's exact tokens: those of the store, then the chunk's."""
    packed, sinks = tl.load(ROWS + batch * 5 + 1), tl.load(ROWS + batch * 5 + 2)
    stored, holes = tl.load(ROWS + batch * 5 + 3), tl.load(ROWS + batch * 5 + 4)
    position = first_query + row // GROUP
    seen = chunk
    if CAUSAL:
        seen = tl.minimum(chunk, tl.max(tl.where(in_range, position, 0)) + 1)
    share = tl.cdiv(tl.cdiv(stored + seen, splits), TOKENS) * TOKENS
    first = split * share
    last = tl.minimum(first + share, stored + seen)
    at = batch.to(tl.int64) * query_strides[0] + (head * GROUP + row % GROUP) * query_strides[1]
    at += (row // GROUP) * query_strides[2]
    queries = _load_exact_queries(QUERY, at, in_range, HEAD_DIM, LANES, False)
    top = tl.full([row.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    summed = tl.zeros([row.shape[0], VALUE_LANES], tl.float32)
    base = (batch * KV_HEADS + head).to(tl.int64) * slots
    top, total, summed = _exact_tokens(
        top, total, summed, queries, QUERY, at, STORED_KEY + base * HEAD_DIM, STORED_VALUE + base * VALUE_DIM, HEAD_DIM,
        VALUE_DIM, first, tl.minimum(last, stored), sinks, packed, position, row, in_range, batch, head, MASK, HOLES,
        holes, holes_width, mask_strides, scaling, softcap, HEAD_DIM, VALUE_DIM, LANES, GROUP, TOKENS, MASK_KIND,
        SOFTCAP, False, RELOAD,
    )  # fmt: skip
    top, total, summed = _exact_tokens(
        top, total, summed, queries, QUERY, at, CHUNK_KEY + batch.to(tl.int64) * key_strides[0] + head * key_strides[1],
        CHUNK_VALUE + batch.to(tl.int64) * value_strides[0] + head * value_strides[1], key_strides[2], value_strides[2],
        tl.maximum(first - stored, 0), last - stored, 0, length, position, row, in_range, batch, head, MASK, HOLES, 0,
        holes_width, mask_strides, scaling, softcap, HEAD_DIM, VALUE_DIM, LANES, GROUP, TOKENS, MASK_KIND, SOFTCAP,
        CAUSAL, RELOAD,
    )  # fmt: skip
    tl.store(STATE + out * 2, top, mask=in_range)
    tl.store(STATE + out * 2 + 1, total, mask=in_range)
    value_channel = tl.arange(0, VALUE_LANES)
    mask = in_range[:, None] & (value_channel < VALUE_DIM)[None, :]
    tl.store(SUM + out[:, None] * width + value_channel[None, :], summed, mask=mask)


_VARYING = ["rows", "first_query", "chunk", "length", "entries_width", "holes_width", "packed_splits", "exact_splits"]


@triton.jit(do_not_specialize=_VARYING)
def attend_shares(
    QUERY, REST, FACTOR, BIAS, PAGE, ADDRESSES, BLOCKS, KEY_TABLE, VALUE_TABLE,
    EXACT_QUERY, STORED_KEY, STORED_VALUE, CHUNK_KEY, CHUNK_VALUE, ROWS, MASK, HOLES, SUM, STATE,
    rows, first_query, chunk, length, entries_width, holes_width, packed_splits, exact_splits, slots, width,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_q,
    scaling, softcap,
    K: tl.constexpr, V: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, ROWS_TILE: tl.constexpr, TOKENS: tl.constexpr, EXACT_TOKENS: tl.constexpr,
    LANES: tl.constexpr, VALUE_LANES: tl.constexpr, MASK_KIND: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGES: tl.constexpr, LOOKUP: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """One share of the context for a tile of query rows of one kv head: its sum, maximum and total.

    K and V are the SideForms of what is packed; without packed tokens, `packed_splits` is 0 and K None. With RELOAD,
    queries are read again in every step: held as a matrix operand, those of large heads would fill the registers.
    """
    splits = packed_splits + exact_splits
    split, head, batch = tl.program_id(0) % splits, tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) // splits * ROWS_TILE + tl.arange(0, ROWS_TILE)
    in_range = row < rows
    mask_strides = (mask_b, mask_h, mask_q)
    out = ((batch * KV_HEADS + head).to(tl.int64) * rows + row) * splits + split
    MASK += first_query * mask_q
    if split < packed_splits:
        if K is not None:
            _packed_share(
                split, packed_splits, batch, head, row, in_range, QUERY, REST, FACTOR, BIAS, PAGE, ADDRESSES, BLOCKS,
                KEY_TABLE, VALUE_TABLE, ROWS, MASK, HOLES, SUM, STATE, rows, out, width, entries_width, holes_width,
                mask_strides, scaling, softcap, K, V, KV_HEADS, GROUP, TOKENS, MASK_KIND, SOFTCAP, PAGES, LOOKUP,
                RELOAD,
            )  # fmt: skip
    else:
        _exact_share(
            split - packed_splits, exact_splits, batch, head, row, in_range, EXACT_QUERY, STORED_KEY, STORED_VALUE,
            CHUNK_KEY, CHUNK_VALUE, ROWS, MASK, HOLES, SUM, STATE, first_query, chunk, length, out, width, holes_width,
            slots, (query_b, query_h, query_t), (key_b, key_h, key_t), (value_b, value_h, value_t), mask_strides,
            scaling, softcap, HEAD_DIM, VALUE_DIM, KV_HEADS, GROUP, EXACT_TOKENS, LANES, VALUE_LANES, MASK_KIND, CAUSAL,
            SOFTCAP, RELOAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "packed_splits", "exact_splits"])
def merge_shares(
    SUM, STATE, SINKS, PACKED, MASS, EXACT, rows, packed_splits, exact_splits, width, packed_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, LANES: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one query row by log-sum-exp: the packed sum, its mass, and the exact sum.

    `SINKS` are logits of the heads that join the softmax without a value.
    """
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out = (batch * KV_HEADS + head).to(tl.int64) * rows + row
    splits = packed_splits + exact_splits
    channel = tl.arange(0, LANES)
    top, total = float("-inf"), 0.0
    if HAS_SINKS:
        top, total = tl.load(SINKS + head * GROUP + row % GROUP).to(tl.float32) * _LOG2E, 1.0
    mass = 0.0
    packed = tl.zeros([LANES], tl.float32)
    exact = tl.zeros([LANES], tl.float32)
    for split in range(splits):
        own = tl.load(STATE + (out * splits + split) * 2)
        new = tl.maximum(top, own)
        safe = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(top - safe), tl.exp2(own - safe)
        size = weight * tl.load(STATE + (out * splits + split) * 2 + 1)
        is_packed = split < packed_splits
        used = tl.where(is_packed, packed_width, VALUE_DIM)
        share = weight * tl.load(SUM + (out * splits + split) * width + channel, mask=channel < used, other=0.0)
        packed = packed * fade + tl.where(is_packed, share, 0.0)
        exact = exact * fade + tl.where(is_packed, 0.0, share)
        mass = mass * fade + tl.where(is_packed, size, 0.0)
        total = total * fade + size
        top = new
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    if packed_splits > 0:
        tl.store(PACKED + out * packed_width + channel, packed * scale, mask=channel < packed_width)
        tl.store(MASS + out, mass * scale)
    tl.store(EXACT + out * VALUE_DIM + channel, exact * scale, mask=channel < VALUE_DIM)
