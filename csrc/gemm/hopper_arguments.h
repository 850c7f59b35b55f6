// What the fp8 kernels of sm_90a are told, and the kernels there are. Needs no CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fsdp_quant::hopper {

// How a finished tile leaves shared memory: 16 bytes a thread; a row at a time by the copy engine; or, accumulated,
// 16-byte additions that L2 makes, which flush subnormals. To accumulate, threads read and write; the copy engine lets
// L2 add. An element gets one addition: the same bits every run.
enum class Stores : int32_t { kThreads = 0, kCopies = 1, kReductions = 2 };

struct Arguments {
  CUtensorMap a, b;        // codes, in boxes of 128 bytes of K and the rows that one block loads
  const float* a_scale;    // null: none
  const float* b_scale;
  void* out;
  const void* bias;        // null: none
  const float* alpha;      // null: 1
  uint32_t* amax;          // null: none; bits of an fp32
  int64_t out_ld;          // elements
  int32_t m, n, k_blocks;
  int32_t a_scale_ld, b_scale_ld;  // blocks: elements from a line of scales to the next
  int32_t a_scale_step, b_scale_step;  // outer scales: 0 one for all, 1 one a row
  int32_t m_tiles, n_tiles, tiles;     // of a cluster
  int32_t band;            // m_tiles that are walked together
  bool bf16_out, bf16_bias;
  bool accumulate;
  Stores stores;
};

struct Kernel {
  const void* function;    // null: there is none
  int32_t block_m, block_n;  // of out
  int32_t cluster;           // blocks, side by side along n
  int32_t threads, shared_bytes;
};

}  // namespace fsdp_quant::hopper
