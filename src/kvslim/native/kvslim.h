// The plain C interface of the CPU kernels. No Python, no torch: pointers and counts only.
//
// kvslim/kernels/cpu/abi.py declares the same structs for ctypes; KVS_ABI is raised when either changes.
#pragma once
#include <cstdint>

#define KVS_ABI 1

extern "C" {

enum kvs_dtype { KVS_NONE = 0, KVS_FP16 = 1, KVS_BF16 = 2, KVS_FP32 = 3, KVS_E8M0 = 4, KVS_E4M3 = 5, KVS_BOOL = 6 };

// One tensor of a side in the pool: a base address per slab; both strides in bytes.
struct kvs_part {
  const void* const* slabs;
  int64_t block_stride, head_stride;
  int32_t dtype;  // KVS_NONE: the side does not have this part
  int32_t count;  // entries per token (token, zero), or per block
};

struct kvs_segment {
  int32_t width, bits, group;
};

// How one side (K or V) of a layer lies in the pool: kvslim/layout.py.
struct kvs_side {
  int32_t head_dim, width, block, segments;
  kvs_segment segment[2];
  kvs_part code, token, zero, channel, offset, scale;
};

enum kvs_step_kind {
  KVS_WEIGHT = 1,    // x * data                        q / data
  KVS_HADAMARD = 2,  // butterfly over `size` channels, from `first` on, `width` of them in all
  KVS_MATRIX = 3,    // x @ data, data orthogonal
  KVS_PERMUTE = 4,   // x[order]
  KVS_MEAN = 5,      // x - data                        score + q . data
  KVS_PAGE = 6,      // x - rotary mean of the block    score + q . (that mean)
  KVS_EXPAND = 7     // q -> (q, q @ data)              acc -> acc[:D] + acc[D:] @ data^T
};

// One step of a transform chain. `data` begins at kv head 0; `stride` is the number of entries per kv head, 0 if shared.
struct kvs_step {
  int32_t kind, first, width, size;
  const void* data;
  int64_t stride;
  const int64_t* pairs;     // KVS_PAGE: first channels of all pairs, then second ones
  const double* frequency;  // KVS_PAGE: radians per position
};

// One sequence.
struct kvs_row {
  const kvs_step *key_steps, *value_steps;
  int32_t key_step_count, value_step_count;
  const float *key_table, *value_table;
  const int32_t *blocks, *valid;
  int32_t entries, packed;
  int32_t copied, source;  // a covered last block `copied` is still read from `source`; -1: none
  int32_t sinks, exact;
  int64_t origin;
  const int64_t* holes;  // start, stop of each run of columns that is not stored
  int32_t hole_count;
  float key_unit, value_unit;  // levels of a table are small integers times this; 0: they are not
  int32_t reserved;
};

struct kvs_exact {
  const void *key, *value;
  int64_t key_row, key_head, key_token;  // strides in entries; channels lie next to each other
  int64_t value_row, value_head, value_token;
  int32_t key_dtype, value_dtype;
};

struct kvs_attend {
  kvs_side key, value;
  const int64_t* slab_starts;  // first block of each slab
  int32_t slab_count, kv_heads, heads, batch;
  const kvs_row* rows;
  kvs_exact stored, chunk;
  int32_t queries, chunk_tokens;
  const void* query;
  int64_t query_row, query_head, query_token;
  int32_t query_dtype, out_dtype;
  void* out;  // (batch, queries, heads, value head_dim), contiguous
  const void* mask;
  int64_t mask_row, mask_head, mask_query;  // strides in entries; columns lie next to each other
  int32_t mask_dtype, causal;
  int64_t length;  // columns before the chunk
  const void* sinks;  // a logit per head, fp32
  float scaling, softcap;
};

// Encoder of the `table` codec with one scale per token; kvslim/codecs/table.py.
struct kvs_encode {
  const void* x;  // (blocks, kv_heads, tokens, head_dim) with these strides in entries
  int64_t x_block, x_head, x_token;
  int32_t x_dtype, blocks, kv_heads, tokens, head_dim;
  int32_t bits, mean, by_range, fit, search, step_count;  // fit: 0 plain, 1 ls, 2 norm, 3 eden
  const kvs_step* steps;
  const float* page;    // (blocks, kv_heads, head_dim) subtracted first, or null
  const float* table;   // levels, then the edges between them
  const float* factor;  // U^T-like carry steps (kv_heads, D, D): [j][i] = U_ji / U_jj, or null without feedback
  const float* diagonal;  // (kv_heads, D)
  const float* multiples;  // count, then the multiples, then their reciprocals; then nearby ones
  int32_t multiple_count, nearby_count;
  uint8_t* code;
  int64_t code_block, code_head;
  uint16_t* token;
  int64_t token_block, token_head;
  uint16_t* offset;
  int64_t offset_block, offset_head;
};

// GOMP_parallel of the OpenMP runtime that is loaded already, so that no second one comes beside it; null: own threads.
typedef void (*kvs_parallel)(void (*)(void*), void*, unsigned, unsigned);

int kvs_abi();
const char* kvs_best_isa();  // of this processor: "avx512", "avx2" or "portable"; asked of the portable library
void kvs_set_parallel(kvs_parallel run);
int kvs_attend_run(const kvs_attend* call, int threads);  // 0, or 1 if memory ran out
int kvs_encode_run(const kvs_encode* call, int threads);
}
