// The operator `gemm`, for other operators.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"

namespace fsdp_quant {

// alpha * a b^T + bias. Kinds are element | scaling << 3, in the numbers of quantize/quantize.h and gemm/cublaslt.h.
at::Tensor gemm(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, at::ScalarType out_dtype, const MaybeTensor& bias, const MaybeTensor& alpha, int64_t sm_count = 0,
    bool fast_accumulation = false, int64_t algorithm = 0);

}  // namespace fsdp_quant
