// SPDX-License-Identifier: Apache-2.0
#include "gemm/hopper_instances.cuh"

namespace fsdp_quant::hopper {

namespace {

template <Cut kCut>
Kernel of_values(Tile tile) {
  using Small = Shape<128, 5, 1, true>;
  return tile == Tile::k256x128x2 ? describe<Wide, Grain::kValues, Grain::kValues, false, false, kCut>()
                                  : describe<Small, Grain::kValues, Grain::kValues, false, false, kCut>();
}

}  // namespace

Kernel values_kernel(Cut cut, Tile tile) {
  return cut == Cut::kRows ? of_values<Cut::kRows>(tile) : cut == Cut::kDepth ? of_values<Cut::kDepth>(tile) : Kernel{};
}

}  // namespace fsdp_quant::hopper
