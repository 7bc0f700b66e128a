// Vectors of W floats for three instruction sets, chosen by the compiler's flags. No product is ever fused with a sum
// unless it says fma: encoders must round as the reference does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace KVS_NS {

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + 0x38000000);
  } else {  // subnormal: an exact multiple of 2^-24
    float value = float(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest, ties to even; what is past the largest finite value becomes infinity.
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (rest < 0x38800000) {  // below 2^-14: counted in steps of 2^-24
    float size;
    std::memcpy(&size, &rest, 4);
    return uint16_t(sign | uint32_t(std::nearbyintf(size * 16777216.0f)));
  }
  uint32_t even = rest >> 13 & 1;
  return uint16_t(sign | ((rest + 0xfff + even - 0x38000000) >> 13));
}

inline float bfloat_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int W = 16;
typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;
struct Table16 {
  vf all;
};
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vi seti(int x) { return _mm512_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vsqrt(vf a) { return _mm512_sqrt_ps(a); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int N>
inline vi srl(vi x) {
  return _mm512_srli_epi32(x, N);
}
inline vi srlv(vi x, vi n) { return _mm512_srlv_epi32(x, n); }
inline vi sllv(vi x, vi n) { return _mm512_sllv_epi32(x, n); }
inline vi loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void storei(int32_t* p, vi x) { _mm512_storeu_si512(p, x); }
inline void store_bytes(uint8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
inline vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
inline vi to_int(vf x) { return _mm512_cvtps_epi32(x); }
inline Table16 table16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline vf look(const Table16& t, vi x) { return _mm512_permutexvar_ps(x, t.all); }  // the low four bits of x
inline vf gather(const float* p, vi x) { return _mm512_i32gather_ps(x, p, 4); }
inline vf halfs(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf bfloats(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_halfs(uint16_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline vm greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline vf pick(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
inline vi picki(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }
inline vi add_where(vm m, vi x, int n) { return _mm512_mask_add_epi32(x, m, x, _mm512_set1_epi32(n)); }
inline float hmax(vf x) { return _mm512_reduce_max_ps(x); }
inline float hsum(vf x) { return _mm512_reduce_add_ps(x); }
inline vf scale2(vf y, vi n) { return _mm512_scalef_ps(y, _mm512_cvtepi32_ps(n)); }
// Bit planes of one or two bits: bytes repeat every 8 (or 4) channels.
template <int C0>
inline vi plane2(const uint8_t* p) {
  int64_t w;
  std::memcpy(&w, p, 8);
  const int a = 2 * (C0 / 8), b = a + 2;
  return srlv(_mm512_cvtepu8_epi32(_mm_set1_epi64x(w)), _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b));
}
template <int C0>
inline vi plane1(const uint8_t* p) {
  int32_t w;
  std::memcpy(&w, p, 4);
  const int a = C0 / 4;
  return srlv(seti(w), _mm512_setr_epi32(a, a + 8, a + 16, a + 24, a + 1, a + 9, a + 17, a + 25, a + 2, a + 10, a + 18,
                                         a + 26, a + 3, a + 11, a + 19, a + 27));
}
inline vi andi(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi ori(vi a, vi b) { return _mm512_or_si512(a, b); }
template <int N>
inline vi sll(vi x) {
  return _mm512_slli_epi32(x, N);
}

#elif defined(__AVX2__)

constexpr int W = 8;
typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;
struct Table16 {
  vf low, high;
};
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vi seti(int x) { return _mm256_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vsqrt(vf a) { return _mm256_sqrt_ps(a); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
template <int N>
inline vi srl(vi x) {
  return _mm256_srli_epi32(x, N);
}
inline vi srlv(vi x, vi n) { return _mm256_srlv_epi32(x, n); }
inline vi sllv(vi x, vi n) { return _mm256_sllv_epi32(x, n); }
inline vi loadi(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void storei(int32_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
inline void store_bytes(uint8_t* p, vi x) {
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}
inline vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
inline vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
inline Table16 table16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline vf look(const Table16& t, vi x) {  // the low four bits of x
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, x), _mm256_permutevar8x32_ps(t.high, x),
                          _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}
inline vf gather(const float* p, vi x) { return _mm256_i32gather_ps(p, x, 4); }
inline vf halfs(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf bfloats(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store_halfs(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline vm greater(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline vf pick(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
inline vi picki(vm m, vi yes, vi no) { return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m)); }
inline vi add_where(vm m, vi x, int n) {
  return _mm256_add_epi32(x, _mm256_and_si256(_mm256_castps_si256(m), _mm256_set1_epi32(n)));
}
inline float hmax(vf v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
inline float hsum(vf v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
inline vf scale2(vf y, vi n) {
  return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)));
}
template <int C0>
inline vi plane2(const uint8_t* p) {
  return srl<2 * (C0 / 8)>(bytes(p));
}
template <int C0>
inline vi plane1(const uint8_t* p) {
  int32_t w;
  std::memcpy(&w, p, 4);
  const int a = C0 / 4;
  return srlv(seti(w), _mm256_setr_epi32(a, a + 8, a + 16, a + 24, a + 1, a + 9, a + 17, a + 25));
}
inline vi andi(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi ori(vi a, vi b) { return _mm256_or_si256(a, b); }
template <int N>
inline vi sll(vi x) {
  return _mm256_slli_epi32(x, N);
}

#else  // any compiler with vector extensions: SSE2, NEON, RISC-V ...

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef vi vm;
struct Table16 {
  const float* p;
};
inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, 16);
  return x;
}
inline void store(float* p, vf x) { std::memcpy(p, &x, 16); }
inline vf set1(float x) { return vf{x, x, x, x}; }
inline vi seti(int x) { return vi{x, x, x, x}; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }  // attention only, where rounding twice is as good
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vsqrt(vf a) { return vf{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
inline vf vround(vf a) {
  return vf{std::nearbyintf(a[0]), std::nearbyintf(a[1]), std::nearbyintf(a[2]), std::nearbyintf(a[3])};
}
inline vi bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
template <int N>
inline vi srl(vi x) {
  return x >> N;  // codes are never negative
}
inline vi srlv(vi x, vi n) { return x >> n; }
inline vi sllv(vi x, vi n) { return x << n; }
inline vi loadi(const int32_t* p) {
  vi x;
  std::memcpy(&x, p, 16);
  return x;
}
inline void storei(int32_t* p, vi x) { std::memcpy(p, &x, 16); }
inline void store_bytes(uint8_t* p, vi x) {
  for (int i = 0; i < 4; i++) p[i] = uint8_t(x[i]);
}
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vi to_int(vf x) { return __builtin_convertvector(vround(x), vi); }
inline Table16 table16(const float* p) { return {p}; }
inline vf look(const Table16& t, vi x) { return vf{t.p[x[0] & 15], t.p[x[1] & 15], t.p[x[2] & 15], t.p[x[3] & 15]}; }
inline vf gather(const float* p, vi x) { return vf{p[x[0]], p[x[1]], p[x[2]], p[x[3]]}; }
inline vf halfs(const uint16_t* p) {
  return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
inline vf bfloats(const uint16_t* p) {
  return vf{bfloat_to_float(p[0]), bfloat_to_float(p[1]), bfloat_to_float(p[2]), bfloat_to_float(p[3])};
}
inline void store_halfs(uint16_t* p, vf x) {
  for (int i = 0; i < 4; i++) p[i] = float_to_half(x[i]);
}
inline vm greater(vf a, vf b) { return a > b; }
inline vf pick(vm m, vf yes, vf no) { return m ? yes : no; }
inline vi picki(vm m, vi yes, vi no) { return m ? yes : no; }
inline vi add_where(vm m, vi x, int n) { return x + (m & n); }
inline float hmax(vf x) { return std::fmax(std::fmax(x[0], x[1]), std::fmax(x[2], x[3])); }
inline float hsum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline vf scale2(vf y, vi n) {
  vi bits = (n + 127) << 23;
  vf power;
  std::memcpy(&power, &bits, 16);
  return y * power;
}
template <int C0>
inline vi plane2(const uint8_t* p) {
  return srl<2 * (C0 / 8)>(bytes(p + C0 % 8));
}
template <int C0>
inline vi plane1(const uint8_t* p) {
  return srl<C0 / 4>(bytes(p));
}
inline vi andi(vi a, vi b) { return a & b; }
inline vi ori(vi a, vi b) { return a | b; }
template <int N>
inline vi sll(vi x) {
  return x << N;
}

#endif

// exp(x) for x <= 0, to 2e-7; 0 below -87.
inline vf vexp(vf x) {
  const vf floor = set1(-87.0f);
  vm tiny = greater(floor, x);
  x = vmax(x, floor);
  vf n = vround(x * set1(1.44269504f));
  vf r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  vf y = fma(p, r * r, r) + set1(1.0f);
  return pick(tiny, set1(0.0f), scale2(y, to_int(n)));
}

// tanh(x) by exp(-2|x|), to 2e-7 absolute.
inline vf vtanh(vf x) {
  vm negative = greater(set1(0.0f), x);
  vf e = vexp(set1(-2.0f) * pick(negative, set1(0.0f) - x, x));
  vf y = (set1(1.0f) - e) / (set1(1.0f) + e);
  return pick(negative, set1(0.0f) - y, y);
}

}  // namespace KVS_NS
