// How operators describe a direction, and the geometry of its buffers.
#pragma once

#include <optional>
#include <vector>

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

using MaybeTensor = std::optional<at::Tensor>;

// The operator `quantize`: data, scale, tensor amax where it is not given (two-level), amax where one scale spans the
// contraction and it is not given, of each side.
std::vector<at::Tensor> quantize_new(
    const at::Tensor& x, int64_t row, int64_t col, double row_eps, double col_eps, int64_t row0, bool through_bf16,
    const MaybeTensor& row_amax, const MaybeTensor& row_tensor_amax, const MaybeTensor& row_enc,
    const MaybeTensor& row_key, const MaybeTensor& col_amax, const MaybeTensor& col_tensor_amax,
    const MaybeTensor& col_enc, const MaybeTensor& col_key);

// MXFP8 whose blocks share the scale of their run of the contraction: 8-bit operands with fp32 scales that leave the main
// loop. Returns data, scale of each side and, unless `counts` are given to add to, int64 [2, 2]: blocks far below their
// anchor, nonzero.
std::vector<at::Tensor> anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool through_bf16, const at::Tensor* counts);

Geometry geometry_of(const Side& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0);

}  // namespace fsdp_quant
