// SPDX-License-Identifier: Apache-2.0
#include "gemm/sm90_gemm_instances.cuh"

namespace fsdp_quant::sm90 {

Kernel grouped_1x128_128x128_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2) {
  return of_grouped_dim<Wide, Granularity::k1x128, Granularity::k128x128, Deep>(dim, tile, a_e5m2, b_e5m2);
}

}  // namespace fsdp_quant::sm90
