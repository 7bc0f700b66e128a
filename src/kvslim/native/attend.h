// Attention of a chunk over {sinks, packed blocks, tail, the chunk itself}; equals kvslim.attention.reference.attend.
//
// Scores take tokens in the lanes of a vector (a tile of packed codes is transposed as bytes, a quarter of the work of
// doing it in floats), values take channels. All sums are fp32. Nothing longer than a tile is ever made dense.
//
// A task is one sequence, one kv head, up to ROWS query rows and a range of the packed tokens; tasks are merged by
// log-sum-exp. Rows of a task: query positions, and within each the query heads that share the kv head.
#pragma once
#include <algorithm>
#include <vector>

#include "chain.h"

namespace KVS_NS {

constexpr int ROWS = 64;
constexpr int GROUP = 8;      // rows that go through a tile together, sums in registers
constexpr int LANES = 2 * W;  // tokens per step of the scores
constexpr float LOWEST = -INFINITY;

inline void transpose4(const float* in, int64_t stride, float* out, int out_stride) {
  typedef float v4 __attribute__((vector_size(16)));
  typedef int i4 __attribute__((vector_size(16)));
  v4 r[4];
  for (int i = 0; i < 4; i++) std::memcpy(&r[i], in + i * stride, 16);
  v4 a = __builtin_shuffle(r[0], r[1], i4{0, 4, 1, 5}), b = __builtin_shuffle(r[2], r[3], i4{0, 4, 1, 5});
  v4 c = __builtin_shuffle(r[0], r[1], i4{2, 6, 3, 7}), d = __builtin_shuffle(r[2], r[3], i4{2, 6, 3, 7});
  v4 o[4] = {__builtin_shuffle(a, b, i4{0, 1, 4, 5}), __builtin_shuffle(a, b, i4{2, 3, 6, 7}),
             __builtin_shuffle(c, d, i4{0, 1, 4, 5}), __builtin_shuffle(c, d, i4{2, 3, 6, 7})};
  for (int i = 0; i < 4; i++) std::memcpy(out + i * out_stride, &o[i], 16);
}

// rows[LANES][width] -> columns[width][LANES]
inline void transpose_tile(const float* rows, int width, float* columns) {
  int c = 0;
  for (; c + 4 <= width; c += 4)
    for (int t = 0; t < LANES; t += 4) transpose4(rows + int64_t(t) * width + c, width, columns + c * LANES + t, LANES);
  for (; c < width; c++)
    for (int t = 0; t < LANES; t++) columns[c * LANES + t] = rows[int64_t(t) * width + c];
}

// Bytes i of LANES rows side by side: out[i][t] = row t's byte i, for 8 bytes.
inline void transpose_bytes8(const uint8_t* const* rows, int at, uint8_t* out) {
#if defined(__AVX2__)
  for (int t = 0; t < LANES; t += 16) {
    __m128i r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = _mm_loadl_epi64((const __m128i*)(rows[t + i] + at));
    for (int i = 0; i < 8; i++) s[i] = _mm_unpacklo_epi8(r[i], r[i + 8]);
    for (int i = 0; i < 4; i++) r[2 * i] = _mm_unpacklo_epi8(s[i], s[i + 4]), r[2 * i + 1] = _mm_unpackhi_epi8(s[i], s[i + 4]);
    for (int i = 0; i < 4; i++) s[2 * i] = _mm_unpacklo_epi8(r[i], r[i + 4]), s[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + 4]);
    for (int i = 0; i < 4; i++) r[2 * i] = _mm_unpacklo_epi8(s[i], s[i + 4]), r[2 * i + 1] = _mm_unpackhi_epi8(s[i], s[i + 4]);
    for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i*)(out + i * LANES + t), r[i]);
  }
#else
  for (int i = 0; i < 8; i++)
    for (int t = 0; t < LANES; t++) out[i * LANES + t] = rows[t][at + i];
#endif
}

inline void transpose_bytes4(const uint8_t* const* rows, int at, uint8_t* out) {
  for (int i = 0; i < 4; i++)
    for (int t = 0; t < LANES; t++) out[i * LANES + t] = rows[t][at + i];
}

