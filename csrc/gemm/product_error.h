// SPDX-License-Identifier: Apache-2.0
// What a product of anchored operands loses beside the error of its formats: an estimate from both operands' codes.
#pragma once

#include <cstdint>
#include <iterator>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

constexpr int64_t kProbedSteps = 16;  // one of so many steps is looked at
// Mean square of an element's relative error under scales of its own block.
constexpr double kOwnE4M3 = 7.04e-4, kOwnE5M2 = 4 * kOwnE4M3;

// e4m3 codes that were those of smaller elements lost nothing in blocks, of so many along k, whose largest magnitude has this
// code or a larger one: `reference._EXACT`.
struct ExactBlocks {
  uint32_t least;
  int32_t lanes_log2;  // of threads of 4 codes that hold a block
  double own_error;
};
constexpr int64_t kCounted = 1, kLeastOfBlocks = 2;  // as operators take them: 0 has its own scales
constexpr ExactBlocks kExactBlocks[] = {{28, 2, 9.1e-3}, {7, 3, 1.33e-2}, {24, 3, 8.1e-4}, {47, 3, 2.8e-3}};
constexpr int64_t kMostCounted = kLeastOfBlocks + std::size(kExactBlocks) - 1;

// Codes [outer, k] of 8 bits.
struct CountedOperand {
  const uint8_t* data;
  const float* scale;    // of runs along k, [runs, scale_ld]; else not read
  int64_t outer, ld, scale_ld;
  int64_t plane, plane_lines;  // of matrices: bytes from one to the next, lines of each
  int32_t run_log2;      // 0: a scale of lines or of the tensor
  bool vectors;          // rows are aligned to 4
  bool e5m2, counted;    // counted: what is lost to its anchors; else it has its own scales
  bool of_blocks;        // counted where a block is not exact
  ExactBlocks exact;
  bool of_tokens;        // its lines are; else channels
};

// sums[0] += mean squares of what lines of the product lost, sums[1] += those of their formats' own errors, each against the
// sum of both: see ops/product_error.py. In one of kProbedSteps.
struct ProductError {
  CountedOperand operand[2];
  int64_t k;
  const int64_t* step;   // that runs
  float* sums;
};

cudaError_t launch_product_error(const ProductError& p, cudaStream_t stream);

}  // namespace fsdp_quant
