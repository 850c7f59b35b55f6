// Adam of many tensors in one launch.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

enum AdamScalar { kKeep, kCoupled, kFirst, kBeta2, kSecond, kRootCorrection, kMinusStepSize, kEps, kAdamScalars };

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

struct AdamLaunch {
  const float* scalars;     // [rows, kAdamScalars]
  const float* grad_scale;  // [1] or null
  const float* found_inf;   // [1] or null: not 0 leaves everything as it is
  int32_t count, tiles;
  AdamTensor tensors[kAdamCapacity];
};
static_assert(sizeof(AdamLaunch) <= 32764, "the table is too large for kernel parameters");

cudaError_t launch_adam(
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, bool rounded, cudaStream_t stream);

}  // namespace fsdp_quant
