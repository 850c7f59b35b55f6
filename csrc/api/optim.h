// SPDX-License-Identifier: Apache-2.0
// Checked arguments of an Adam step.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "optim/adam.h"

namespace fsdp_quant {

// Lists with one entry per master. Masters share a dtype, as do gradients and moments.
struct AdamTensors {
  AdamTensors(
      at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::IntArrayRef row,
      const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf);
  AdamTensor at(size_t i) const;

  at::TensorList master, grad, first, second;
  at::IntArrayRef row;
  int64_t rows;  // of the scalars
  at::ScalarType master_dtype, grad_dtype, moments_dtype;
  AdamStep step;
};

}  // namespace fsdp_quant
