// SPDX-License-Identifier: Apache-2.0
#include "gemm/sm90_gemm_instances.cuh"

namespace fsdp_quant::sm90 {

namespace {

template <GroupedDim kGrouped>
Kernel aligned_rows(Tile tile) {
  return tile == Tile::k256x128x2 ? describe<Wide, Granularity::kBf16, Granularity::kBf16, false, false, kGrouped>()
                                  : describe<Small, Granularity::kBf16, Granularity::kBf16, false, false, kGrouped>();
}

}  // namespace

Kernel grouped_bf16_kernel(GroupedDim dim, Tile tile) {
  return dim == GroupedDim::kM   ? aligned_rows<GroupedDim::kM>(tile)
         : dim == GroupedDim::kK ? aligned_rows<GroupedDim::kK>(tile)
                                 : Kernel{};
}

}  // namespace fsdp_quant::sm90
