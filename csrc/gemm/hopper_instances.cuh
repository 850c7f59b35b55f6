// SPDX-License-Identifier: Apache-2.0
// The tiles of one pair of scales, for each pair of elements and each cut.
#pragma once

#include "gemm/hopper.h"
#include "gemm/hopper_kernel.cuh"

namespace fsdp_quant::hopper {

template <class S, Grain kA, Grain kB, Cut kCut>
Kernel of_elements(bool a_e5m2, bool b_e5m2) {
  if (a_e5m2) return describe<S, kA, kB, true, false, kCut>();
  if (!b_e5m2) return describe<S, kA, kB, false, false, kCut>();
  if constexpr (kCut == Cut::kNone) return describe<S, kA, kB, false, true, kCut>();
  return {};
}

// `Large` is of the tile of 256 rows.
template <class Large, Grain kA, Grain kB, Cut kCut>
Kernel of_tile(Tile tile, bool a_e5m2, bool b_e5m2) {
  using Small = Shape<128, 5, 1, true>;
  return tile == Tile::k256x128x2 ? of_elements<Large, kA, kB, kCut>(a_e5m2, b_e5m2)
                                  : of_elements<Small, kA, kB, kCut>(a_e5m2, b_e5m2);
}

template <class Large, Grain kA, Grain kB>
Kernel of_cut(Cut cut, Tile tile, bool a_e5m2, bool b_e5m2) {
  if (cut == Cut::kNone) return {};
  return cut == Cut::kRows ? of_tile<Large, kA, kB, Cut::kRows>(tile, a_e5m2, b_e5m2)
                           : of_tile<Large, kA, kB, Cut::kDepth>(tile, a_e5m2, b_e5m2);
}

// Wide staging and 3 stages, or narrow and 4: the faster one, by mode.
using Wide = Shape<256, 3, 2, false>;
using Deep = Shape<256, 4, 2, true>;

}  // namespace fsdp_quant::hopper
