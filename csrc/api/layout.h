// SPDX-License-Identifier: Apache-2.0
// What the operators `dequantize` and `anchor_codes` do, for other operators.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "layout/layout.h"

namespace fsdp_quant {

// Two factors of a product and where their own product goes.
struct Alpha {
  Factor factors[2];
  float* out;
};

// element * scale * tensor scale in fp32, rounded once to dtype: [rows, cols]. A factor that is not given is left out.
// alpha: null, or made on the way.
at::Tensor decode(
    const at::Tensor& data, const MaybeTensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    int64_t cols, int64_t row0, at::ScalarType dtype, const Alpha* alpha);

// The decode scales of a two-level format's tensors [count], from their amaxes.
// direction: of the encoding that the amaxes are of.
at::Tensor tensor_decode_scale(const at::Tensor& tensor_amax, int64_t encoding);

// Codes of blocks [rows, cols] whose scales are powers of two against one exponent per line (run 0), per so many elements of
// one, or of the tensor (whole), as codes of a byte, and 2^(E - 127) of each: [lines], [runs, lines rounded up to 4] or [1];
// of a line without blocks E is 0. Of matrices [count, rows, row bytes], each by itself, stacked, not of runs. Two-level codes as
// ScaleLayout::kOperand has them, of one matrix.
std::tuple<at::Tensor, at::Tensor> anchor_codes(
    const at::Tensor& data, const at::Tensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    bool transposed, bool whole, int64_t cols, int64_t run = 0);

}  // namespace fsdp_quant
