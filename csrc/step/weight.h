// SPDX-License-Identifier: Apache-2.0
// Operands of the weight of a linear layer, or of experts.
#pragma once

#include <vector>

#include "step/slots.h"

namespace fsdp_quant::step {

// The weight's operands, as `append` lists them; of matrices [E, N, K] those of each, stacked. Anchored codes are those of
// compact codes, as they are in a gather; one kernel makes both where it can.
std::vector<at::Tensor> linear_weight(
    const at::Tensor& weight, int64_t plan, bool row, bool col, bool round_to_bf16, at::TensorList factors,
    at::TensorList histories);

// A weight as a call is given it: values to quantize, or the buffers of its operands.
struct Weight {
  MaybeTensor values;
  bool round_to_bf16;
  at::TensorList rowwise, columnwise, factors, histories;
};

// The rowwise operand of the weight; the columnwise one, where dgrad follows, goes to the call.
std::vector<at::Tensor> weight_operand(LinearCall& call, const Weight& weight, bool dgrad);

}  // namespace fsdp_quant::step
