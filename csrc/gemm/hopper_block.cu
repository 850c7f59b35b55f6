// SPDX-License-Identifier: Apache-2.0
#include "gemm/hopper_instances.cuh"

namespace fsdp_quant::hopper {

Kernel block_kernel(Cut cut, Tile tile, bool a_e5m2, bool b_e5m2) {
  return of_cut<Wide, Grain::kVector, Grain::kBlock>(cut, tile, a_e5m2, b_e5m2);
}

}  // namespace fsdp_quant::hopper
