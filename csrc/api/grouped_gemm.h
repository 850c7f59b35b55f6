// SPDX-License-Identifier: Apache-2.0
// What the operators on groups of tokens do, for other operators.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"

namespace fsdp_quant {

// Where the tokens of groups lie (layout/token_groups.h), in one buffer: int32 sources [tiles, 4], offsets [groups + 1], padded
// [groups + 1]. wrong: null, or int64 [1] on the device or pinned on the host, which wrong ends set to tag << 32 | tokens.
at::Tensor token_groups(const at::Tensor& ends, int64_t tokens, const MaybeTensor& wrong, int64_t tag);

struct TokenTables {
  const int32_t *sources, *offsets, *padded;
  int64_t tiles, groups;
};

TokenTables tables_of(const at::Tensor& buffer, int64_t groups, const at::Tensor& like);

// Codes and scales as an operand of a product of groups. kind: see `gemm`.
struct GroupedOperand {
  const at::Tensor& data;
  const MaybeTensor& scale;
  int64_t kind;
};

// out[rows of e] = a[rows of e] b[e]^T. offsets: int32 [groups + 1] on the device.
void m_grouped_gemm(
    const at::Tensor& out, const GroupedOperand& a, const GroupedOperand& b, const int32_t* offsets, int32_t* flag,
    int64_t sm_count);

// out[e] (+)= a[:, depth of e] b[:, depth of e]^T.
void k_grouped_gemm(
    const at::Tensor& out, const GroupedOperand& a, const GroupedOperand& b, const int32_t* offsets, int64_t groups,
    bool accumulate, int32_t* flag, int64_t sm_count);

}  // namespace fsdp_quant
