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

struct AdamTensor {
  float* master;
  const void* grad;
  void *first, *second;  // moments
  void* rounded;         // bf16 parameter that is the master rounded, or null
  int64_t numel;
  int32_t row;           // of the scalars
  int32_t first_tile;
  bool vectors;          // every pointer is aligned to four elements
};

constexpr int kAdamCapacity = 448;  // the table is a kernel parameter, of which there are 32 KiB
constexpr int kAdamTile = 4096;     // elements a block
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
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, bool rounded, cudaStream_t stream);

}  // namespace fsdp_quant
