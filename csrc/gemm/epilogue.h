// SPDX-License-Identifier: Apache-2.0
// Device code of cuBLASLt's GEMMs: beta in device memory, required if alpha is there, and an epilogue that applies row scales.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm_problem.h"

namespace fsdp_quant {

// Address of a 0 or 1 on the current device.
cudaError_t device_beta(bool one, const float** beta);

// out = alpha * a_scale[row] * b_scale[col] * sums (+ out) (+ bias), rounded once. p: scales of rows or tensors; N a multiple
// of 8; bias in out's type. sums: fp32 [m, n], rows `ld` apart and aligned to 16 bytes, as are out's; may be p.out.
cudaError_t launch_scaled_epilogue(const GemmProblem& p, const float* sums, int64_t ld, cudaStream_t stream);

}  // namespace fsdp_quant
