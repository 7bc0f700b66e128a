// The `table` codec with one scale per token, transforms included; equals kvslim.codecs.table.TableCodec.encode bit for
// bit: every value goes through the same roundings in the same order (sums by folding in half, no fused products).
//
// Tokens lie in the lanes of a vector, channels below each other, so that nothing is ever added across lanes.
#pragma once
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "rows.h"

namespace KVS_NS {

constexpr float TINY = 5.9604644775390625e-8f;  // 2^-24, as scales.py
constexpr float LARGEST = 65504.0f;

inline vf abs_of(vf x) { return vmax(x, set1(0) - x); }
inline vf to_half_and_back(vf x) {
  uint16_t h[W];
  store_halfs(h, vmin(vmax(x, set1(-LARGEST)), set1(LARGEST)));
  return halfs(h);
}

// scales.total: sum of `count` entries by folding in half, zero-padded to a power of two. Destroys them.
inline vf total(vf* x, int count) {
  int size = 1;
  while (size < count) size *= 2;
  while (size > 1) {
    size /= 2;
    for (int i = size; i < count; i++) x[i - size] = x[i - size] + x[i];
    count = std::min(count, size);
  }
  return x[0];
}

// Levels of one table, and the search for the nearest.
struct Levels {
  const float* edges;
  Lookup values;
  Table16 shifted[4];
  alignas(64) float copies[4][16];

  Levels(const float* table, int bits) : edges(table + (1 << bits)) {
    values.set(table, bits);
    if (bits > 4) return;
    const int count = (1 << bits) - 1;
    for (int s = 0; s < 4; s++) {
      for (int i = 0; i < 16; i++) copies[s][i] = edges[std::min(i + (1 << s) - 1, count - 1)];
      shifted[s] = table16(copies[s]);
    }
  }

  // How many edges lie below x: ties go to the lower level (codecs.base.nearest).
  template <int BITS>
  vi nearest(vf x) const {
    vi code = seti(0);
    for (int s = BITS - 1; s >= 0; s--)
      code = add_where(greater(x, BITS <= 4 ? look(shifted[s & 3], code) : gather(edges + (1 << s) - 1, code)), code, 1 << s);
    return code;
  }
  template <int BITS>
  vf level(vi code) const {
    return BITS <= 4 ? look(values.small, code) : gather(values.table, code);
  }
};

class Encoder {
 public:
  Encoder(const kvs_encode& call) : call(call), dim(call.head_dim), levels(call.table, call.bits) {
    lanes = (call.tokens + W - 1) / W * W;
    all.resize(size_t(dim) * lanes);
    fold.resize(dim), z.resize(dim), carried.resize(dim), whole.resize(dim), error.resize(dim);
    codes.resize(size_t(dim) * W), best.resize(size_t(dim) * W);
  }

  void block(int index, int head) {
    load_block(index, head);
    for (int s = 0; s < call.step_count; s++) forward(call.steps[s], index, head);
    if (call.mean) take_mean(index, head);
    for (int t = 0; t < call.tokens; t += W) switch (call.bits) {
        case 1: group<1>(index, head, t); break;
        case 2: group<2>(index, head, t); break;
        case 3: group<3>(index, head, t); break;
        case 4: group<4>(index, head, t); break;
        case 5: group<5>(index, head, t); break;
        case 6: group<6>(index, head, t); break;
        case 7: group<7>(index, head, t); break;
        default: group<8>(index, head, t); break;
      }
  }

 private:
  const kvs_encode& call;
  const int dim;
  int lanes;
  Levels levels;
  std::vector<float> all;  // [group of W tokens][channel][token]
  std::vector<vf> fold, z, carried, whole, error;
  std::vector<uint8_t> codes, best;  // [channel][lane]

  // Values of channel c for the W tokens from t on: a group of tokens lies together, so that it stays in the first cache.
  float* at(int c, int t) { return &all[(size_t(t / W) * dim + c) * W]; }

