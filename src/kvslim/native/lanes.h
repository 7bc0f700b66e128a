// Moving values between tokens-in-rows and tokens-in-lanes.
#pragma once
#include "simd.h"

namespace KVS_NS {

// out[c][i] = in[i][c] for 4 x 4 floats, or any other 32-bit values: nothing is computed.
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

}  // namespace KVS_NS
