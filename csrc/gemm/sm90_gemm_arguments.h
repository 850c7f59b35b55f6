// SPDX-License-Identifier: Apache-2.0
// What the fp8 kernels of sm_90a are told, and the kernels there are. Needs no CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fsdp_quant::sm90 {

// What groups cut: nothing; the rows of a and out, each group with its own b; the contraction, each with its own out.
enum class GroupedDim : int32_t { kNone = 0, kM = 1, kK = 2 };

constexpr int32_t kMostGroups = 1024;

struct Arguments {
  CUtensorMap a, b;        // codes, in boxes of 128 bytes of K and the rows that one block loads; b of each group
  const float* a_scale;    // null: none
  const float* b_scale;
  void* out;
  const void* bias;        // bf16; null: none
  const float* alpha;      // null: 1
  const int32_t* offsets;  // [groups + 1]
  int32_t* flag;           // null: none; becomes 1 where offsets are out of order or range
  int64_t out_ld, out_plane;  // elements from a row to the next, from a group to the next
  int64_t a_scale_plane, b_scale_plane;  // elements from a group to the next
  int32_t m, n, k, k_blocks;
  int32_t groups;
  int32_t a_scale_ld, b_scale_ld;  // blocks: elements from a line of scales to the next
  int32_t a_scale_step, b_scale_step;  // outer scales: 0 one for all, 1 one a row
  int32_t m_tiles, n_tiles, tiles;     // of a cluster; of a group that cuts the contraction; not where rows are cut
  int32_t band;            // m_tiles that are walked together
  bool bf16_out;
  bool accumulate;
};

struct Kernel {
  const void* function;    // null: there is none
  int32_t block_m, block_n;  // of out
  int32_t cluster;           // blocks, side by side along n
  int32_t threads, shared_bytes;
};

}  // namespace fsdp_quant::sm90
