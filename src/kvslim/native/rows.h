// Packed rows to floats: the layouts of kvslim/layout.py under the byte order of kvslim/bitpack.py.
//
// Equals kvslim.codecs.decode.decode. Codes of up to 4 bits are looked up in registers; wider ones are converted where the
// table is uniform or that of an 8-bit float, and gathered otherwise. Widths that are no multiple of 32 channels take the
// plain loop.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kvslim.h"
#include "simd.h"

namespace KVS_NS {

constexpr int UNIT = 32;    // channels per packing unit of the vector paths
constexpr int TILE = 128;   // tokens per step of the softmax
constexpr int GROUP = W > 4 ? 8 : 4;  // rows that go through a tile together, sums in registers
constexpr int LANES = 2 * W;  // tokens per step of the scores
constexpr int MAX_DIM = 1024;

inline int unit_of(int width) { return width % 32 == 0 ? 32 : width % 16 == 0 ? 16 : 8; }
inline int packed_width(int width, int bits) {
  int unit = unit_of(width);
  return (width + unit - 1) / unit * unit * bits / 8;
}

inline float scale_at(const uint8_t* p, int dtype, int64_t i) {
  switch (dtype) {
    case KVS_FP16:
      return half_to_float(((const uint16_t*)p)[i]);
    case KVS_BF16:
      return bfloat_to_float(((const uint16_t*)p)[i]);
    case KVS_FP32:
      return ((const float*)p)[i];
    case KVS_E8M0: {
      uint32_t e = p[i], bits = e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : e << 23;
      float out;
      std::memcpy(&out, &bits, 4);
      return out;
    }
    default: {  // KVS_E4M3
      int byte = p[i], exponent = byte >> 3 & 15, mantissa = byte & 7;
      float size = exponent ? std::ldexp(8.0f + float(mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
      if ((byte & 0x7f) == 0x7f) size = NAN;
      return byte & 0x80 ? -size : size;
    }
  }
}

// One block of one kv head: the address of each part, null where the side does not have it.
struct Block {
  const uint8_t *code, *token, *zero, *channel, *offset, *scale;
};

// A table of one segment, ready for `look` and `gather`.
struct Lookup {
  Table16 small;
  const float* table;
  float origin;
  bool uniform;
  int float8_shift;  // 8-bit floats: how far a byte is shifted to be an fp16; 0 where the table is something else
  float float8_unit;
  alignas(64) float copy[16];

  void set(const float* levels, int bits) {
    table = levels;
    int count = 1 << bits;
    if (bits <= 4) {
      for (int i = 0; i < 16; i++) copy[i] = levels[i % count];  // so that bits above the code's own do not matter
      small = table16(copy);
    }
    origin = levels[0];
    uniform = true;
    for (int i = 1; i < count && uniform; i++) uniform = levels[i] == origin + float(i);
    float8_shift = 0;
    for (int shift : {7, 8})  // E4M3, E5M2
      if (bits == 8 && !uniform && !float8_shift && is_float8(levels, shift)) float8_shift = shift;
  }

 private:
  static uint16_t half_of(int code, int shift) { return uint16_t((code & 0x80) << 8 | (code & 0x7f) << shift); }

  // NaN and infinities, which are never stored, read 0 in the table.
  bool is_float8(const float* levels, int shift) {
    float8_unit = levels[1] / half_to_float(half_of(1, shift));
    for (int i = 0; i < 256; i++)
      if (levels[i] != 0 && levels[i] != half_to_float(half_of(i, shift)) * float8_unit) return false;
    return true;
  }
};

// Table values of 8-bit codes.
inline vf wide_values(const Lookup& lookup, vi codes) {
  if (lookup.uniform) return to_float(codes) + set1(lookup.origin);
#if defined(__AVX512F__)
  if (lookup.float8_shift) {
    const vi sign = sll<8>(andi(codes, seti(0x80)));
    const vi half = ori(sign, _mm512_sllv_epi32(andi(codes, seti(0x7f)), seti(lookup.float8_shift)));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)) * set1(lookup.float8_unit);
  }
#endif
  return gather(lookup.table, codes);
}

// Codes of channels C0 .. C0 + W - 1 of a unit. Bits above the code's own are left in where `look` ignores them.
template <int BITS, int C0>
inline vi codes_at(const uint8_t* unit) {
  if constexpr (BITS == 1) return plane1<C0>(unit);
  if constexpr (BITS == 2) return plane2<C0>(unit);
  if constexpr (BITS == 3)
    return ori(andi(plane2<C0>(unit), seti(3)), sll<2>(andi(plane1<C0>(unit + 8), seti(1))));
  if constexpr (BITS == 8) return bytes(unit + C0);
  if constexpr (BITS >= 4 && BITS < 8) {
    vi low = srl<4 * (C0 / 16)>(bytes(unit + C0 % 16));
    if constexpr (BITS == 4) return low;
    low = andi(low, seti(15));
    if constexpr (BITS == 5) return ori(low, sll<4>(andi(plane1<C0>(unit + 16), seti(1))));
    low = ori(low, sll<4>(andi(plane2<C0>(unit + 16), seti(3))));
    if constexpr (BITS == 6) return low;
    return ori(low, sll<6>(andi(plane1<C0>(unit + 24), seti(1))));
  }
}

// Table values of codes_at.
template <int BITS, int C0>
inline vf values_at(const Lookup& lookup, const uint8_t* unit) {
  vi codes = codes_at<BITS, C0>(unit);
  if constexpr (BITS <= 4)
    return look(lookup.small, codes);
  else
    return wide_values(lookup, codes);
}

// One segment of one token, table values only, unit by unit.
template <int BITS>
inline void unpack_row(const Lookup& lookup, const uint8_t* code, int width, float* out) {
  for (int u = 0; u < width; u += UNIT, code += 4 * BITS, out += UNIT) {
    store(out, values_at<BITS, 0>(lookup, code));
    store(out + W, values_at<BITS, W>(lookup, code));
    if constexpr (W < 16) {
      store(out + 2 * W, values_at<BITS, 2 * W>(lookup, code));
      store(out + 3 * W, values_at<BITS, 3 * W>(lookup, code));
    }
    if constexpr (W < 8) {
      store(out + 4 * W, values_at<BITS, 4 * W>(lookup, code));
      store(out + 5 * W, values_at<BITS, 5 * W>(lookup, code));
      store(out + 6 * W, values_at<BITS, 6 * W>(lookup, code));
      store(out + 7 * W, values_at<BITS, 7 * W>(lookup, code));
    }
  }
}

// The same for any width, one channel at a time.
inline void unpack_row_plain(const float* table, const uint8_t* code, int width, int bits, float* out) {
  int unit = unit_of(width);
  for (int u = 0; u < width; u += unit, code += unit * bits / 8) {
    for (int c = 0; c < unit && u + c < width; c++) {
      const uint8_t* plane = code;
      int value = 0, low = 0;
      for (int size : {8, 4, 2, 1}) {  // PLANES of bitpack.py: a width's binary digits
        if (!(bits & size)) continue;
        int count = unit * size / 8;
        value |= (plane[c % count] >> (size * (c / count)) & ((1 << size) - 1)) << low;
        plane += count;
        low += size;
      }
      out[u + c] = table[value];
    }
  }
}

inline void unpack_segment(const Lookup& lookup, const uint8_t* code, int width, int bits, float* out) {
  if (width % UNIT) return unpack_row_plain(lookup.table, code, width, bits, out);
  switch (bits) {
    case 1:
      return unpack_row<1>(lookup, code, width, out);
    case 2:
      return unpack_row<2>(lookup, code, width, out);
    case 3:
      return unpack_row<3>(lookup, code, width, out);
    case 4:
      return unpack_row<4>(lookup, code, width, out);
    case 5:
      return unpack_row<5>(lookup, code, width, out);
    case 6:
      return unpack_row<6>(lookup, code, width, out);
    case 7:
      return unpack_row<7>(lookup, code, width, out);
    default:
      return unpack_row<8>(lookup, code, width, out);
  }
}

// `count` floats of any 16- or 32-bit type.
inline void convert(const void* from, int dtype, int64_t at, int count, float* out) {
  int i = 0;
  if (dtype == KVS_FP32) {
    std::memcpy(out, (const float*)from + at, sizeof(float) * size_t(count));
  } else if (dtype == KVS_FP16) {
    const uint16_t* p = (const uint16_t*)from + at;
    for (; i + W <= count; i += W) store(out + i, halfs(p + i));
    for (; i < count; i++) out[i] = half_to_float(p[i]);
  } else {
    const uint16_t* p = (const uint16_t*)from + at;
    for (; i + W <= count; i += W) store(out + i, bfloats(p + i));
    for (; i < count; i++) out[i] = bfloat_to_float(p[i]);
  }
}

// Tokens first .. first + count - 1 of a block, every part applied; row t at out + t * stride.
inline void decode_rows(const kvs_side& side, const Lookup* lookup, const Block& block, int first, int count,
                        int stride, float* out) {
  const int width = side.width;
  if (side.segment[0].bits >= 16) {
    for (int t = 0; t < count; t++)
      convert(block.code, side.code.dtype, int64_t(first + t) * width, width, out + t * stride);
    return;
  }
  float channel[MAX_DIM], offset[MAX_DIM];
  const float scale = block.scale ? scale_at(block.scale, side.scale.dtype, 0) : 1.0f;
  if (block.channel) convert(block.channel, side.channel.dtype, 0, width, channel);
  if (block.offset) convert(block.offset, side.offset.dtype, 0, width, offset);
  int row_bytes = 0;
  for (int s = 0; s < side.segments; s++) row_bytes += packed_width(side.segment[s].width, side.segment[s].bits);
  for (int t = 0; t < count; t++) {
    const uint8_t* code = block.code + int64_t(first + t) * row_bytes;
    float* row = out + t * stride;
    int at = 0, group = 0;
    for (int s = 0; s < side.segments; s++) {
      const kvs_segment& segment = side.segment[s];
      unpack_segment(lookup[s], code, segment.width, segment.bits, row + at);
      code += packed_width(segment.width, segment.bits);
      if (segment.group) {
        for (int c = 0; c < segment.width; c += segment.group, group++) {
          const int64_t index = int64_t(first + t) * side.token.count + group;
          const float token = scale_at(block.token, side.token.dtype, index);
          const float zero = block.zero ? scale_at(block.zero, side.zero.dtype, index) : 0.0f;
          float* x = row + at + c;
          for (int i = 0; i < segment.group; i++) x[i] = x[i] * token + zero;
        }
      }
      at += segment.width;
    }
    if (block.scale)
      for (int c = 0; c < width; c++) row[c] *= scale;
    if (block.channel)
      for (int c = 0; c < width; c++) row[c] *= channel[c];
    if (block.offset)
      for (int c = 0; c < width; c++) row[c] += offset[c];
  }
}

}  // namespace KVS_NS
