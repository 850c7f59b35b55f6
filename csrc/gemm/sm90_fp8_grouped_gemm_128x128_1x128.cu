// SPDX-License-Identifier: Apache-2.0
#include "gemm/sm90_gemm_instances.cuh"

namespace fsdp_quant::sm90 {

Kernel grouped_128x128_1x128_kernel(Tile tile) {
  constexpr Granularity kA = Granularity::k128x128, kB = Granularity::k1x128;
  return tile == Tile::k256x128x2 ? describe<Deep, kA, kB, false, false, GroupedDim::kK>()
                                  : describe<Small, kA, kB, false, false, GroupedDim::kK>();
}

}  // namespace fsdp_quant::sm90
