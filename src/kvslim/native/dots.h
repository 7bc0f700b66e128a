// Scores and sums in integers, for tables whose levels are small integers times one unit (AVX-512 with VNNI, AVX2).
//
// Queries and weights are rounded to 15 bits of their row's largest magnitude, levels are exact: 1e-4 of the output, at
// half of the instructions of fp32. A 32-bit lane holds two 16-bit factors; sums stay below 2^31 for 512 channels and for
// a tile of tokens. AVX2's half is in dots256.h.
#pragma once
#include "rows.h"

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define KVS_INTEGER 1

namespace KVS_NS {

constexpr float TOP16 = 32767.0f;
constexpr int LARGEST_LEVEL = 127;  // TOP16 * 128 * 512, all channels of a wide head, stays below 2^31

// Whether a segment can be read this way: levels are integers in `unit`, and wide codes are uniform.
inline bool is_integer(const kvs_segment& segment, const float* levels, float unit) {
  if (unit <= 0 || segment.bits > 8 || (segment.bits > 4 && segment.bits < 8) || segment.bits < 2) return false;
  for (int i = 0; i < 1 << segment.bits; i++) {
    const float level = levels[i] / unit;
    if (std::fabs(level) > LARGEST_LEVEL + (segment.bits == 8)) return false;
    if (std::fabs(level - std::nearbyint(level)) > 1e-3f) return false;
    if (segment.bits == 8 && std::fabs(level - levels[0] / unit - float(i)) > 1e-3f) return false;
  }
  return true;
}

}  // namespace KVS_NS

#if !defined(__AVX512VNNI__)
#include "dots256.h"
#else

namespace KVS_NS {

// A table of 16-bit levels for `vpermw`, which looks at five bits of an index: what lies above a code is ignored.
struct Levels16 {
  vi all;
  int origin;  // of 8-bit codes, whose level is code + origin

  void set(const float* levels, int bits, float unit) {
    int16_t copy[32];
    for (int i = 0; i < 32; i++) copy[i] = int16_t(std::lrint(levels[i % (1 << std::min(bits, 5))] / unit));
    all = _mm512_loadu_si512(copy);
    origin = int(std::lrint(levels[0] / unit));
  }
};

// Levels of the channel pair (C, C + 2) of W tokens, C % 4 < 2: one 16-bit lane each. `words` as in gather_words.
template <int BITS, int C>
inline vi pair_of(const Levels16& table, const int32_t* words, int lane) {
  auto field = [&](const int32_t* plane, auto size) {  // the 16-bit halves of a word hold bytes 0, 1 and 2, 3
    constexpr int SIZE = decltype(size)::value, at = C % (4 * SIZE);
    return _mm512_srli_epi16(loadi(plane + at / 4 * LANES + lane), 8 * (at % 4) + SIZE * (C / (4 * SIZE)));
  };
  if constexpr (BITS == 8) {
    const vi code = _mm512_and_si512(field(words, std::integral_constant<int, 8>()), _mm512_set1_epi16(255));
    return _mm512_add_epi16(code, _mm512_set1_epi16(int16_t(table.origin)));
  } else if constexpr (BITS == 3) {
    const vi low = field(words, std::integral_constant<int, 2>());
    const vi high = field(words + 2 * LANES, std::integral_constant<int, 1>());
    // bits 0 and 1 of low, bit 0 of high as bit 2; what lies above is ignored
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(_mm512_set1_epi16(3), low, _mm512_slli_epi16(high, 2), 0xca),
                                    table.all);
  } else {
    return _mm512_permutexvar_epi16(field(words, std::integral_constant<int, BITS>()), table.all);
  }
}

// Call use(pair number, first W tokens, next W tokens) for the 16 channel pairs of a unit.
template <int BITS, int P, class Use>
inline __attribute__((always_inline)) void each_pair(const Levels16& table, const int32_t* words, const Use& use) {
  if constexpr (P < UNIT / 2) {
    constexpr int C = P / 2 * 4 + P % 2;
    use(P, pair_of<BITS, C>(table, words, 0), pair_of<BITS, C>(table, words, W));
    each_pair<BITS, P + 1>(table, words, use);
  }
}

// sums[r][t] += scores of one unit; q[pair][r]: two 16-bit queries
template <int R, int BITS>
inline void score_unit16(const Levels16& table, const int32_t* words, const int32_t* q, int32_t* sums) {
  vi sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = loadi(sums + r * LANES), sum[r][1] = loadi(sums + r * LANES + W);
  each_pair<BITS, 0>(table, words, [&](int p, vi x, vi y) {
    for (int r = 0; r < R; r++) {
      const vi a = seti(q[p * GROUP + r]);
      sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], a, x);
      sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], a, y);
    }
  });
  for (int r = 0; r < R; r++) storei(sums + r * LANES, sum[r][0]), storei(sums + r * LANES + W, sum[r][1]);
}

