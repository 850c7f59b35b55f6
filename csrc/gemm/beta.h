// SPDX-License-Identifier: Apache-2.0
// beta of a product whose alpha is in device memory: it has to be there too.
#pragma once

#include <cuda_runtime_api.h>

namespace fsdp_quant {

// Address of a 0 or 1 in the memory of the current device.
cudaError_t device_beta(bool one, const float** beta);

}  // namespace fsdp_quant
