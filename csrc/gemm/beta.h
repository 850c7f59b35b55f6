// SPDX-License-Identifier: Apache-2.0
// beta in device memory, required by GEMMs whose alpha is there.
#pragma once

#include <cuda_runtime_api.h>

namespace fsdp_quant {

// Address of a 0 or 1 on the current device.
cudaError_t device_beta(bool one, const float** beta);

}  // namespace fsdp_quant