// Levels of channels 0-15 and 16-31 of a unit for two tokens: a 32-bit lane is a channel, its halves are the tokens.
template <int BITS>
inline void token_pair(const Levels16& table, const uint8_t* a, const uint8_t* b, vi& first, vi& second) {
  if constexpr (BITS == 8) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)a), y = _mm256_loadu_si256((const __m256i*)b);
    auto both = [&](__m128i p, __m128i q) {
      const __m256i mixed = _mm256_set_m128i(_mm_unpackhi_epi8(p, q), _mm_unpacklo_epi8(p, q));
      return _mm512_add_epi16(_mm512_cvtepu8_epi16(mixed), _mm512_set1_epi16(int16_t(table.origin)));
    };
    first = both(_mm256_castsi256_si128(x), _mm256_castsi256_si128(y));
    second = both(_mm256_extracti128_si256(x, 1), _mm256_extracti128_si256(y, 1));
  } else if constexpr (BITS == 4) {
    const __m128i x = _mm_loadu_si128((const __m128i*)a), y = _mm_loadu_si128((const __m128i*)b);
    const vi mixed = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
    first = _mm512_permutexvar_epi16(mixed, table.all);
    second = _mm512_permutexvar_epi16(_mm512_srli_epi16(mixed, 4), table.all);
  } else {
    const __m128i crumbs = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)a), _mm_loadl_epi64((const __m128i*)b));
    const vi low = _mm512_broadcast_i64x4(_mm256_cvtepu8_epi16(crumbs));  // channels 0-7 twice
    const vi step = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    vi one = _mm512_srlv_epi16(low, step), two = _mm512_srlv_epi16(_mm512_srli_epi16(low, 4), step);
    if constexpr (BITS == 3) {
      int32_t p, q;
      std::memcpy(&p, a + 8, 4), std::memcpy(&q, b + 8, 4);
      const __m128i bits = _mm_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(p), _mm_cvtsi32_si128(q)));
      const vi high = _mm512_slli_epi16(_mm512_broadcast_i64x2(bits), 2);  // channels 0-3 four times, the bit at place 2
      const vi turn = _mm512_set_epi64(0x0003000300030003, 0x0003000300030003, 0x0002000200020002, 0x0002000200020002,
                                       0x0001000100010001, 0x0001000100010001, 0, 0);
      const vi mask = _mm512_set1_epi16(3);
      one = _mm512_ternarylogic_epi32(mask, one, _mm512_srlv_epi16(high, turn), 0xca);
      two = _mm512_ternarylogic_epi32(mask, two, _mm512_srlv_epi16(_mm512_srli_epi16(high, 4), turn), 0xca);
    }
    first = _mm512_permutexvar_epi16(one, table.all);
    second = _mm512_permutexvar_epi16(two, table.all);
  }
}

// out[r][0 .. 31] += factor[r] * sum_t weights[r][t] * level of one unit; weights of tokens past `count` are 0
template <int R, int BITS>
inline void sum_unit16(const Levels16& table, const uint8_t* unit, int64_t stride, int count, const int16_t* weights,
                       const float* factor, float* out, int out_stride) {
  vi sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = seti(0);
  for (int t = 0; t < count; t += 2, unit += 2 * stride) {
    vi x, y;
    token_pair<BITS>(table, unit, t + 1 < count ? unit + stride : unit, x, y);
    for (int r = 0; r < R; r++) {
      int32_t both;
      std::memcpy(&both, weights + r * TILE + t, 4);
      const vi a = seti(both);
      sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], a, x);
      sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], a, y);
    }
  }
  for (int r = 0; r < R; r++) {
    float* o = out + r * out_stride;
    store(o, fma(to_float(sum[r][0]), set1(factor[r]), load(o)));
    store(o + W, fma(to_float(sum[r][1]), set1(factor[r]), load(o + W)));
  }
}

// Weights times `scale`, rounded to integers.
inline void weights16(const float* weights, const float* scale, float factor, int count, int16_t* out) {
  for (int t = 0; t < count; t += W)
    _mm256_storeu_si256((__m256i*)(out + t),
                        _mm512_cvtepi32_epi16(to_int(load(weights + t) * load(scale + t) * set1(factor))));
}

// Round `count` values, a multiple of W, to 15 bits of the largest magnitude; returns what one step is worth.
inline float to_16_bits(const float* x, int count, int16_t* out) {
  vf largest = set1(0);
  for (int i = 0; i < count; i += W) largest = vmax(largest, _mm512_abs_ps(load(x + i)));
  const float top = hmax(largest);
  const vf scale = set1(top > 0 ? TOP16 / top : 0.0f);
  for (int i = 0; i < count; i += W)
    _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtepi32_epi16(to_int(load(x + i) * scale)));
  return top / TOP16;
}

}  // namespace KVS_NS

#endif
#else
#define KVS_INTEGER 0
#endif
