// Transform chains on queries and on summed values; kvslim/transforms.
#pragma once
#include <algorithm>

#include "rows.h"

namespace KVS_NS {

inline float dot(const float* a, const float* b, int n) {
  vf sum = set1(0);
  int i = 0;
  for (; i + W <= n; i += W) sum = fma(load(a + i), load(b + i), sum);
  float out = hsum(sum);
  for (; i < n; i++) out += a[i] * b[i];
  return out;
}

// y[c] += a * x[c]
inline void axpy(float a, const float* x, float* y, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(y + i, fma(set1(a), load(x + i), load(y + i)));
  for (; i < n; i++) y[i] += a * x[i];
}

// Orthonormal Hadamard transform of each run of `size` channels; its own inverse.
inline void hadamard(float* x, int width, int size) {
  for (int half = 1; half < size; half *= 2)
    for (int i = 0; i < width; i += 2 * half)
      for (int j = i; j < i + half; j++) {
        float low = x[j], high = x[j + half];
        x[j] = low + high;
        x[j + half] = low - high;
      }
  const float norm = float(1.0 / std::sqrt(double(size)));
  for (int i = 0; i < width; i++) x[i] *= norm;
}

// Rotary means of blocks: what the score of a query gains from the mean that KVS_PAGE took out of a block.
struct Page {
  const kvs_step* step = nullptr;
  int head = 0, pairs = 0, tokens = 0;

  // Coefficients of cos and sin for one query, and its product with the channels that do not turn.
  float prepare(const float* q, float* cosine, float* sine) const {
    const float* mean = (const float*)step->data + head * step->stride;
    float rest = 0;
    bool turns[MAX_DIM] = {};
    for (int p = 0; p < pairs; p++) {
      const int64_t a = step->pairs[p], b = step->pairs[pairs + p];
      const double half = step->frequency[p] / 2, low = std::sin(half);
      const float shrink = std::fabs(low) < 1e-12 ? 1.0f : float(std::sin(tokens * half) / (tokens * low));
      cosine[p] = shrink * (q[a] * mean[a] + q[b] * mean[b]);
      sine[p] = shrink * (q[b] * mean[a] - q[a] * mean[b]);
      turns[a] = turns[b] = true;
    }
    for (int c = 0; c < step->width; c++)
      if (!turns[c]) rest += q[c] * mean[c];
    return rest;
  }
};

// Map one query in place (width may grow by KVS_EXPAND); returns what its packed scores gain from means.
inline float map_query(const kvs_step* steps, int count, int head, int head_dim, float* q) {
  float gain = 0, copy[MAX_DIM];
  for (int s = 0; s < count; s++) {
    const kvs_step& step = steps[s];
    const float* data = (const float*)step.data + (step.data ? head * step.stride : 0);
    switch (step.kind) {
      case KVS_WEIGHT:
        for (int c = 0; c < head_dim; c++) q[c] /= data[c];
        break;
      case KVS_HADAMARD:
        hadamard(q + step.first, step.width, step.size);
        break;
      case KVS_MATRIX:
      case KVS_EXPAND: {
        std::copy(q, q + head_dim, copy);
        float* out = step.kind == KVS_EXPAND ? q + head_dim : q;
        std::fill(out, out + head_dim, 0.0f);
        for (int i = 0; i < head_dim; i++) axpy(copy[i], data + i * head_dim, out, head_dim);
        break;
      }
      case KVS_PERMUTE:
        std::copy(q, q + head_dim, copy);
        for (int c = 0; c < head_dim; c++) q[c] = copy[((const int64_t*)step.data)[head * step.stride + c]];
        break;
      case KVS_MEAN:
        gain += dot(q, data, head_dim);
        break;
      default:
        break;  // KVS_PAGE: per block, see Page
    }
  }
  return gain;
}

// Undo the chain on values summed under probability mass `mass`.
inline void map_output(const kvs_step* steps, int count, int head, int head_dim, float mass, float* acc) {
  float copy[MAX_DIM];
  for (int s = count - 1; s >= 0; s--) {
    const kvs_step& step = steps[s];
    const float* data = (const float*)step.data + (step.data ? head * step.stride : 0);
    switch (step.kind) {
      case KVS_WEIGHT:
        for (int c = 0; c < head_dim; c++) acc[c] /= data[c];
        break;
      case KVS_HADAMARD:
        hadamard(acc + step.first, step.width, step.size);
        break;
      case KVS_MATRIX:
        std::copy(acc, acc + head_dim, copy);
        for (int i = 0; i < head_dim; i++) acc[i] = dot(copy, data + i * head_dim, head_dim);
        break;
      case KVS_EXPAND:
        for (int i = 0; i < head_dim; i++) acc[i] += dot(acc + head_dim, data + i * head_dim, head_dim);
        break;
      case KVS_PERMUTE:
        std::copy(acc, acc + head_dim, copy);
        for (int c = 0; c < head_dim; c++) acc[((const int64_t*)step.data)[head * step.stride + c]] = copy[c];
        break;
      case KVS_MEAN:
        axpy(mass, data, acc, head_dim);
        break;
      default:
        break;
    }
  }
}

}  // namespace KVS_NS
