// SPDX-License-Identifier: Apache-2.0
// What a step of Adam is given, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "optim/adam.h"

namespace fsdp_quant {

// Lists of one entry a master; masters have one dtype, and gradients and moments have.
struct AdamTensors {
  AdamTensors(
      at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::IntArrayRef row,
      const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf);
  AdamTensor at(size_t i) const;

  at::TensorList master, grad, first, second;
  at::IntArrayRef row;
  int64_t rows;  // of the scalars
  at::ScalarType of_master, of_grad, of_moments;
  AdamStep step;
};

}  // namespace fsdp_quant