  void load_block(int index, int head) {
    std::vector<float> rows(size_t(dim) * W);
    for (int t = 0; t < lanes; t += W) {
      for (int i = 0; i < W; i++) {
        // lanes past the last token repeat it: the same work, never stored
        const int64_t token = std::min(t + i, call.tokens - 1);
        convert(call.x, call.x_dtype, index * call.x_block + head * call.x_head + token * call.x_token, dim, &rows[size_t(i) * dim]);
      }
      int c = 0;
      for (; c + 4 <= dim; c += 4)
        for (int i = 0; i < W; i += 4) transpose4(&rows[size_t(i) * dim + c], dim, at(c, t) + i, W);
      for (; c < dim; c++)
        for (int i = 0; i < W; i++) at(c, t)[i] = rows[size_t(i) * dim + c];
    }
  }

  void forward(const kvs_step& step, int index, int head) {
    const float* data = (const float*)step.data + (step.data ? head * step.stride : 0);
    switch (step.kind) {
      case KVS_WEIGHT:
        for (int c = 0; c < dim; c++)
          for (int t = 0; t < lanes; t += W) store(at(c, t), load(at(c, t)) * set1(data[c]));
        break;
      case KVS_MEAN:
      case KVS_PAGE: {
        const float* mean = step.kind == KVS_MEAN ? data : call.page + (int64_t(index) * call.kv_heads + head) * dim;
        for (int c = 0; c < dim; c++)
          for (int t = 0; t < lanes; t += W) store(at(c, t), load(at(c, t)) - set1(mean[c]));
        break;
      }
      case KVS_PERMUTE: {
        const std::vector<float> copy(all);
        const int64_t* order = (const int64_t*)step.data + head * step.stride;
        for (int t = 0; t < lanes; t += W)
          for (int c = 0; c < dim; c++) std::copy_n(&copy[(size_t(t / W) * dim + order[c]) * W], W, at(c, t));
        break;
      }
      default: {  // KVS_HADAMARD, in the order of transforms.rotate.butterfly
        const vf norm = set1(float(std::pow(double(step.size), -0.5)));
        for (int t = 0; t < lanes; t += W) butterfly(at(step.first, t), step.width, step.size, norm);
      }
    }
  }

  // Runs of `size` channels, two levels in one visit; the order of additions is that of one level after the other.
  static void butterfly(float* x, int width, int size, vf norm) {
    auto v = [x](int c) { return load(x + c * W); };
    auto put = [x](int c, vf y) { store(x + c * W, y); };
    int half = 1;
    for (; 4 * half <= size; half *= 4)
      for (int i = 0; i < width; i += 4 * half)
        for (int c = i; c < i + half; c++) {
          const vf a = v(c), b = v(c + half), d = v(c + 2 * half), e = v(c + 3 * half);
          const vf ab = a + b, a_b = a - b, de = d + e, d_e = d - e;
          put(c, ab + de), put(c + half, a_b + d_e), put(c + 2 * half, ab - de), put(c + 3 * half, a_b - d_e);
        }
    for (; half < size; half *= 2)
      for (int i = 0; i < width; i += 2 * half)
        for (int c = i; c < i + half; c++) {
          const vf low = v(c), high = v(c + half);
          put(c, low + high), put(c + half, low - high);
        }
    for (int c = 0; c < width; c++) put(c, v(c) * norm);
  }

  void take_mean(int index, int head) {
    uint16_t* out = call.offset + index * call.offset_block + head * call.offset_head;
    std::vector<float> sum(size_t(lanes), 0.0f);
    for (int c = 0; c < dim; c++) {
      for (int t = 0; t < lanes; t += W) std::copy_n(at(c, t), W, &sum[size_t(t)]);
      int count = call.tokens, size = 1;
      while (size < count) size *= 2;
      while (size > 1) {
        size /= 2;
        float *low = sum.data(), *high = low + size;
        for (int i = 0; i < count - size; i++) low[i] += high[i];
        count = std::min(count, size);
      }
      const float mean = std::min(std::max(sum[0] / float(call.tokens), -LARGEST), LARGEST);
      out[c] = float_to_half(mean);
      const vf stored = set1(half_to_float(out[c]));
      for (int t = 0; t < lanes; t += W) store(at(c, t), load(at(c, t)) - stored);
    }
  }

  // scales.total of f(0) .. f(dim - 1)
  template <class F>
  vf total_of(const F& f) {
    const int quarter = dim / 4;
    if (dim & (dim - 1)) {
      for (int c = 0; c < dim; c++) fold[c] = f(c);
      return total(fold.data(), dim);
    }
    for (int c = 0; c < quarter; c++)  // the first two folds at once
      fold[c] = (f(c) + f(c + 2 * quarter)) + (f(c + quarter) + f(c + 3 * quarter));
    return total(fold.data(), quarter);
  }

