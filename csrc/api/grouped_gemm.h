// SPDX-License-Identifier: Apache-2.0
// C++ entry points of the grouped GEMMs.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/gemm.h"
#include "api/quantize.h"

namespace fsdp_quant {

// Build the tables of layout/token_groups.h in one buffer: int32 sources [tiles, 4], offsets [groups + 1], padded [groups +
// 1]. wrong: null, or int64 [1] on the device or in pinned memory; invalid ends set it to tag << 32 | tokens.
at::Tensor token_groups(const at::Tensor& ends, int64_t tokens, const MaybeTensor& wrong, int64_t tag);
// tiles: of all groups; default, an upper bound for any groups.
at::Tensor token_groups(const at::Tensor& ends, int64_t tokens, int64_t tiles, const MaybeTensor& wrong, int64_t tag);

TokenTables tables_of(const at::Tensor& buffer, int64_t groups, const at::Tensor& like);

// M-grouped: out[rows of e] = a[rows of e] b[e]^T (+ bias[e]). offsets: int32 [groups + 1] on the device. bias: bf16 or fp32
// [groups, N], aligned to 16 bytes; fp32 sums plus bias are rounded once.
void m_grouped_gemm(
    const at::Tensor& out, const GemmOperand& a, const GemmOperand& b, const MaybeTensor& bias, const int32_t* offsets,
    int32_t* flag, int64_t sm_count);

// K-grouped: out[e] (+)= a[:, columns of e] b[:, columns of e]^T.
void k_grouped_gemm(
    const at::Tensor& out, const GemmOperand& a, const GemmOperand& b, const int32_t* offsets, int64_t groups,
    bool accumulate, int32_t* flag, int64_t sm_count);

}  // namespace fsdp_quant
