// SPDX-License-Identifier: Apache-2.0
#include "gemm/sm90_gemm_instances.cuh"

namespace fsdp_quant::sm90 {

Kernel dense_1x512_kernel(Tile tile, bool a_e5m2, bool b_e5m2) {
  return of_tile<Deep, Granularity::k1x512, Granularity::k1x512, GroupedDim::kNone>(tile, a_e5m2, b_e5m2);
}

}  // namespace fsdp_quant::sm90
