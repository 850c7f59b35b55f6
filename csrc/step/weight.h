// SPDX-License-Identifier: Apache-2.0
// Weight operands of linear and expert layers.
#pragma once

#include <vector>

#include "step/slots.h"

namespace fsdp_quant::step {

// Quantize a weight; returns operands as listed by `append`, stacked for matrices [E, N, K]. Anchored codes equal those of
// anchored compact codes, as in a gather; one kernel computes both where possible. amaxes: of the matrix.
std::vector<at::Tensor> linear_weight(
    const at::Tensor& weight, int64_t plan, bool row, bool col, bool round_to_bf16, at::TensorList factors,
    at::TensorList histories, const ScalingAmaxes& amaxes = {});

// A weight argument: values to quantize, or buffers of its operands.
struct Weight {
  MaybeTensor values;
  bool round_to_bf16;
  at::TensorList rowwise, columnwise, factors, histories;
};

// Return the rowwise operand of the weight; store the columnwise one in the call if dgrad follows.
std::vector<at::Tensor> weight_operand(LinearCall& call, const Weight& weight, bool dgrad);

}  // namespace fsdp_quant::step
