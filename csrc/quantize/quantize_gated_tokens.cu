// SPDX-License-Identifier: Apache-2.0
// Grouped tokens whose values are SwiGLU or its gradient: both directions, scales from the tile, rounding to nearest.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_gated_tokens(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.gradient)
    return launch.in_tile ? launch_instance<LoadSwiGLUGradient, AnchoredInTile8, AnchoredInTile8, 1, 3>(launch, stream)
                          : launch_instance<LoadSwiGLUGradient, Plain8x128, Plain8x128, 1, 3>(launch, stream);
  return launch.in_tile ? launch_instance<LoadSwiGLU, AnchoredInTile8, OfCodesInTile8, 1, 3>(launch, stream)
                        : launch_instance<LoadSwiGLU, Plain8x128, Plain8x128, 1, 3>(launch, stream);
}

}  // namespace fsdp_quant
