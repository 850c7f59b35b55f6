// SPDX-License-Identifier: Apache-2.0
// Operands of products, from tensors that are checked on the way.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "gemm/gemm_problem.h"

namespace fsdp_quant {

inline int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

inline bool is_half(cudaDataType_t type) { return type == CUDA_R_16BF || type == CUDA_R_16F; }
inline bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

// Multiprocessors of a device, `most` at most; 0: all.
int32_t processors_of(int device, int64_t most);

// 10 * major + minor. The driver is asked once for a device.
int capability_of(int device);

cudaDataType_t type_of(at::ScalarType dtype, const char* name);

// Element and scaling of a kind, element | scaling << 3 in the numbers of the enums. No address, no order.
Operand operand_of_kind(int64_t kind, const char* name);

// Data, type and order of an operand [rows, K], less its scales.
Operand operand_of(const at::Tensor& x, int64_t kind, const char* name);

// The scales of an operand, of which there are `count` or 1 times as many as one operand [outer, k] has. Returns whether
// there are `count`.
bool set_scale(
    Operand& o, const MaybeTensor& scale, const at::Tensor& x, int64_t outer, int64_t k, const char* name,
    int64_t count = 1);

}  // namespace fsdp_quant