// One unit of LANES tokens: columns[c][t] for its 32 channels, table values only.
template <int BITS>
inline void unpack_columns(const Lookup& lookup, const uint8_t* const* rows, int at, float* columns) {
  alignas(64) uint8_t b[32 * LANES];
  auto put = [&](int c, int lane, vi code) {
    vf x;
    if constexpr (BITS <= 4)
      x = look(lookup.small, code);
    else
      x = lookup.uniform ? to_float(code) + set1(lookup.origin) : gather(lookup.table, code);
    store(columns + c * LANES + lane, x);
  };
  if constexpr (BITS == 8) {
    for (int i = 0; i < 4; i++) transpose_bytes8(rows, at + 8 * i, b + 8 * i * LANES);
    for (int c = 0; c < 32; c++)
      for (int lane = 0; lane < LANES; lane += W) put(c, lane, bytes(b + c * LANES + lane));
  } else if constexpr (BITS == 4) {
    transpose_bytes8(rows, at, b);
    transpose_bytes8(rows, at + 8, b + 8 * LANES);
    for (int i = 0; i < 16; i++)
      for (int lane = 0; lane < LANES; lane += W) {
        vi code = bytes(b + i * LANES + lane);
        put(i, lane, code);
        put(i + 16, lane, srl<4>(code));
      }
  } else if constexpr (BITS == 2) {
    transpose_bytes8(rows, at, b);
    for (int i = 0; i < 8; i++)
      for (int lane = 0; lane < LANES; lane += W) {
        vi code = bytes(b + i * LANES + lane);
        put(i, lane, code);
        put(i + 8, lane, srl<2>(code));
        put(i + 16, lane, srl<4>(code));
        put(i + 24, lane, srl<6>(code));
      }
  } else {
    static_assert(BITS == 3);
    transpose_bytes8(rows, at, b);
    transpose_bytes4(rows, at + 8, b + 8 * LANES);
    const vi low = seti(3), high = seti(4);
    for (int i = 0; i < 8; i++)
      for (int lane = 0; lane < LANES; lane += W) {
        vi code = bytes(b + i * LANES + lane), top = bytes(b + (8 + i % 4) * LANES + lane);
        if (i >= 4) top = srl<1>(top);
        put(i, lane, ori(andi(code, low), andi(sll<2>(top), high)));
        put(i + 8, lane, ori(andi(srl<2>(code), low), andi(top, high)));
        put(i + 16, lane, ori(andi(srl<4>(code), low), andi(srl<2>(top), high)));
        put(i + 24, lane, ori(andi(srl<6>(code), low), andi(srl<4>(top), high)));
      }
  }
}

