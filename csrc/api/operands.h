// SPDX-License-Identifier: Apache-2.0
// Build and check GEMM operands from tensors.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "gemm/gemm_problem.h"

namespace fsdp_quant {

inline int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

inline bool is_half(cudaDataType_t type) { return type == CUDA_R_16BF || type == CUDA_R_16F; }
inline bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

// Multiprocessors of a device, limited to `most` unless it is 0.
int32_t processors_of(int device, int64_t most);

// 10 * major + minor, cached per device.
int capability_of(int device);

cudaDataType_t type_of(at::ScalarType dtype, const char* name);

// Element and scaling of a kind (element | scaling << 3). Sets no address and no order.
Operand operand_of_kind(int64_t kind, const char* name);

// Data, type and order of an operand [rows, K], without scales.
Operand operand_of(const at::Tensor& x, int64_t kind, const char* name);

// Set the scales of an operand [outer, k]: one set, or `count` stacked sets. Returns whether there are `count`.
bool set_scale(
    Operand& o, const MaybeTensor& scale, const at::Tensor& x, int64_t outer, int64_t k, const char* name,
    int64_t count = 1);

}  // namespace fsdp_quant
