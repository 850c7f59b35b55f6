// SPDX-License-Identifier: Apache-2.0
// Kernel instances of one pair of scales, by elements, tile and grouped dim.
#pragma once

#include "gemm/sm90_gemm.h"
#include "gemm/sm90_gemm_kernel.cuh"

namespace fsdp_quant::sm90 {

// 256 rows with wide staging and 3 stages, or narrow and 4: the faster one, per scaling.
using Wide = TileConfig<256, 3, 2, false>;
using Deep = TileConfig<256, 4, 2, true>;
using Small = TileConfig<128, 5, 1, true>;

template <class S, Granularity kA, Granularity kB, GroupedDim kGrouped>
Kernel of_elements(bool a_e5m2, bool b_e5m2) {
  if (a_e5m2) return describe<S, kA, kB, true, false, kGrouped>();
  if (!b_e5m2) return describe<S, kA, kB, false, false, kGrouped>();
  if constexpr (kGrouped == GroupedDim::kNone) return describe<S, kA, kB, false, true, kGrouped>();
  return {};
}

// Large: the shape of the 256-row tile; LargeOfK: in groups of K.
template <class Large, Granularity kA, Granularity kB, GroupedDim kGrouped>
Kernel of_tile(Tile tile, bool a_e5m2, bool b_e5m2) {
  return tile == Tile::k256x128x2 ? of_elements<Large, kA, kB, kGrouped>(a_e5m2, b_e5m2)
                                  : of_elements<Small, kA, kB, kGrouped>(a_e5m2, b_e5m2);
}

template <class Large, Granularity kA, Granularity kB, class LargeOfK = Large>
Kernel of_grouped_dim(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2) {
  if (dim == GroupedDim::kNone) return {};
  return dim == GroupedDim::kM ? of_tile<Large, kA, kB, GroupedDim::kM>(tile, a_e5m2, b_e5m2)
                           : of_tile<LargeOfK, kA, kB, GroupedDim::kK>(tile, a_e5m2, b_e5m2);
}

}  // namespace fsdp_quant::sm90
