// SPDX-License-Identifier: Apache-2.0
// What a step of Adam is told. Plain data: host code without a CUDA compiler includes it.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

enum AdamScalar { kKeep, kCoupled, kFirst, kBeta2, kSecond, kRootCorrection, kMinusStepSize, kEps, kAdamScalars };

// What all tensors of a step read.
struct AdamStep {
  const float* scalars;     // [rows, kAdamScalars]
  const float* grad_scale;  // [1] or null
  const float* found_inf;   // [1] or null: not 0 leaves everything as it is
};

// How a master is stored: fp32; fp32 beside a bf16 parameter that is it rounded; or the lower 16 bits, of which the bf16
// parameter has the upper ones (see optim/update.cuh).
enum AdamMaster { kAlone, kRounded, kRemainder };

struct AdamTensor {
  void* master;                       // float, or int16_t
  const void* grad;
  void *first, *second;               // moments: float, bf16, or e4m3 codes
  void* rounded;                      // the bf16 parameter, or null
  float *first_scale, *second_scale;  // [rows, blocks of a row] of codes, or null
  int64_t numel;
  int32_t row;                        // of the scalars
  int32_t first_tile;
  int32_t cols;                       // elements of a row, of codes
  bool vectors;                       // every pointer is aligned to four elements, and rows of codes are
};

constexpr int kAdamCapacity = 400;    // the table is a kernel parameter, of which there are 32 KiB
constexpr int kAdamTile = 4096;       // elements a block
constexpr int kMomentBlock = 256;     // elements that share a scale: a warp updates them
constexpr int kMomentBlocksOfTile = 8;
constexpr int kAdamSteps = 2048;    // counted by a launch

struct AdamLaunch {
  AdamStep step;
  int32_t count, tiles;
  AdamTensor tensors[kAdamCapacity];
};
static_assert(sizeof(AdamLaunch) <= 32764, "the table is too large for kernel parameters");

// Scalars of a step that is counted on the device, computed in fp64 and rounded once.
struct AdamCount {
  const float* found_inf;  // [1] or null: not 0 counts nothing
  const float* lr;         // [1] or null: learning_rate
  double learning_rate, beta1, beta2, eps, decay;
  bool decoupled;
  float* scalars;          // [count, kAdamScalars]
  int32_t count;
  float* steps[kAdamSteps];
};

cudaError_t launch_adam_count(const AdamCount& count, cudaStream_t stream);
cudaError_t launch_adam(
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, AdamMaster master, cudaStream_t stream);
// Moments are codes, and tiles are of kMomentBlocksOfTile blocks.
cudaError_t launch_adam_codes(const AdamLaunch& launch, bool bf16_grad, AdamMaster master, cudaStream_t stream);

}  // namespace fsdp_quant