  vf ratio_of(int fit, const vf* x, const vf* y) {
    if (fit == 0) return set1(1);
    const vf above = fit == 1 ? total_of([=](int c) { return x[c] * y[c]; }) : total_of([=](int c) { return x[c] * x[c]; });
    const vf below = fit == 3 ? total_of([=](int c) { return x[c] * y[c]; }) : total_of([=](int c) { return y[c] * y[c]; });
    const vf ratio = above / vmax(below, set1(TINY));
    return fit == 2 ? vsqrt(ratio) : ratio;
  }

  // Multiple of r whose codes err least under a least-squares scale (scales.best_multiple).
  template <int BITS>
  vf best_multiple() {
    const int n = call.multiple_count;
    vf chosen = set1(1), most = set1(0);
    vf* const y = error.data();  // free until codes are carried
    for (int m = 0; m < n; m++) {
      const vf inverse = set1(call.multiples[n + m]);
      for (int c = 0; c < dim; c++) y[c] = levels.level<BITS>(levels.nearest<BITS>(z[c] * inverse));
      const vf above = total_of([&](int c) { return z[c] * y[c]; });
      const vf gain = above * above / vmax(total_of([&](int c) { return y[c] * y[c]; }), set1(TINY));
      chosen = pick(greater(gain, most), set1(call.multiples[m]), chosen);
      most = vmax(gain, most);
    }
    return chosen;
  }

  // Carry errors through x in place, channel by channel; with CODE, after coding each (codecs.feedback).
  template <int BITS, bool CODE>
  void carry(vf* x, int head) {
    const float* step = call.factor + int64_t(head) * dim * dim;
    constexpr int RUN = 8;  // channels whose errors go into a later one in one visit, in their order
    for (int j0 = 0; j0 < dim; j0 += RUN) {
      const int j1 = std::min(dim, j0 + RUN);
      for (int j = j0; j < j1; j++) {
        if constexpr (CODE) {
          const vi code = levels.nearest<BITS>(x[j]);
          store_bytes(&codes[size_t(j) * W], code);
          x[j] = x[j] - levels.level<BITS>(code);
        }
        for (int i = j + 1; i < j1; i++) x[i] = x[i] - set1(step[j * dim + i]) * x[j];
      }
      if (j1 - j0 < RUN) break;
      vf e[RUN];
      for (int k = 0; k < RUN; k++) e[k] = x[j0 + k];
      const float* s = step + int64_t(j0) * dim;
      for (int i = j1; i < dim; i++) {
        vf y = x[i];
        for (int k = 0; k < RUN; k++) y = y - set1(s[k * dim + i]) * e[k];
        x[i] = y;
      }
    }
    const float* diagonal = call.diagonal + int64_t(head) * dim;
    for (int j = 0; j < dim; j++) x[j] = x[j] / set1(diagonal[j]);
  }

  template <int BITS>
  vf code_carried(vf multiple, int head) {
    std::copy(z.begin(), z.end(), whole.begin());
    carry<BITS, false>(whole.data(), head);
    vf ratio = set1(0), least = set1(0);
    for (int n = 0; n <= call.nearby_count; n++) {
      const vf m = n ? multiple * set1(call.multiples[2 * call.multiple_count + n - 1]) : multiple;
      for (int c = 0; c < dim; c++) carried[c] = z[c] / m;
      carry<BITS, true>(carried.data(), head);
      for (int c = 0; c < dim; c++) {
        const vf own = whole[c] / m;
        error[c] = own;
        carried[c] = own - carried[c];
      }
      const vf fitted = ratio_of(call.fit, error.data(), carried.data());
      const vf loss = total_of([&](int c) {
        const vf left = m * (error[c] - fitted * carried[c]);
        return left * left;
      });
      const vf scale = m * fitted;
      if (n == 0) {
        ratio = scale, least = loss;
        best.swap(codes);
        continue;
      }
      const vm better = greater(least, loss);
      ratio = pick(better, scale, ratio);
      least = vmin(loss, least);
      for (int c = 0; c < dim; c++) {
        uint8_t* kept = &best[size_t(c) * W];
        alignas(64) int32_t now[W], old[W];
        for (int i = 0; i < W; i++) now[i] = codes[size_t(c) * W + i], old[i] = kept[i];
        store_bytes(kept, picki(better, loadi(now), loadi(old)));
      }
    }
    return ratio;
  }

