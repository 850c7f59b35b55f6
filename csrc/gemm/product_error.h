// SPDX-License-Identifier: Apache-2.0
// Estimate the error of a GEMM due to shared exponents, beyond that of its formats, from both operands' codes.
#pragma once

#include <cstdint>
#include <iterator>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

constexpr int64_t kProbedSteps = 16;  // one in this many steps is probed
constexpr int64_t kProbedStepsOfGroups = 64;  // of grouped GEMMs
constexpr int64_t kSettledSteps = 256, kLessOften = 8;  // so much less often from that step on
// Mean square of an element's relative error with a scale per block.
constexpr double kOwnE4M3 = 7.04e-4, kOwnE5M2 = 4 * kOwnE4M3;

// e4m3 codes converted from smaller elements are exact in blocks (along k) whose largest code is at least `least`:
// `product_error._EXACT`.
struct ExactBlocks {
  uint32_t least;
  int32_t lanes_log2;  // of the threads, 4 codes each, that hold a block
  double own_error;
};
constexpr int64_t kCounted = 1, kLeastOfBlocks = 2;  // operator argument; 0: own scales
constexpr ExactBlocks kExactBlocks[] = {{28, 2, 9.1e-3}, {7, 3, 1.33e-2}, {24, 3, 8.1e-4}, {47, 3, 2.8e-3}};
constexpr int64_t kMostCounted = kLeastOfBlocks + std::size(kExactBlocks) - 1;

// 8-bit codes [outer, k].
struct CountedOperand {
  const uint8_t* data;
  const float* scale;  // of runs along k, [runs, scale_ld], or of tiles, per matrix [plane_lines / 128, scale_ld]; else unused
  int64_t outer, ld, scale_ld;
  int64_t plane, plane_lines;  // of matrices: stride in bytes, lines each
  int32_t run_log2;            // 0: line or tensor scales
  bool tiles;                  // scales are of tiles of 128 x 128
  bool vectors;                // rows are aligned to 4
  bool e5m2, counted;          // counted: error of its anchors, else own scales
  bool of_blocks;              // only blocks that are not exact count
  ExactBlocks exact;
  bool of_tokens;  // lines are tokens, else channels
};

// sums[0] += mean squares of the errors of probed lines, sums[1] += those of their formats' own errors, each relative to the
// sum of both: see dist_tests/product_error.py. Active in one of `every` steps, and later less often.
struct ProductError {
  CountedOperand operand[2];
  int64_t k;
  const int32_t* k_end;  // of K that is written, on the device; null: all
  const int64_t* step;   // current step
  int64_t every;
  float* sums;
};

cudaError_t launch_product_error(const ProductError& p, cudaStream_t stream);

}  // namespace fsdp_quant
