// Attention of a chunk over {sinks, packed blocks, tail, the chunk itself}; equals kvslim.attention.reference.attend.
//
// Scores take tokens in the lanes of a vector (a tile of packed codes is transposed as 32-bit words, an eighth of the work
// of doing it in floats at 4 bits), values take channels. Sums are fp32, or integers as dots.h says. Nothing longer than a
// tile is ever made dense.
//
// A task is one sequence, one kv head, up to ROWS query rows and a range of the packed tokens; tasks are merged by
// log-sum-exp. Rows of a task: query positions, and within each the query heads that share the kv head.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "chain.h"
#include "dots.h"
#include "lanes.h"

namespace KVS_NS {

constexpr int ROWS = 64;
constexpr float LOWEST = -INFINITY;

// Call f with `rows`, 1 .. GROUP, as a constant.
template <int R = 1, class F>
inline void by_rows(int rows, const F& f) {
  if constexpr (R < GROUP)
    if (rows > R) return by_rows<R + 1>(rows, f);
  f(std::integral_constant<int, R>());
}

// Call f with `bits` as a constant; for the widths that attention reads without decoding first.
template <class F>
inline void by_bits(int bits, const F& f) {
  switch (bits) {
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    default: return f(std::integral_constant<int, 8>());
  }
}

inline bool reads_codes(const kvs_side& side) {
  const int bits = side.segment[0].bits;
  return side.segments == 1 && side.width % UNIT == 0 && (bits == 2 || bits == 3 || bits == 4 || bits == 8);
}

// rows[LANES][width] -> columns[width][LANES]
inline void transpose_tile(const float* rows, int width, float* columns) {
  int c = 0;
  for (; c + 4 <= width; c += 4)
    for (int t = 0; t < LANES; t += 4) transpose4(rows + int64_t(t) * width + c, width, columns + c * LANES + t, LANES);
  for (; c < width; c++)
    for (int t = 0; t < LANES; t++) columns[c * LANES + t] = rows[int64_t(t) * width + c];
}

// 32-bit words of LANES packed rows side by side: words[w][t] = row t's word w. Tokens past `count` repeat the last
// one, so that nothing beyond it is read. `words` has room for a multiple of four.
inline void gather_words(const uint8_t* rows, int64_t stride, int count, int number, int32_t* words) {
#if defined(__AVX512F__)
  for (int lane = 0; lane < LANES; lane += W) {
    const uint8_t* row[W];
    if (lane + W <= count)
      for (int i = 0; i < W; i++) row[i] = rows + (lane + i) * stride;
    else
      for (int i = 0; i < W; i++) row[i] = rows + std::min(lane + i, count - 1) * stride;
    auto turn = [&](int w, auto quarter) {  // 4 words of 16 rows; zmm i takes rows i, i + 4, i + 8, i + 12
      auto four = [&](int i) {
        vi x = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(row[i])), quarter(row[i + 4]), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(x, quarter(row[i + 8]), 2), quarter(row[i + 12]), 3);
      };
      const vi r0 = four(0), r1 = four(1), r2 = four(2), r3 = four(3);
      const vi a = _mm512_unpacklo_epi32(r0, r1), b = _mm512_unpacklo_epi32(r2, r3);
      const vi c = _mm512_unpackhi_epi32(r0, r1), d = _mm512_unpackhi_epi32(r2, r3);
      int32_t* out = words + w * LANES + lane;
      storei(out, _mm512_unpacklo_epi64(a, b));
      storei(out + LANES, _mm512_unpackhi_epi64(a, b));
      storei(out + 2 * LANES, _mm512_unpacklo_epi64(c, d));
      storei(out + 3 * LANES, _mm512_unpackhi_epi64(c, d));
    };
    int w = 0;
    for (; w + 4 <= number; w += 4) turn(w, [w](const uint8_t* p) { return _mm_loadu_si128((const __m128i*)(p + 4 * w)); });
    const __mmask8 there = __mmask8((1 << (number - w)) - 1);
    if (w < number) turn(w, [w, there](const uint8_t* p) { return _mm_maskz_loadu_epi32(there, p + 4 * w); });
  }
#elif defined(__AVX2__)
  for (int lane = 0; lane < LANES; lane += W) {
    const uint8_t* row[W];
    for (int i = 0; i < W; i++) row[i] = rows + std::min(lane + i, count - 1) * stride;
    int w = 0;
    for (; w + 4 <= number; w += 4) {  // 4 words of 8 rows; ymm i takes rows i and i + 4
      auto both = [&](int i) {
        const __m128i low = _mm_loadu_si128((const __m128i*)(row[i] + 4 * w));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i*)(row[i + 4] + 4 * w)), 1);
      };
      const vi r0 = both(0), r1 = both(1), r2 = both(2), r3 = both(3);
      const vi a = _mm256_unpacklo_epi32(r0, r1), b = _mm256_unpacklo_epi32(r2, r3);
      const vi c = _mm256_unpackhi_epi32(r0, r1), d = _mm256_unpackhi_epi32(r2, r3);
      int32_t* out = words + w * LANES + lane;
      storei(out, _mm256_unpacklo_epi64(a, b));
      storei(out + LANES, _mm256_unpackhi_epi64(a, b));
      storei(out + 2 * LANES, _mm256_unpacklo_epi64(c, d));
      storei(out + 3 * LANES, _mm256_unpackhi_epi64(c, d));
    }
    for (; w < number; w++)
      for (int i = 0; i < W; i++) std::memcpy(words + w * LANES + lane + i, row[i] + 4 * w, 4);
  }
