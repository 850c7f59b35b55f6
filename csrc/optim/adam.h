// SPDX-License-Identifier: Apache-2.0
// Arguments of Adam kernels, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

enum AdamScalar { kKeep, kCoupled, kFirst, kBeta2, kSecond, kRootCorrection, kMinusStepSize, kEps, kAdamScalars };

// Inputs shared by all tensors of a step.
struct AdamStep {
  const float* scalars;     // [rows, kAdamScalars]
  const float* grad_scale;  // [1] or null
  const float* found_inf;   // [1] or null: nonzero skips the step
};

// Storage of a master: fp32; fp32 plus a bf16 parameter equal to it rounded; or the lower 16 bits, with the upper ones in the
// bf16 parameter (see optim/update.cuh).
enum AdamMaster { kAlone, kRounded, kRemainder };

struct AdamTensor {
  void* master;  // float, or int16_t
  const void* grad;
  void *first, *second;               // moments: float, bf16, or e4m3 codes
  void* rounded;                      // the bf16 parameter, or null
  float *first_scale, *second_scale;  // [rows, blocks per row] of codes, or null
  int64_t numel;
  int32_t row;  // of the scalars
  int32_t first_tile;
  int32_t cols;  // of 8-bit moments: elements per row
  bool vectors;  // all pointers, and rows of 8-bit moments, are aligned to four elements
};

constexpr int kAdamCapacity = 400;  // the table is a kernel parameter, limited to 32 KiB
constexpr int kAdamTile = 4096;     // elements per block
constexpr int kMomentBlock = 256;   // elements per scale, updated by a warp
constexpr int kMomentBlocksOfTile = 8;
constexpr int kAdamSteps = 2048;  // per launch

struct AdamLaunch {
  AdamStep step;
  int32_t count, tiles;
  AdamTensor tensors[kAdamCapacity];
};
static_assert(sizeof(AdamLaunch) <= 32764, "the table is too large for kernel parameters");

// Compute step scalars on the device, in fp64, rounded once.
struct AdamCount {
  const float* found_inf;  // [1] or null: nonzero counts nothing
  const float* lr;         // [1] or null: learning_rate
  double learning_rate, beta1, beta2, eps, decay;
  bool decoupled;
  float* scalars;  // [count, kAdamScalars]
  int32_t count;
  float* steps[kAdamSteps];
};

cudaError_t launch_adam_count(const AdamCount& count, cudaStream_t stream);
cudaError_t launch_adam(
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, AdamMaster master, cudaStream_t stream);
// For 8-bit moments, with tiles of kMomentBlocksOfTile blocks.
cudaError_t launch_adam_codes(const AdamLaunch& launch, bool bf16_grad, AdamMaster master, cudaStream_t stream);

}  // namespace fsdp_quant
