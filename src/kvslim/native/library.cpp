// The library for one instruction set, in one translation unit: runs tasks on threads and exports the interface.
//
// One shared object per instruction set, because the inline functions of the standard library that a compiler emits for
// AVX-512 must never be the ones that an older processor runs.
#include <atomic>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "attend.h"
#include "encode.h"

#define KVS_EXPORT extern "C" __attribute__((visibility("default")))

namespace KVS_NS {

static std::atomic<kvs_parallel> openmp{nullptr};

struct Job {
  const std::function<void(int)>& task;
  const int count;
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
};

static void work(void* data) {
  Job& job = *(Job*)data;
  try {
    for (int i = job.next++; i < job.count; i = job.next++) job.task(i);
  } catch (...) {  // out of memory: nothing may be thrown through another runtime's frames
    job.failed = true;
  }
}

// Call `task` for 0 .. count - 1. Threads take the next one when they are free, so that a late one delays nothing.
static void for_each(int count, int threads, const std::function<void(int)>& task) {
  Job job{task, count};
  threads = std::min(threads, count);
  if (threads < 2) {
    work(&job);
  } else if (kvs_parallel run = openmp) {
    run(work, &job, unsigned(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(work, &job);
    work(&job);
    for (std::thread& other : others) other.join();
  }
  if (job.failed) throw std::bad_alloc();
}

static void attend(const kvs_attend& call, int threads) {
  const int all = call.queries * (call.heads / call.kv_heads), runs = (all + ROWS - 1) / ROWS;
  int longest = 0;
  for (int i = 0; i < call.batch; i++) longest = std::max(longest, call.rows[i].packed);
  const int jobs = call.batch * call.kv_heads * runs;
  // enough tasks to keep every thread busy to the end, none under 512 packed tokens
  const int splits = threads < 2 || jobs >= 4 * threads ? 1 : std::max(1, std::min(longest / 512, 4 * threads / jobs));
  std::vector<Partial> partials(size_t(jobs) * splits);
  for_each(jobs * splits, threads, [&](int i) {
    static thread_local Scratch scratch;
    const int split = i % splits, job = i / splits;
    const int run = job % runs, head = job / runs % call.kv_heads, sequence = job / runs / call.kv_heads;
    Task task(call, sequence, head, run * ROWS, std::min(ROWS, all - run * ROWS), scratch, partials[i]);
    const int packed = call.rows[sequence].packed, step = (packed + splits - 1) / splits;
    if (packed) task.packed(split * step, split + 1 == splits ? packed : (split + 1) * step);
    if (split + 1 == splits) task.exact();
  });
  for_each(jobs, threads, [&](int i) {
    const int run = i % runs, head = i / runs % call.kv_heads, sequence = i / runs / call.kv_heads;
    merge(call, sequence, head, run * ROWS, std::min(ROWS, all - run * ROWS), &partials[size_t(i) * splits], splits);
  });
}

}  // namespace KVS_NS

KVS_EXPORT int kvs_abi() { return KVS_ABI; }

KVS_EXPORT const char* kvs_best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
      return "avx512";
    return "avx2";
  }
#endif
  return "portable";
}

KVS_EXPORT void kvs_set_parallel(kvs_parallel run) { KVS_NS::openmp = run; }

KVS_EXPORT int kvs_attend_run(const kvs_attend* call, int threads) try {
  KVS_NS::attend(*call, threads);
  return 0;
} catch (...) {
  return 1;
}

KVS_EXPORT int kvs_encode_run(const kvs_encode* call, int threads) try {
  KVS_NS::for_each(call->blocks * call->kv_heads, threads, [&](int i) {
    KVS_NS::Encoder(*call).block(i / call->kv_heads, i % call->kv_heads);
  });
  return 0;
} catch (...) {
  return 1;
}
