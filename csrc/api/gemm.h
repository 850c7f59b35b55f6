// SPDX-License-Identifier: Apache-2.0
// C++ entry points of `gemm` and `product_error`.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "gemm/product_error.h"

namespace fsdp_quant {

// Codes and scales, or 16-bit values, of a GEMM. kind: element | scaling << 3, see gemm/capability.h.
struct GemmOperand {
  at::Tensor data;
  MaybeTensor scale;
  int64_t kind = 0;
};

// Return alpha * a b^T + bias.
at::Tensor gemm(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, at::ScalarType out_dtype, const MaybeTensor& bias, const MaybeTensor& alpha, int64_t sm_count = 0);

// Add to guard[product] (guard: [3, 2]) the error of a GEMM due to shared exponents and that of its formats, as mean squares;
// see gemm/product_error.h. counted: how codes of a are counted | those of b << 4. Matrices [E, outer, k] count as one.
// k_end: of the k that is written, on the device; null: all. Outside of captures launches in steps that `set_probed` allows.
void product_error(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, int64_t counted, const at::Tensor& step, const at::Tensor& guard, int64_t product,
    int64_t every = kProbedSteps, const int32_t* k_end = nullptr);

// The same into `out`, or added to it.
void gemm_out(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
    const MaybeTensor& b_scale, int64_t a_kind, int64_t b_kind, bool accumulate, const MaybeTensor& bias,
    const MaybeTensor& alpha, int64_t sm_count);

}  // namespace fsdp_quant