#else
  for (int t = 0; t < LANES; t += 4) {
    const uint8_t* row[4];
    for (int i = 0; i < 4; i++) row[i] = rows + std::min(t + i, count - 1) * stride;
    int w = 0;
    for (; w + 4 <= number; w += 4) {
      float four[4][4], turned[4][4];  // only moved, never computed with
      for (int i = 0; i < 4; i++) std::memcpy(four[i], row[i] + 4 * w, 16);
      transpose4(four[0], 4, turned[0], 4);
      for (int i = 0; i < 4; i++) std::memcpy(words + (w + i) * LANES + t, turned[i], 16);
    }
    for (; w < number; w++)
      for (int i = 0; i < 4; i++) std::memcpy(words + w * LANES + t + i, row[i] + 4 * w, 4);
  }
#endif
}

// Field of channel C in a plane of `SIZE` bits per code: byte C % n of n = 4 SIZE bytes, so word and shift are constants.
template <int SIZE, int C>
inline vi field_of(const int32_t* plane, int lane) {
  constexpr int at = C % (4 * SIZE);
  return srl<8 * (at % 4) + SIZE * (C / (4 * SIZE))>(loadi(plane + at / 4 * LANES + lane));
}

// Code of channel C of a unit; bits above the code's own are left in where `look` ignores them.
template <int BITS, int C>
inline vi code_of(const int32_t* words, int lane) {
  if constexpr (BITS == 3)
    return ori(andi(field_of<2, C>(words, lane), seti(3)), sll<2>(andi(field_of<1, C>(words + 2 * LANES, lane), seti(1))));
  else if constexpr (BITS == 8)
    return andi(field_of<8, C>(words, lane), seti(255));
  else
    return field_of<BITS, C>(words, lane);
}

// Call use(channel, values of the first W tokens, values of the next W) for the channels C .. 31 of a unit.
template <int BITS, int C, class Use>
inline __attribute__((always_inline)) void each_channel(const Lookup& lookup, const int32_t* words, const Use& use) {
  if constexpr (C < UNIT) {
    const vi a = code_of<BITS, C>(words, 0), b = code_of<BITS, C>(words, W);
    if constexpr (BITS <= 4)
      use(C, look(lookup.small, a), look(lookup.small, b));
    else
      use(C, wide_values(lookup, a), wide_values(lookup, b));
    each_channel<BITS, C + 1>(lookup, words, use);
  }
}

// columns[c][t] of one unit, table values only
template <int BITS>
inline void unpack_columns(const Lookup& lookup, const int32_t* words, float* columns) {
  each_channel<BITS, 0>(lookup, words, [&](int c, vf x, vf y) {
    store(columns + c * LANES, x);
    store(columns + c * LANES + W, y);
  });
}

// scores[r][t] += sum over one unit of q[c][r] * value, straight from the codes
template <int R, int BITS>
inline void score_unit(const Lookup& lookup, const int32_t* words, const float* q, float* scores) {
  vf sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = load(scores + r * TILE), sum[r][1] = load(scores + r * TILE + W);
  each_channel<BITS, 0>(lookup, words, [&](int c, vf x, vf y) {
    for (int r = 0; r < R; r++) {
      const vf a = set1(q[c * GROUP + r]);
      sum[r][0] = fma(a, x, sum[r][0]);
      sum[r][1] = fma(a, y, sum[r][1]);
    }
  });
  for (int r = 0; r < R; r++) store(scores + r * TILE, sum[r][0]), store(scores + r * TILE + W, sum[r][1]);
}

// scores[r][t] = sum_c q[c][r] * columns[c][LANES], q in rows of GROUP
template <int R>
inline void score_rows(const float* columns, int width, const float* q, float* scores) {
  vf sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = set1(0);
  for (int c = 0; c < width; c++) {
    const vf x = load(columns + c * LANES), y = load(columns + c * LANES + W);
    for (int r = 0; r < R; r++) {
      const vf a = set1(q[c * GROUP + r]);
      sum[r][0] = fma(a, x, sum[r][0]);
      sum[r][1] = fma(a, y, sum[r][1]);
    }
  }
  for (int r = 0; r < R; r++) store(scores + r * TILE, sum[r][0]), store(scores + r * TILE + W, sum[r][1]);
}

