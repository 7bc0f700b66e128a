// The half of dots.h for AVX2: levels are looked up as bytes, 32 at a time, and products of 16 bits are summed in pairs.
#pragma once
#include "rows.h"

namespace KVS_NS {

// A table of 8-bit levels for `vpshufb`, which wants codes alone in their bytes.
struct Levels16 {
  vi all;
  int origin;  // of 8-bit codes, whose level is code + origin

  void set(const float* levels, int bits, float unit) {
    int8_t copy[32];
    for (int i = 0; i < 32; i++) copy[i] = int8_t(std::lrint(levels[i % (1 << std::min(bits, 4))] / unit));
    all = loadi((const int32_t*)copy);
    origin = int(std::lrint(levels[0] / unit));
  }
};

inline vi pair_sums(vi sum, vi a, vi b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

// Codes of channels C .. C + 3 of W tokens in a plane of SIZE bits per code: a 32-bit lane is a token.
template <int SIZE, int C>
inline vi plane_of(const int32_t* plane, int lane) {
  constexpr int at = C % (4 * SIZE);
  return andi(srl<SIZE * (C / (4 * SIZE))>(loadi(plane + at / 4 * LANES + lane)), _mm256_set1_epi8((1 << SIZE) - 1));
}

// Levels of channels C, C + 2 and of C + 1, C + 3 of W tokens: the halves of a 32-bit lane. `words` as in gather_words.
template <int BITS, int C>
inline void quad_of(const Levels16& table, const int32_t* words, int lane, vi& even, vi& odd) {
  if constexpr (BITS == 8) {
    const vi x = loadi(words + C / 4 * LANES + lane), origin = _mm256_set1_epi16(int16_t(table.origin));
    even = _mm256_add_epi16(andi(x, _mm256_set1_epi16(255)), origin);
    odd = _mm256_add_epi16(_mm256_srli_epi16(x, 8), origin);
  } else {
    vi code;
    if constexpr (BITS == 3)
      code = ori(plane_of<2, C>(words, lane), sll<2>(plane_of<1, C>(words + 2 * LANES, lane)));
    else
      code = plane_of<BITS, C>(words, lane);
    const vi level = _mm256_shuffle_epi8(table.all, code);
    even = _mm256_srai_epi16(_mm256_slli_epi16(level, 8), 8);
    odd = _mm256_srai_epi16(level, 8);
  }
}

// Call use(pair number, W tokens) for the channel pairs of the quads C, C + 4 .. 28 of a unit.
template <int BITS, int C, class Use>
inline __attribute__((always_inline)) void each_pair(const Levels16& table, const int32_t* words, int lane, const Use& use) {
  if constexpr (C < UNIT) {
    vi even, odd;
    quad_of<BITS, C>(table, words, lane, even, odd);
    use(C / 2, even);
    use(C / 2 + 1, odd);
    each_pair<BITS, C + 4>(table, words, lane, use);
  }
}

// sums[r][t] += scores of one unit; q[pair][r]: two 16-bit queries
template <int R, int BITS>
inline void score_unit16(const Levels16& table, const int32_t* words, const int32_t* q, int32_t* sums) {
  for (int lane = 0; lane < LANES; lane += W) {
    vi sum[R];
    for (int r = 0; r < R; r++) sum[r] = loadi(sums + r * LANES + lane);
    each_pair<BITS, 0>(table, words, lane, [&](int p, vi x) {
      for (int r = 0; r < R; r++) sum[r] = pair_sums(sum[r], seti(q[p * GROUP + r]), x);
    });
    for (int r = 0; r < R; r++) storei(sums + r * LANES + lane, sum[r]);
  }
}

// Levels of channels C .. C + 7 and C + 8 .. C + 15 of a unit for two tokens: a 32-bit lane is a channel, its halves are
// the tokens.
template <int BITS, int C>
inline void token_pair(const Levels16& table, const uint8_t* a, const uint8_t* b, vi& first, vi& second) {
  const auto load16 = [](const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); };
  if constexpr (BITS == 8) {
    const __m128i x = load16(a + C), y = load16(b + C);
    const vi origin = _mm256_set1_epi16(int16_t(table.origin));
    first = _mm256_add_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x, y)), origin);
    second = _mm256_add_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x, y)), origin);
  } else {
    const __m128i levels = _mm256_castsi256_si128(table.all);
    __m128i one, two;  // codes, byte by byte: a channel's two tokens, then the next channel's
    if constexpr (BITS == 4) {
      const __m128i x = load16(a), y = load16(b), mask = _mm_set1_epi8(15);
      one = _mm_and_si128(_mm_srli_epi16(_mm_unpacklo_epi8(x, y), C / 4), mask);
      two = _mm_and_si128(_mm_srli_epi16(_mm_unpackhi_epi8(x, y), C / 4), mask);
    } else {
      const __m128i x = _mm_loadl_epi64((const __m128i*)a), y = _mm_loadl_epi64((const __m128i*)b);
      const __m128i crumbs = _mm_unpacklo_epi8(x, y), mask = _mm_set1_epi8(3);
      one = _mm_and_si128(_mm_srli_epi16(crumbs, C / 4), mask);
      two = _mm_and_si128(_mm_srli_epi16(crumbs, C / 4 + 2), mask);
      if constexpr (BITS == 3) {
        int32_t p, q;
        std::memcpy(&p, a + 8, 4), std::memcpy(&q, b + 8, 4);
        const __m128i bits = _mm_unpacklo_epi8(_mm_cvtsi32_si128(p), _mm_cvtsi32_si128(q));  // of four channels
        const __m128i both = _mm_unpacklo_epi64(bits, bits), bit = _mm_set1_epi8(1);
        const auto high = [&](int at) {  // of eight channels, at place 2
          return _mm_slli_epi16(_mm_and_si128(_mm_srlv_epi64(both, _mm_set_epi64x(at + 1, at)), bit), 2);
        };
        one = _mm_or_si128(one, high(C / 4));
        two = _mm_or_si128(two, high(C / 4 + 2));
      }
    }
    first = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(levels, one));
    second = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(levels, two));
  }
}

