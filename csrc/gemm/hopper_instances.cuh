// The tiles of one pair of scales, for each pair of elements.
#pragma once

#include "gemm/hopper.h"
#include "gemm/hopper_kernel.cuh"

namespace fsdp_quant::hopper {

using Large = Shape<256, 3, 2, false, false>;
using Small = Shape<128, 4, 2, false, false>;
using Single = Shape<128, 4, 1, false, false>;

template <class S, Grain kA, Grain kB>
Kernel of_elements(bool a_e5m2, bool b_e5m2) {
  if (a_e5m2) return describe<S, kA, kB, true, false>();
  return b_e5m2 ? describe<S, kA, kB, false, true>() : describe<S, kA, kB, false, false>();
}

template <Grain kA, Grain kB>
Kernel of_tile(Tile tile, bool a_e5m2, bool b_e5m2) {
  switch (tile) {
    case Tile::k256x128x2: return of_elements<Large, kA, kB>(a_e5m2, b_e5m2);
    case Tile::k128x128x2: return of_elements<Small, kA, kB>(a_e5m2, b_e5m2);
    default: return of_elements<Single, kA, kB>(a_e5m2, b_e5m2);
  }
}

}  // namespace fsdp_quant::hopper