// out[r][C0 .. C0 + 2W) += sum_t weights[r][t] * values of one unit
template <int R, int BITS, int C0>
inline void sum_unit(const Lookup& lookup, const uint8_t* unit, int64_t stride, int count, const float* weights,
                     float* out, int out_stride) {
  vf sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = load(out + r * out_stride + C0), sum[r][1] = load(out + r * out_stride + C0 + W);
  for (int t = 0; t < count; t++, unit += stride) {
    const vf x = values_at<BITS, C0>(lookup, unit), y = values_at<BITS, C0 + W>(lookup, unit);
    for (int r = 0; r < R; r++) {
      const vf a = set1(weights[r * TILE + t]);
      sum[r][0] = fma(a, x, sum[r][0]);
      sum[r][1] = fma(a, y, sum[r][1]);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * out_stride + C0, sum[r][0]), store(out + r * out_stride + C0 + W, sum[r][1]);
  if constexpr (C0 + 2 * W < UNIT)
    sum_unit<R, BITS, C0 + 2 * W>(lookup, unit - count * stride, stride, count, weights, out, out_stride);
}

// The same for plain rows: out[r][c] += sum_t weights[r][t] * rows[t][c]
template <int R>
inline void sum_rows(const float* rows, int width, int count, const float* weights, float* out, int out_stride) {
  int c = 0;
  for (; c + 2 * W <= width; c += 2 * W) {
    vf sum[R][2];
    for (int r = 0; r < R; r++) sum[r][0] = load(out + r * out_stride + c), sum[r][1] = load(out + r * out_stride + c + W);
    for (int t = 0; t < count; t++) {
      const vf x = load(rows + t * width + c), y = load(rows + t * width + c + W);
      for (int r = 0; r < R; r++) {
        const vf a = set1(weights[r * TILE + t]);
        sum[r][0] = fma(a, x, sum[r][0]);
        sum[r][1] = fma(a, y, sum[r][1]);
      }
    }
    for (int r = 0; r < R; r++) store(out + r * out_stride + c, sum[r][0]), store(out + r * out_stride + c + W, sum[r][1]);
  }
  for (; c < width; c++)
    for (int t = 0; t < count; t++)
      for (int r = 0; r < R; r++) out[r * out_stride + c] += weights[r * TILE + t] * rows[t * width + c];
}

// What a task leaves for the merge; sums are relative to each row's `top`.
struct Partial {
  float top[ROWS], total[ROWS], mass[ROWS];  // mass: of the packed tokens
  std::vector<float> basis, model;           // values summed in the packed basis, and as the model made them
};

// Where tiles lie on the way; one per thread.
struct Scratch {
  std::vector<float> query, basis, columns, rows, scores, weights, cosine, sine;
  std::vector<int64_t> column;
};

class Task {
 public:
  Task(const kvs_attend& call, int sequence, int head, int first_row, int rows, Scratch& scratch, Partial& partial)
      : call(call), sequence(sequence), head(head), first(first_row), rows(rows), group(call.heads / call.kv_heads),
        row(call.rows[sequence]), scratch(scratch), partial(partial) {
    const int key_dim = call.key.head_dim, value_dim = call.value.head_dim;
    padded = (rows + GROUP - 1) / GROUP * GROUP;
    const int width = std::max(std::max(key_dim, value_dim), std::max(call.key.width, call.value.width));
    scratch.query.assign(size_t(padded) * key_dim, 0.0f);
    scratch.columns.resize(size_t(width) * LANES);
    scratch.rows.resize(size_t(width) * TILE);
    scratch.scores.resize(size_t(padded) * TILE);
    scratch.weights.resize(size_t(padded) * TILE);
    scratch.column.resize(TILE);
    for (int r = 0; r < rows; r++) {
      partial.top[r] = LOWEST;
      partial.total[r] = partial.mass[r] = 0;
      const int64_t at = sequence * call.query_row + query_head(r) * call.query_head + position(r) * call.query_token;
      convert(call.query, call.query_dtype, at, key_dim, &scratch.query[size_t(r) * key_dim]);
    }
  }

  // Packed tokens from .. to; they begin a tile with every block.
  void packed(int from, int to) {
    const kvs_side &key = call.key, &value = call.value;
    partial.basis.assign(size_t(padded) * value.width, 0.0f);
    set_lookups(key, row.key_table, key_lookup);
    set_lookups(value, row.value_table, value_lookup);
#if KVS_INTEGER
    key_integer = reads_codes(key) && key.width <= 512 && is_integer(key.segment[0], row.key_table, row.key_unit);
    value_integer = reads_codes(value) && is_integer(value.segment[0], row.value_table, row.value_unit);
    if (key_integer) key_levels.set(row.key_table, key.segment[0].bits, row.key_unit);
    if (value_integer) value_levels.set(row.value_table, value.segment[0].bits, row.value_unit);
#endif
    prepare_queries();
    for (int r = 0; r < rows; r++) block_gain[r] = 0;
    int done = 0;
    double next = -1;  // position at which the page angles stand
    for (int e = 0; e < row.entries && done < std::min(to, row.packed); e++) {
      int valid = std::min(row.valid[e], row.packed - done), id = row.blocks[e];
      if (id == row.copied && done + row.valid[e] > row.packed) id = row.source;
      if (done >= from) {
        const Block k = block_of(key, id), v = block_of(value, id);
        if (page.step) turn_page(double(row.origin + row.sinks + done), next);
        prepare_block(k);
        if (done + valid < row.packed) {  // hardware follows a stream only to the end of its page
          fetch(block_of(key, row.blocks[e + 1]).code, key);
          fetch(block_of(value, row.blocks[e + 1]).code, value);
        }
        for (int t = 0; t < valid; t += TILE) packed_tile(k, v, t, std::min(TILE, valid - t), row.sinks + done + t);
      }
      done += valid;
    }
  }

  // The exact tokens: what the store keeps, then the chunk.
  void exact() {
    partial.model.assign(size_t(padded) * call.value.head_dim, 0.0f);
    load_queries(scratch.query.data(), call.key.head_dim);
    const kvs_exact &s = call.stored, &c = call.chunk;
    for (int t = 0; t < row.exact; t += TILE) {
      const int count = std::min(TILE, row.exact - t);
      for (int i = 0; i < count; i++) scratch.column[i] = t + i < row.sinks ? t + i : t + i + row.packed;
      exact_tile(s, t, count, false);
    }
    const int last = position(rows - 1);
    for (int t = 0; t < call.chunk_tokens; t += TILE) {
      if (call.causal && !call.mask && t > last) break;
      exact_tile(c, t, std::min(TILE, call.chunk_tokens - t), true);
    }
  }

 private:
  const kvs_attend& call;
  const int sequence, head, first, rows, group;
  const kvs_row& row;
  Scratch& scratch;
  Partial& partial;
  int padded;
  Lookup key_lookup[2], value_lookup[2];
#if KVS_INTEGER
  bool key_integer = false, value_integer = false;
  Levels16 key_levels, value_levels;
  std::vector<int32_t> pairs;  // [unit][channel pair][GROUP]: two 16-bit queries
  float pair_factor[GROUP];
#endif
  Page page;
  float gain[ROWS], block_gain[ROWS], page_rest[ROWS];
  float peak[ROWS];  // largest weight of the tile at hand
  int used = 0;      // its tokens, rounded up to whole steps of the scores
  std::vector<double> angle_cos, angle_sin, step_cos, step_sin;

  int position(int r) const { return (first + r) / group; }
  int query_head(int r) const { return head * group + (first + r) % group; }

  static void set_lookups(const kvs_side& side, const float* table, Lookup* lookup) {
    for (int s = 0; s < side.segments && side.segment[0].bits < 16; s++) {
      lookup[s].set(table, side.segment[s].bits);
      table += 1 << side.segment[s].bits;
    }
  }

  Block block_of(const kvs_side& side, int id) const {
    const int slab = int(std::upper_bound(call.slab_starts, call.slab_starts + call.slab_count, int64_t(id)) -
                         call.slab_starts) - 1;
    const int64_t inside = id - call.slab_starts[slab];
    auto at = [&](const kvs_part& part) {
      return part.dtype == KVS_NONE ? nullptr
                                    : (const uint8_t*)part.slabs[slab] + inside * part.block_stride + head * part.head_stride;
    };
    return {at(side.code), at(side.token), at(side.zero), at(side.channel), at(side.offset), at(side.scale)};
  }

  static void fetch(const uint8_t* code, const kvs_side& side) {
    for (int64_t i = 0; i < side.code.head_stride; i += 64) __builtin_prefetch(code + i);
  }

  // Queries in the packed basis; rows of scratch.basis are [query][width].
  void prepare_queries() {
    const int width = call.key.width, dim = call.key.head_dim;
    scratch.basis.assign(size_t(padded) * width, 0.0f);
    page.step = nullptr;
    if (row.key_step_count && row.key_steps[0].kind == KVS_PAGE) {
      page.step = row.key_steps;
      page.head = head;
      page.pairs = row.key_steps[0].size;
      page.tokens = call.key.block;
      scratch.cosine.resize(size_t(padded) * page.pairs);
      scratch.sine.resize(size_t(padded) * page.pairs);
    }
    for (int r = 0; r < rows; r++) {
      const float* q = &scratch.query[size_t(r) * dim];
      if (page.step)
        page_rest[r] = page.prepare(q, &scratch.cosine[size_t(r) * page.pairs], &scratch.sine[size_t(r) * page.pairs]);
      float* out = &scratch.basis[size_t(r) * width];
      std::copy(q, q + dim, out);
      gain[r] = map_query(row.key_steps, row.key_step_count, head, dim, out);
    }
    load_queries(scratch.basis.data(), width);
#if KVS_INTEGER
    if (key_integer && rows <= GROUP) load_pairs(width);
#endif
  }

#if KVS_INTEGER
  void load_pairs(int width) {
    std::vector<int16_t> q(size_t(width), 0);
    pairs.assign(size_t(width) / 2 * GROUP, 0);
    for (int r = 0; r < rows; r++) {
      pair_factor[r] = to_16_bits(&scratch.basis[size_t(r) * width], width, q.data()) * row.key_unit;
      for (int p = 0; p < width / 2; p++) {
        const int c = p / 2 * 4 + p % 2;
        pairs[size_t(p) * GROUP + r] = int32_t(uint32_t(uint16_t(q[c])) | uint32_t(uint16_t(q[c + 2])) << 16);
      }
    }
  }
#endif

  std::vector<float> folded;  // laid, times a block's channel scales
  std::vector<float> laid;  // queries as the scores read them: [group][channel][GROUP]
  void load_queries(const float* from, int width) {
    laid.assign(size_t(padded) * width, 0.0f);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < width; c++)
        laid[(size_t(r / GROUP) * width + c) * GROUP + r % GROUP] = from[size_t(r) * width + c];
  }

  // Rotary mean of the block at `start`: cos and sin of the page's midpoint, carried from block to block.
  void turn_page(double start, double& next) {
    const int n = page.pairs;
    const double* frequency = page.step->frequency;
    if (start != next) {
      angle_cos.resize(n), angle_sin.resize(n), step_cos.resize(n), step_sin.resize(n);
      for (int p = 0; p < n; p++) {
        const double angle = frequency[p] * (start + (page.tokens - 1) / 2.0);
        angle_cos[p] = std::cos(angle), angle_sin[p] = std::sin(angle);
        step_cos[p] = std::cos(frequency[p] * page.tokens), step_sin[p] = std::sin(frequency[p] * page.tokens);
      }
    }
    next = start + page.tokens;
    for (int r = 0; r < rows; r++) {
      const float *x = &scratch.cosine[size_t(r) * n], *y = &scratch.sine[size_t(r) * n];
      double sum = 0;
      for (int p = 0; p < n; p++) sum += x[p] * angle_cos[p] + y[p] * angle_sin[p];
      block_gain[r] = page_rest[r] + float(sum);
    }
    for (int p = 0; p < n; p++) {
      const double c = angle_cos[p], s = angle_sin[p];
      angle_cos[p] = c * step_cos[p] - s * step_sin[p];
      angle_sin[p] = s * step_cos[p] + c * step_sin[p];
    }
  }

  // What a block's parts beyond its codes mean for the scores of its tokens.
  float channel[MAX_DIM], offset[MAX_DIM], key_scale;
  float offset_gain[ROWS];
  void prepare_block(const Block& k) {
    const kvs_side& key = call.key;
    key_scale = k.scale ? scale_at(k.scale, key.scale.dtype, 0) : 1.0f;
    std::fill(offset_gain, offset_gain + rows, 0.0f);
    if (!reads_codes(call.key)) return;
    if (k.channel) {
      convert(k.channel, key.channel.dtype, 0, key.width, channel);
      if (fuses(k)) {
        folded.resize(laid.size());
        for (int c = 0; c < key.width; c++)
          for (int r = 0; r < GROUP; r++) folded[c * GROUP + r] = laid[c * GROUP + r] * channel[c];
      }
    }
    if (k.offset) {
      convert(k.offset, key.offset.dtype, 0, key.width, offset);
      for (int r = 0; r < rows; r++) offset_gain[r] = dot(&scratch.basis[size_t(r) * key.width], offset, key.width);
    }
  }

  // columns[width][LANES] of packed keys, the offset left out.
  void key_columns(const Block& k, int at, int count, float* columns) {
    const kvs_side& key = call.key;
    if (!reads_codes(call.key)) {
      float* decoded = scratch.rows.data();
      decode_rows(key, key_lookup, k, at, count, key.width, decoded);
      std::fill(decoded + int64_t(count) * key.width, decoded + int64_t(LANES) * key.width, 0.0f);
      return transpose_tile(decoded, key.width, columns);
    }
    const int bits = key.segment[0].bits, row_bytes = key.width * bits / 8, groups = key.token.count;
    alignas(64) int32_t words[8 * LANES];
    for (int u = 0; u < key.width / UNIT; u++) {
      gather_words(k.code + int64_t(at) * row_bytes + u * 4 * bits, row_bytes, count, bits, words);
      float* out = columns + u * UNIT * LANES;
      by_bits(bits, [&](auto B) { unpack_columns<B.value>(key_lookup[0], words, out); });
    }
    if (key.segment[0].group && (k.channel || !scaled_after(k))) {
      for (int j = 0; j < groups; j++) {
        alignas(64) float scale[LANES] = {}, zero[LANES] = {};
        for (int t = 0; t < count; t++) {
          scale[t] = scale_at(k.token, key.token.dtype, int64_t(at + t) * groups + j);
          if (k.zero) zero[t] = scale_at(k.zero, key.zero.dtype, int64_t(at + t) * groups + j);
        }
        for (int c = j * key.segment[0].group; c < (j + 1) * key.segment[0].group; c++)
          for (int lane = 0; lane < LANES; lane += W) {
            float* x = columns + c * LANES + lane;
            store(x, fma(load(x), load(scale + lane), load(zero + lane)));
          }
      }
    }
    if (k.channel)
      for (int c = 0; c < key.width; c++)
        for (int lane = 0; lane < LANES; lane += W) {
          float* x = columns + c * LANES + lane;
          store(x, load(x) * set1(channel[c]));
        }
  }

  // Whether all there is beyond a key's codes is a factor on its score, or on the query's channels.
  bool scaled_after(const Block& k) const {
    const int group = call.key.segment[0].group;
    return (group == 0 || group == call.key.width) && !k.zero;
  }

  // Whether scores are summed straight from the codes: few rows, so that nothing is gained by unpacking once for all.
  bool fuses(const Block& k) const { return W > 4 && rows <= GROUP && reads_codes(call.key) && scaled_after(k); }

  void score_codes(const Block& k, int at, int count, int lane) {
    const kvs_side& key = call.key;
    const int bits = key.segment[0].bits, row_bytes = key.width * bits / 8;
    alignas(64) int32_t words[8 * LANES];
    float* out = &scratch.scores[size_t(lane)];
#if KVS_INTEGER
    if (key_integer && !k.channel) {
      alignas(64) int32_t sums[GROUP * LANES] = {};
      for (int u = 0; u < key.width / UNIT; u++) {
        gather_words(k.code + int64_t(at) * row_bytes + u * 4 * bits, row_bytes, count, bits, words);
        const int32_t* q = &pairs[size_t(u) * UNIT / 2 * GROUP];
        by_bits(bits, [&](auto B) {
          by_rows(rows, [&](auto R) { score_unit16<R.value, B.value>(key_levels, words, q, sums); });
        });
      }
      for (int r = 0; r < rows; r++)
        for (int t = 0; t < LANES; t += W)
          store(out + r * TILE + t, to_float(loadi(sums + r * LANES + t)) * set1(pair_factor[r]));
      return;
    }
#endif
    for (int r = 0; r < rows; r++) std::fill(out + r * TILE, out + r * TILE + LANES, 0.0f);
    for (int u = 0; u < key.width / UNIT; u++) {
      gather_words(k.code + int64_t(at) * row_bytes + u * 4 * bits, row_bytes, count, bits, words);
      const float* q = &(k.channel ? folded : laid)[size_t(u) * UNIT * GROUP];
      by_bits(bits, [&](auto B) {
        by_rows(rows, [&](auto R) { score_unit<R.value, B.value>(key_lookup[0], words, q, out); });
      });
    }
  }

  void score_columns(const float* columns, int width, int lane) {
    for (int r = 0; r < rows; r += GROUP) {
      const float* q = &laid[size_t(r / GROUP) * width * GROUP];
      float* out = &scratch.scores[size_t(r) * TILE + lane];
      by_rows(std::min(GROUP, rows - r), [&](auto R) { score_rows<R.value>(columns, width, q, out); });
    }
  }

  void packed_tile(const Block& k, const Block& v, int at, int count, int token_index) {
    used = (count + LANES - 1) / LANES * LANES;
    const kvs_side& key = call.key;
    const bool by_columns = reads_codes(call.key), fused = fuses(k);
    for (int lane = 0; lane < count; lane += LANES) {
      const int n = std::min(LANES, count - lane);
      if (fused) {
        score_codes(k, at + lane, n, lane);
      } else {
        key_columns(k, at + lane, n, scratch.columns.data());
        score_columns(scratch.columns.data(), key.width, lane);
      }
    }
    alignas(64) float scale[TILE];
    for (int t = 0; t < used; t++) scale[t] = by_columns ? key_scale : 1.0f;
    if (by_columns && key.segment[0].group && scaled_after(k) && (fused || !k.channel)) {
      convert_scales(k.token, key.token, at, count, 1, 0, scale);
      for (int t = 0; t < count; t++) scale[t] *= key_scale;
    }
    if (call.mask)
      for (int i = 0; i < count; i++) scratch.column[i] = token_index + i;
    for (int t = 0; t < used; t += W) store(scale + t, load(scale + t) * set1(call.scaling));
    for (int r = 0; r < rows; r++) {
      const vf bias = set1((gain[r] + block_gain[r] + offset_gain[r]) * call.scaling);
      float* s = &scratch.scores[size_t(r) * TILE];
      for (int t = 0; t < used; t += W) store(s + t, fma(load(s + t), load(scale + t), bias));
    }
    weigh(count, true, false, 0);
    sum_values(v, at, count);
  }

  static void convert_scales(const uint8_t* from, const kvs_part& part, int at, int count, int groups, int j, float* out) {
    if (groups == 1 && part.dtype == KVS_FP16) return convert(from, KVS_FP16, at, count, out);
    for (int t = 0; t < count; t++) out[t] = scale_at(from, part.dtype, int64_t(at + t) * groups + j);
  }

  void sum_values(const Block& v, int at, int count) {
    const kvs_side& value = call.value;
    const int bits = value.segment[0].bits, group_width = value.segment[0].group;
    const bool on_codes = reads_codes(value) && group_width % UNIT == 0 && !v.channel && rows <= GROUP;
    if (!on_codes) {
      float* decoded = scratch.rows.data();
      decode_rows(value, value_lookup, v, at, count, value.width, decoded);
      return sum_plain(decoded, value.width, count, scratch.scores.data(), partial.basis.data());
    }
    const float block_scale = v.scale ? scale_at(v.scale, value.scale.dtype, 0) : 1.0f;
    const int groups = group_width ? value.width / group_width : 1;
    const int span = group_width ? group_width : value.width, stride = value.width * bits / 8;
    float* weights = scratch.weights.data();
    for (int j = 0; j < groups; j++) {
      alignas(64) float scale[TILE], zero[TILE];
      std::fill(scale, scale + used, 1.0f);  // past `count` the weights are 0
      if (group_width) convert_scales(v.token, value.token, at, count, groups, j, scale);
      if (v.zero) convert_scales(v.zero, value.zero, at, count, groups, j, zero);
#if KVS_INTEGER
      alignas(64) int16_t integers[GROUP * TILE];
      float factor[GROUP];
      if (value_integer) {
        float largest = 0;
        for (int t = 0; t < count; t++) largest = std::max(largest, std::fabs(scale[t]));
        for (int t = count; t < used; t++) scale[t] = 0;
        for (int r = 0; r < rows; r++) {
          const float top = largest * peak[r];  // no weight times its scale is larger
          weights16(&scratch.scores[size_t(r) * TILE], scale, top > 0 ? TOP16 / top : 0.0f, used, integers + r * TILE);
          factor[r] = top / TOP16 * block_scale * row.value_unit;
        }
      }
      const bool as_floats = !value_integer;
#else
      const bool as_floats = true;
#endif
      if (as_floats)
        for (int r = 0; r < rows; r++) {
          const float* p = &scratch.scores[size_t(r) * TILE];
          for (int t = 0; t < used; t += W)
            store(weights + r * TILE + t, load(p + t) * load(scale + t) * set1(block_scale));
        }
      for (int c = j * span; c < (j + 1) * span; c += UNIT) {
        const uint8_t* unit = v.code + int64_t(at) * stride + c * bits / 8;
        float* out = &partial.basis[c];
#if KVS_INTEGER
        if (value_integer) {
          by_bits(bits, [&](auto B) {
            by_rows(rows, [&](auto R) {
              sum_unit16<R.value, B.value>(value_levels, unit, stride, count, integers, factor, out, value.width);
            });
          });
          continue;
        }
#endif
        by_bits(bits, [&](auto B) {
          by_rows(rows, [&](auto R) {
            sum_unit<R.value, B.value, 0>(value_lookup[0], unit, stride, count, weights, out, value.width);
          });
        });
      }
      if (v.zero)
        for (int r = 0; r < rows; r++) {
          const float add = dot(&scratch.scores[size_t(r) * TILE], zero, count) * block_scale;
          float* out = &partial.basis[size_t(r) * value.width + j * span];
          for (int c = 0; c < span; c++) out[c] += add;
        }
    }
    if (v.offset) {
      convert(v.offset, value.offset.dtype, 0, value.width, offset);
      for (int r = 0; r < rows; r++) {
        float mass = 0;
        for (int t = 0; t < count; t++) mass += scratch.scores[size_t(r) * TILE + t];
        axpy(mass, offset, &partial.basis[size_t(r) * value.width], value.width);
      }
    }
  }

  void sum_plain(const float* values, int width, int count, const float* weights, float* out) {
    for (int r = 0; r < rows; r += GROUP) {
      by_rows(std::min(GROUP, rows - r), [&](auto R) {
        sum_rows<R.value>(values, width, count, weights + size_t(r) * TILE, out + size_t(r) * width, width);
      });
    }
  }

  void exact_tile(const kvs_exact& from, int at, int count, bool is_chunk) {
    used = (count + LANES - 1) / LANES * LANES;
    const int dim = call.key.head_dim, value_dim = call.value.head_dim;
    float* decoded = scratch.rows.data();
    const int64_t k0 = sequence * from.key_row + head * from.key_head, v0 = sequence * from.value_row + head * from.value_head;
    for (int lane = 0; lane < count; lane += LANES) {
      const int n = std::min(LANES, count - lane);
      for (int t = 0; t < LANES; t++) {
        if (t < n)
          convert(from.key, from.key_dtype, k0 + (at + lane + t) * from.key_token, dim, decoded + t * dim);
        else
          std::fill(decoded + t * dim, decoded + (t + 1) * dim, 0.0f);
      }
      transpose_tile(decoded, dim, scratch.columns.data());
      score_columns(scratch.columns.data(), dim, lane);
    }
    for (int r = 0; r < rows; r++) {
      float* s = &scratch.scores[size_t(r) * TILE];
      for (int t = 0; t < used; t += W) store(s + t, load(s + t) * set1(call.scaling));
    }
    weigh(count, false, is_chunk, at);
    for (int t = 0; t < count; t++)
      convert(from.value, from.value_dtype, v0 + (at + t) * from.value_token, value_dim, decoded + t * value_dim);
    sum_plain(decoded, value_dim, count, scratch.scores.data(), partial.model.data());
  }

  // Mask column of stored token `index`, counted as if no column had been left out.
  int64_t column_of(int64_t index) const {
    for (int i = 0; i < row.hole_count; i++) {
      if (row.holes[2 * i] > index) break;
      index += row.holes[2 * i + 1] - row.holes[2 * i];
    }
    return index;
  }

  void add_mask(float* s, int r, int count) {
    const int64_t at = sequence * call.mask_row + query_head(r) * call.mask_head + position(r) * call.mask_query;
    for (int t = 0; t < count; t++) {
      const int64_t i = at + scratch.column[t];
      if (call.mask_dtype == KVS_BOOL)
        s[t] = ((const uint8_t*)call.mask)[i] ? s[t] : LOWEST;
      else
        s[t] += scale_at((const uint8_t*)call.mask, call.mask_dtype, i);
    }
  }

  // Scaled scores -> weights under the new maximum, in place; sums so far fade. Weights past `count` are 0.
  void weigh(int count, bool is_packed, bool is_chunk, int chunk_at) {
    if (call.mask)
      for (int t = 0; t < count; t++) scratch.column[t] = is_chunk ? call.length + chunk_at + t : column_of(scratch.column[t]);
    for (int r = 0; r < rows; r++) {
      float* s = &scratch.scores[size_t(r) * TILE];
      if (call.softcap > 0)
        for (int t = 0; t < used; t += W)
          store(s + t, vtanh(load(s + t) * set1(1.0f / call.softcap)) * set1(call.softcap));
      int seen = count;
      if (call.mask)
        add_mask(s, r, count);
      else if (is_chunk && call.causal && call.chunk_tokens > 1)
        seen = std::max(0, std::min(count, position(r) - chunk_at + 1));
      for (int t = seen; t < used; t++) s[t] = LOWEST;
      vf largest = load(s);
      for (int t = W; t < used; t += W) largest = vmax(largest, load(s + t));
      const float top = hmax(largest);
      if (top == LOWEST) {
        peak[r] = 0;
        std::fill(s, s + used, 0.0f);
        continue;
      }
      if (top > partial.top[r]) fade(r, partial.top[r] == LOWEST ? 0.0f : std::exp(partial.top[r] - top)), partial.top[r] = top;
      peak[r] = std::exp(top - partial.top[r]);
      vf sum = set1(0);
      for (int t = 0; t < used; t += W) {
        const vf p = vexp(load(s + t) - set1(partial.top[r]));
        store(s + t, p);
        sum = sum + p;
      }
      const float total = hsum(sum);
      partial.total[r] += total;
      if (is_packed) partial.mass[r] += total;
    }
  }

  void fade(int r, float by) {
    partial.total[r] *= by;
    partial.mass[r] *= by;
    for (auto* sums : {&partial.basis, &partial.model}) {
      if (sums->empty()) continue;
      const size_t width = sums->size() / size_t(padded);
      float* x = sums->data() + size_t(r) * width;
      for (size_t c = 0; c < width; c++) x[c] *= by;
    }
  }
};

