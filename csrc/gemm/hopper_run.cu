// SPDX-License-Identifier: Apache-2.0
#include "gemm/hopper_instances.cuh"

namespace fsdp_quant::hopper {

Kernel run_kernel(Tile tile, bool a_e5m2, bool b_e5m2) {
  return of_tile<Deep, Grain::kRun, Grain::kRun, Cut::kNone>(tile, a_e5m2, b_e5m2);
}

}  // namespace fsdp_quant::hopper