  // W tokens from t on.
  template <int BITS>
  void group(int index, int head, int t) {
    for (int c = 0; c < dim; c++) z[c] = load(at(c, t));
    vf size;
    if (call.by_range) {
      size = set1(0);
      for (int c = 0; c < dim; c++) size = vmax(size, abs_of(z[c]));
    } else {
      size = vsqrt(total_of([&](int c) { return z[c] * z[c]; }) / set1(float(dim)));
    }
    const vf r = to_half_and_back(size), divisor = vmax(r, set1(TINY));
    for (int c = 0; c < dim; c++) z[c] = z[c] / divisor;
    const vf multiple = call.search ? best_multiple<BITS>() : set1(1);
    vf ratio;
    if (call.factor) {
      ratio = code_carried<BITS>(multiple, head);
    } else {
      for (int c = 0; c < dim; c++) {
        const vi code = levels.nearest<BITS>(z[c] / multiple);
        store_bytes(&best[size_t(c) * W], code);
        carried[c] = levels.level<BITS>(code);
      }
      ratio = ratio_of(call.fit, z.data(), carried.data());
    }
    uint16_t token[W];
    store_halfs(token, vmin(vmax(r * ratio, set1(-LARGEST)), set1(LARGEST)));
    const int count = std::min(W, call.tokens - t);
    uint16_t* scales = call.token + index * call.token_block + head * call.token_head + t;
    std::copy_n(token, count, scales);
    uint8_t* out = call.code + index * call.code_block + head * call.code_head + int64_t(t) * packed_width(dim, BITS);
    pack<BITS>(count, out);
  }

  // bitpack.pack of `best`.
  template <int BITS>
  void pack(int count, uint8_t* out) {
    const int row = packed_width(dim, BITS);
    if (dim % UNIT == 0) {
      for (int u = 0; u < dim / UNIT; u++) {
        // words of a unit, W tokens side by side, then a token at a time
        alignas(64) int32_t words[8][W], rows[W][8];
        pack_unit<BITS>(&best[size_t(u) * UNIT * W], words);
        for (int w = 0; w < BITS; w += 4)
          for (int i = 0; i < W; i += 4) transpose4((const float*)&words[w][i], W, (float*)&rows[i][w], 8);
        for (int i = 0; i < count; i++) std::memcpy(out + int64_t(i) * row + u * BITS * 4, rows[i], BITS * 4);
      }
      return;
    }
    const int unit = unit_of(dim);
    for (int i = 0; i < count; i++) std::memset(out + int64_t(i) * row, 0, size_t(row));
    for (int u = 0, start = 0; u < dim; u += unit, start += unit * BITS / 8) {
      int low = 0, plane = start;
      for (int size : {8, 4, 2, 1}) {
        if (!(BITS & size)) continue;
        const int bytes_in_plane = unit * size / 8, mask = (1 << size) - 1;
        for (int c = 0; c < unit && u + c < dim; c++) {
          const uint8_t* code = &best[size_t(u + c) * W];
          uint8_t* to = out + plane + c % bytes_in_plane;
          const int shift = size * (c / bytes_in_plane);
          for (int i = 0; i < count; i++) to[int64_t(i) * row] |= uint8_t((code[i] >> low & mask) << shift);
        }
        plane += bytes_in_plane;
        low += size;
      }
    }
  }

  // The 32-bit words of one unit; planes and shifts as in `field_of` of attend.h.
  template <int BITS>
  static void pack_unit(const uint8_t* code, int32_t (*words)[W]) {
    int low = 0, plane = 0;
    for (int size : {8, 4, 2, 1}) {
      if (!(BITS & size)) continue;
      const vi mask = seti((1 << size) - 1);
      for (int w = 0; w < size; w++) {
        vi word = seti(0);
        for (int b = 0; b < 4; b++)
          for (int k = 0; k < 8 / size; k++) {
            const vi field = srlv(bytes(code + (4 * w + b + 4 * size * k) * W), seti(low));
            word = ori(word, sllv(andi(field, mask), seti(8 * b + size * k)));
          }
        storei(words[plane + w], word);
      }
      plane += size;
      low += size;
    }
  }
};

}  // namespace KVS_NS