// out[r][C .. 31] += factor[r] * sum_t weights[r][t] * level of one unit; weights of tokens past `count` are 0
template <int R, int BITS, int C = 0>
inline void sum_unit16(const Levels16& table, const uint8_t* unit, int64_t stride, int count, const int16_t* weights,
                       const float* factor, float* out, int out_stride) {
  vi sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = seti(0);
  const uint8_t* at = unit;
  for (int t = 0; t < count; t += 2, at += 2 * stride) {
    vi x, y;
    token_pair<BITS, C>(table, at, t + 1 < count ? at + stride : at, x, y);
    for (int r = 0; r < R; r++) {
      int32_t both;
      std::memcpy(&both, weights + r * TILE + t, 4);
      sum[r][0] = pair_sums(sum[r][0], seti(both), x);
      sum[r][1] = pair_sums(sum[r][1], seti(both), y);
    }
  }
  for (int r = 0; r < R; r++) {
    float* o = out + r * out_stride + C;
    store(o, fma(to_float(sum[r][0]), set1(factor[r]), load(o)));
    store(o + W, fma(to_float(sum[r][1]), set1(factor[r]), load(o + W)));
  }
  if constexpr (C + 2 * W < UNIT)
    sum_unit16<R, BITS, C + 2 * W>(table, unit, stride, count, weights, factor, out, out_stride);
}

inline void store_shorts(int16_t* p, vi x) {
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

// Weights times `scale`, rounded to integers.
inline void weights16(const float* weights, const float* scale, float factor, int count, int16_t* out) {
  for (int t = 0; t < count; t += W) store_shorts(out + t, to_int(load(weights + t) * load(scale + t) * set1(factor)));
}

// Round `count` values, a multiple of W, to 15 bits of the largest magnitude; returns what one step is worth.
inline float to_16_bits(const float* x, int count, int16_t* out) {
  vf largest = set1(0);
  for (int i = 0; i < count; i += W) largest = vmax(largest, vmax(load(x + i), set1(0) - load(x + i)));
  const float top = hmax(largest);
  const vf scale = set1(top > 0 ? TOP16 / top : 0.0f);
  for (int i = 0; i < count; i += W) store_shorts(out + i, to_int(load(x + i) * scale));
  return top / TOP16;
}

}  // namespace KVS_NS
