// SPDX-License-Identifier: Apache-2.0
// Factors of a GEMM, on the device.
#pragma once

#include "device/numeric.cuh"
#include "layout/layout.h"

namespace fsdp_quant {

__device__ __forceinline__ float value_of(const Factor& f) {
  if (f.value == nullptr) return 1.0f;
  return f.tensor_max != 0.0f ? tensor_decode_scale(*f.value, f.tensor_max) : *f.value;
}

}  // namespace fsdp_quant
