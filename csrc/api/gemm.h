// The operator `gemm`, for other operators.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace fsdp_quant {

using MaybeTensor = std::optional<at::Tensor>;

// alpha * a b^T + bias. Kinds are element | scaling << 3, in the numbers of quantize/quantize.h and gemm/cublaslt.h.
at::Tensor gemm(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, at::ScalarType out_dtype, const MaybeTensor& bias, const MaybeTensor& alpha, int64_t sm_count,
    bool fast_accumulation, int64_t algorithm);

}  // namespace fsdp_quant
