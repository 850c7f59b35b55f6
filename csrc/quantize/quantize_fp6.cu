// SPDX-License-Identifier: Apache-2.0
// 6 bits, in one instance for each width of the values: a direction that is absent costs a branch.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_fp6(const Launch<1>& launch, cudaStream_t stream) {
  return is_wide(launch.input) ? launch_instance<LoadF32, Full6, Full6, 1, 1>(launch, stream)
                               : launch_instance<LoadBF16, Full6, Full6, 1, 2>(launch, stream);
}

}  // namespace fsdp_quant