// scores[r][LANES] = sum_c q[c][r] * columns[c][LANES], q in rows of GROUP
template <int R>
inline void score_rows(const float* columns, int width, const float* q, float* scores, int stride) {
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
  for (int r = 0; r < R; r++) store(scores + r * stride, sum[r][0]), store(scores + r * stride + W, sum[r][1]);
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

// Call f<1> .. f<GROUP> for `rows` rows.
#define KVS_BY_ROWS(rows, call) \
  switch (rows) {               \
    case 1: call(1); break;     \
    case 2: call(2); break;     \
    case 3: call(3); break;     \
    case 4: call(4); break;     \
    case 5: call(5); break;     \
    case 6: call(6); break;     \
    case 7: call(7); break;     \
    default: call(8); break;    \
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
  Page page;
  float gain[ROWS], block_gain[ROWS], page_rest[ROWS];
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
  }

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

  // Whether scores can be taken on the codes, every other part applied to the sum: one segment, at most one scale per
  // token, no channel scales.
  bool key_by_columns() const {
    const kvs_side& k = call.key;
    const int bits = k.segment[0].bits;
    return k.segments == 1 && k.width % UNIT == 0 && (bits == 2 || bits == 3 || bits == 4 || bits == 8);
  }

  // What a block's parts beyond its codes mean for the scores of its tokens.
  float channel[MAX_DIM], offset[MAX_DIM], key_scale;
  float offset_gain[ROWS];
  void prepare_block(const Block& k) {
    const kvs_side& key = call.key;
    key_scale = k.scale ? scale_at(k.scale, key.scale.dtype, 0) : 1.0f;
    std::fill(offset_gain, offset_gain + rows, 0.0f);
    if (!key_by_columns()) return;
    if (k.channel) convert(k.channel, key.channel.dtype, 0, key.width, channel);
    if (k.offset) {
      convert(k.offset, key.offset.dtype, 0, key.width, offset);
      for (int r = 0; r < rows; r++) offset_gain[r] = dot(&scratch.basis[size_t(r) * key.width], offset, key.width);
    }
  }

  // columns[width][LANES] of packed keys, the offset left out.
  void key_columns(const Block& k, int at, int count, float* columns) {
    const kvs_side& key = call.key;
    if (!key_by_columns()) {
      float* decoded = scratch.rows.data();
      decode_rows(key, key_lookup, k, at, count, key.width, decoded);
      std::fill(decoded + int64_t(count) * key.width, decoded + int64_t(LANES) * key.width, 0.0f);
      return transpose_tile(decoded, key.width, columns);
    }
    const int bits = key.segment[0].bits, bytes_per_row = key.width * bits / 8, groups = key.token.count;
    const uint8_t* line[LANES];
    for (int t = 0; t < LANES; t++) line[t] = k.code + int64_t(at + std::min(t, count - 1)) * bytes_per_row;
    for (int u = 0; u < key.width / UNIT; u++) {
      float* out = columns + u * UNIT * LANES;
      switch (bits) {
        case 2: unpack_columns<2>(key_lookup[0], line, u * 8, out); break;
        case 3: unpack_columns<3>(key_lookup[0], line, u * 12, out); break;
        case 4: unpack_columns<4>(key_lookup[0], line, u * 16, out); break;
        default: unpack_columns<8>(key_lookup[0], line, u * 32, out); break;
      }
    }
    const bool per_token = key.segment[0].group == key.width && !k.zero && !k.channel;
    if (key.segment[0].group && !per_token) {
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

  void score_columns(const float* columns, int width, int lane) {
    for (int r = 0; r < rows; r += GROUP) {
      const float* q = &laid[size_t(r / GROUP) * width * GROUP];
      float* out = &scratch.scores[size_t(r) * TILE + lane];
#define KVS_SCORE(R) score_rows<R>(columns, width, q, out, TILE)
      KVS_BY_ROWS(std::min(GROUP, rows - r), KVS_SCORE)
#undef KVS_SCORE
    }
  }

  void packed_tile(const Block& k, const Block& v, int at, int count, int token_index) {
    const kvs_side& key = call.key;
    for (int lane = 0; lane < count; lane += LANES) {
      key_columns(k, at + lane, std::min(LANES, count - lane), scratch.columns.data());
      score_columns(scratch.columns.data(), key.width, lane);
    }
    alignas(64) float scale[TILE];
    const bool columns = key_by_columns();
    const bool per_token = columns && key.segment[0].group == key.width && !k.zero && !k.channel;
    for (int t = 0; t < TILE; t++) scale[t] = columns ? key_scale : 1.0f;
    if (per_token) {
      convert_scales(k.token, key.token, at, count, 1, 0, scale);
      for (int t = 0; t < count; t++) scale[t] *= key_scale;
    }
    for (int i = 0; i < count; i++) scratch.column[i] = token_index + i;
    for (int r = 0; r < rows; r++) {
      const float bias = gain[r] + block_gain[r] + offset_gain[r];
      float* s = &scratch.scores[size_t(r) * TILE];
      for (int t = 0; t < TILE; t += W) store(s + t, fma(load(s + t), load(scale + t), set1(bias)) * set1(call.scaling));
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
    const bool on_codes = value.segments == 1 && value.width % UNIT == 0 && group_width % UNIT == 0 && bits <= 8 &&
                          !v.channel && rows <= GROUP;
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
      std::fill(scale, scale + TILE, 1.0f);
      if (group_width) convert_scales(v.token, value.token, at, count, groups, j, scale);
      if (v.zero) convert_scales(v.zero, value.zero, at, count, groups, j, zero);
      for (int r = 0; r < rows; r++) {
        const float* p = &scratch.scores[size_t(r) * TILE];
        for (int t = 0; t < TILE; t += W) store(weights + r * TILE + t, load(p + t) * load(scale + t) * set1(block_scale));
      }
      for (int c = j * span; c < (j + 1) * span; c += UNIT) {
        const uint8_t* unit = v.code + int64_t(at) * stride + c * bits / 8;
        float* out = &partial.basis[c];
#define KVS_SUM(R) sum_codes<R>(bits, value_lookup[0], unit, stride, count, weights, out, value.width)
        KVS_BY_ROWS(rows, KVS_SUM)
#undef KVS_SUM
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

  template <int R>
  static void sum_codes(int bits, const Lookup& lookup, const uint8_t* unit, int stride, int count, const float* weights,
                        float* out, int out_stride) {
    switch (bits) {
      case 1: return sum_unit<R, 1, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 2: return sum_unit<R, 2, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 3: return sum_unit<R, 3, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 4: return sum_unit<R, 4, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 5: return sum_unit<R, 5, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 6: return sum_unit<R, 6, 0>(lookup, unit, stride, count, weights, out, out_stride);
      case 7: return sum_unit<R, 7, 0>(lookup, unit, stride, count, weights, out, out_stride);
      default: return sum_unit<R, 8, 0>(lookup, unit, stride, count, weights, out, out_stride);
    }
  }

  void sum_plain(const float* values, int width, int count, const float* weights, float* out) {
    for (int r = 0; r < rows; r += GROUP) {
#define KVS_PLAIN(R) sum_rows<R>(values, width, count, weights + size_t(r) * TILE, out + size_t(r) * width, width)
      KVS_BY_ROWS(std::min(GROUP, rows - r), KVS_PLAIN)
#undef KVS_PLAIN
    }
  }

  void exact_tile(const kvs_exact& from, int at, int count, bool is_chunk) {
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
      for (int t = 0; t < TILE; t += W) store(s + t, load(s + t) * set1(call.scaling));
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
        for (int t = 0; t < TILE; t += W)
          store(s + t, vtanh(load(s + t) * set1(1.0f / call.softcap)) * set1(call.softcap));
      int seen = count;
      if (call.mask)
        add_mask(s, r, count);
      else if (is_chunk && call.causal && call.chunk_tokens > 1)
        seen = std::max(0, std::min(count, position(r) - chunk_at + 1));
      for (int t = seen; t < TILE; t++) s[t] = LOWEST;
      vf largest = load(s);
      for (int t = W; t < TILE; t += W) largest = vmax(largest, load(s + t));
      const float top = hmax(largest);
      if (top == LOWEST) {
        std::fill(s, s + TILE, 0.0f);
        continue;
      }
      if (top > partial.top[r]) fade(r, partial.top[r] == LOWEST ? 0.0f : std::exp(partial.top[r] - top)), partial.top[r] = top;
      vf sum = set1(0);
      for (int t = 0; t < TILE; t += W) {
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
