// SPDX-License-Identifier: Apache-2.0
// fp32 and fp16 values that are quantized as they are.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_fp32_input(const Launch<1>& launch, cudaStream_t stream) {
  const bool four_bit = launch.spec[launch.spec[0].present() ? 0 : 1].four_bit();
  return four_bit ? launch_instance<LoadF32, Full4, Full4, 1, 1>(launch, stream)
                  : launch_instance<LoadF32, Full8, Full8, 1, 1>(launch, stream);
}

}  // namespace fsdp_quant