// Merge the tasks of one (sequence, kv head, run of rows) and write the output.
inline void merge(const kvs_attend& call, int sequence, int head, int first, int rows, Partial* partials, int count) {
  const int group = call.heads / call.kv_heads, dim = call.value.head_dim, width = call.value.width;
  const kvs_row& row = call.rows[sequence];
  float basis[MAX_DIM], model[MAX_DIM];
  for (int r = 0; r < rows; r++) {
    const int query_head = head * group + (first + r) % group, position = (first + r) / group;
    float top = call.sinks ? ((const float*)call.sinks)[query_head] : LOWEST, total = call.sinks ? 1.0f : 0.0f, mass = 0;
    const float sink = top;
    for (int i = 0; i < count; i++) top = std::max(top, partials[i].top[r]);
    if (call.sinks && top != LOWEST) total = std::exp(sink - top);
    std::fill(basis, basis + std::max(width, dim), 0.0f);
    std::fill(model, model + dim, 0.0f);
    for (int i = 0; i < count; i++) {
      const Partial& p = partials[i];
      if (p.top[r] == LOWEST) continue;
      const float f = std::exp(p.top[r] - top);
      total += f * p.total[r];
      mass += f * p.mass[r];
      if (!p.basis.empty()) axpy(f, &p.basis[size_t(r) * width], basis, width);
      if (!p.model.empty()) axpy(f, &p.model[size_t(r) * dim], model, dim);
    }
    if (row.packed) map_output(row.value_steps, row.value_step_count, head, dim, mass, basis);
    const float inverse = total > 0 ? 1.0f / total : 1.0f;
    const int64_t at = ((int64_t(sequence) * call.queries + position) * call.heads + query_head) * dim;
    for (int c = 0; c < dim; c++) {
      const float y = (basis[c] + model[c]) * inverse;
      if (call.out_dtype == KVS_FP32)
        ((float*)call.out)[at + c] = y;
      else if (call.out_dtype == KVS_FP16)
        ((uint16_t*)call.out)[at + c] = float_to_half(y);
      else
        ((uint16_t*)call.out)[at + c] = float_to_bfloat(y);
    }
  }
}

}  // namespace KVS_NS
