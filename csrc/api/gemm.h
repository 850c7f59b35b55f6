// SPDX-License-Identifier: Apache-2.0
// The operator `gemm`, for other operators.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"

namespace fsdp_quant {

// alpha * a b^T + bias. Kinds are element | scaling << 3, in the numbers of quantize/quantize.h and gemm/cublaslt.h.
at::Tensor gemm(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, at::ScalarType out_dtype, const MaybeTensor& bias, const MaybeTensor& alpha, int64_t sm_count = 0);

// Adds to guard[product], of [3, 2], what the product of these codes lost to the anchors of its operands, and its formats' own
// errors, both as mean squares: see gemm/product_error.h. counted: how those of a are counted, those of b << 4. Of matrices [E, outer, k]
// as of one.
void product_error(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, int64_t counted, const at::Tensor& step, const at::Tensor& guard, int64_t product);

}  // namespace fsdp_quant
