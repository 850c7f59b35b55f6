// What a product of anchored operands loses beside the error of its formats: an estimate from both operands' codes.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

constexpr int64_t kProbedSteps = 16;  // one of so many steps is looked at
// Mean square of an element's relative error under scales of its own block.
constexpr double kOwnE4M3 = 7.04e-4, kOwnE5M2 = 4 * kOwnE4M3;

// Codes [outer, k] of 8 bits.
struct CountedOperand {
  const uint8_t* data;   // aligned to 4, as are rows
  const float* scale;    // of runs along k, [runs, scale_ld]; else not read
  int64_t outer, ld, scale_ld;
  int32_t run_log2;      // 0: a scale of lines or of the tensor
  bool e5m2, counted;    // counted: what is lost to its anchors; else it has its own scales
};

// sums[0] += sum over k of (lost_a all_b + all_a lost_b), sums[1] += that of the formats' own errors; in one of kProbedSteps.
struct ProductError {
  CountedOperand operand[2];
  int64_t k;             // a multiple of 4
  const int64_t* step;   // that runs
  float* sums;
};

cudaError_t launch_product_error(const ProductError& p, cudaStream_t stream);

}  // namespace fsdp_quant
