// SPDX-License-Identifier: Apache-2.0
// Kernel arguments and descriptors of the sm_90 GEMMs. Needs no CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fsdp_quant::sm90 {

// Dim that groups divide: none; M, each group with its own b; K, each group with its own out.
enum class GroupedDim : int32_t { kNone = 0, kM = 1, kK = 2 };

constexpr int32_t kMostGroups = 1024;

struct Arguments {
  CUtensorMap a, b;      // codes, in boxes of 128 bytes of K and the rows that one block loads; b per group
  const float* a_scale;  // null: none
  const float* b_scale;
  void* out;
  const void* bias;                      // [groups, n]; null: none
  const float* alpha;                    // null: 1
  const int32_t* offsets;                // [groups + 1]
  int32_t* flag;                         // null: none; set to 1 if offsets are out of order or range
  int64_t out_ld, out_plane;             // row stride and group stride in elements
  int64_t a_scale_plane, b_scale_plane;  // group strides in elements
  int32_t m, n, k, k_blocks;
  int32_t groups;
  int32_t a_scale_ld, b_scale_ld;      // block scales: line stride in elements
  int32_t a_scale_step, b_scale_step;  // row or tensor scales: 0 one for all, 1 per row
  int32_t m_tiles, n_tiles, tiles;     // per cluster; kK: of one group; kM: unused
  int32_t band;                        // m_tiles walked together
  bool bf16_out, bf16_bias;            // else fp32
  bool accumulate;
};

struct Kernel {
  const void* function;      // null: there is none
  int32_t block_m, block_n;  // of out
  int32_t cluster;           // blocks, adjacent along n
  int32_t threads, shared_bytes;
};

}  // namespace fsdp_quant::sm90
