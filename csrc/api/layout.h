// SPDX-License-Identifier: Apache-2.0
// C++ entry points of `dequantize` and `anchor_codes`.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "layout/layout.h"

namespace fsdp_quant {

// Two factors of a GEMM and the address of their product.
struct Alpha {
  Factor factors[2];
  float* out;
};

// element * scale * tensor scale in fp32, rounded once to dtype: [rows, cols]. Factors that are None are omitted. alpha:
// null, or computed by the same kernel.
at::Tensor decode(
    const at::Tensor& data, const MaybeTensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    int64_t cols, int64_t row0, at::ScalarType dtype, const Alpha* alpha);

// Decode scales [count] of a two-level format from tensor amaxes. encoding: that of the amaxes.
at::Tensor tensor_decode_scale(const at::Tensor& tensor_amax, int64_t encoding);

// Re-express codes of blocks [rows, cols] with power-of-two scales using one exponent E per line (run 0), per run of a line,
// per tile (kOfTile), or per tensor (whole). Returns codes of one byte and 2^(E - 127): [lines], [runs, lines rounded up to 4],
// [lines / 128, contraction / 128 rounded up to 4] or [1]; E is 0 for an empty line. Stacked matrices [count, rows, row bytes] are processed separately and have no runs. Two-level codes become
// ScaleLayout::kOperand, for one matrix.
std::tuple<at::Tensor, at::Tensor> anchor_codes(
    const at::Tensor& data, const at::Tensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    bool transposed, bool whole, int64_t cols, int64_t run = 0);

// Bytes [count, rows, cols] as [count, cols, rows].
at::Tensor transpose_stack(const at::Tensor& data);

// Codes [rows, cols] of 8 or 4 bits as [cols, rows].
at::Tensor transpose_codes(const at::Tensor& data, int64_t rows, int64_t cols, int64_t bits);

}  // namespace fsdp_quant
