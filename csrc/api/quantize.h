// How operators describe a direction, and the geometry of its buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

// A side as Python passes it: one integer of bit fields (bits 0-2 element, 3-5 scale, 6-15 outer, 16-25 contraction,
// 26 stochastic, 27 rotated, 28 transposed, 29-30 scale layout); 0 for a direction that is not made. The numbers are
// those of the enums in quantize/quantize.h.
Side parse_side(int64_t packed, double eps, const char* name);

struct Geometry {
  int64_t rows, cols;                  // of the codes: rotation fills the contraction
  int64_t data_rows, data_cols;        // of the data buffer, in bytes a row
  int64_t scale_rows, scale_cols;      // compact block grid
  int64_t scale_numel;                 // of the scale buffer, in its layout
  Grid compact, stored;                // over lines and blocks: the compact grid, and the scale buffer's
};

Geometry geometry_of(const Side& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0);

}  // namespace fsdp_quant
