// SPDX-License-Identifier: Apache-2.0
// bf16 values with everything a direction can ask for.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_full8(const Launch<1>& launch, cudaStream_t stream) {
  return launch_instance<LoadBF16, Full8, Full8, 1, 2>(launch, stream);
}

cudaError_t launch_full4(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.spec[0].present() && !launch.spec[0].four_bit())
    return launch_instance<LoadBF16, Plain8, Full4, 1, 2>(launch, stream);
  return launch_instance<LoadBF16, Full4, Full4, 1, 2>(launch, stream);
}

}  // namespace fsdp_quant
