// SPDX-License-Identifier: Apache-2.0
// A product of two operands, whatever multiplies them. Plain data: needs no CUDA compiler, no cuBLASLt.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>
#include <library_types.h>

#include "gemm/capability.h"

namespace fsdp_quant {

// From a line of fp32 scales of blocks to the next: a line is a 128 or 512 of K, and of 128x128 scales a 128 of outer.
inline int64_t scale_ld(Scaling scaling, int64_t outer, int64_t k) {
  return ((scaling == Scaling::k128x128 ? (k + 127) / 128 : outer) + 3) / 4 * 4;
}

// Elements of the scales of an operand.
inline int64_t scale_numel(Scaling scaling, int64_t outer, int64_t k) {
  const auto tiles = [&](int64_t of_k) { return (outer + 127) / 128 * 128 * (((k + of_k - 1) / of_k + 3) / 4 * 4); };
  switch (scaling) {
    case Scaling::kRow: return outer;
    case Scaling::k1x128: return (k + 127) / 128 * scale_ld(scaling, outer, k);
    case Scaling::k1x512: return (k + 511) / 512 * scale_ld(scaling, outer, k);
    case Scaling::k128x128: return (outer + 127) / 128 * scale_ld(scaling, outer, k);
    case Scaling::kE8M0: return tiles(32);
    case Scaling::kE4M3: return tiles(16);
    default: return 1;
  }
}

struct Operand {
  const void* data;
  const void* scale;  // null: none
  int64_t ld;         // elements from a row to the next; where K is not contiguous, from a column to the next
  cudaDataType_t type;
  Scaling scaling;
  bool k_major;       // K is contiguous
};

// out[m, n] = alpha * a[m, k] b[n, k]^T (+ out) (+ bias[n]), of scaled operands.
struct GemmProblem {
  Operand a, b;
  void* out;           // rows of n contiguous elements
  const void* bias;    // null: none
  const float* alpha;  // in device memory; null: 1
  int64_t m, n, k, out_ld;
  cudaDataType_t out_type, bias_type;
  int32_t sm_count;    // multiprocessors to plan for; 0: all
  bool accumulate;
};

}  // namespace fsdp_quant
