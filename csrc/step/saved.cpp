// SPDX-License-Identifier: Apache-2.0
#include "step/saved.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fsdp_quant {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Raises if gradients under create_graph=True are differentiated.
struct NotDifferentiable : torch::autograd::Function<NotDifferentiable> {
  static variable_list forward(AutogradContext*, at::TensorList gradients) { return gradients.vec(); }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the layers of a "
               "gradient penalty out of fq.convert");
  }
};

}  // namespace

void forbid_double_backward(variable_list& gradients) {
  if (!at::GradMode::is_enabled()) return;
  variable_list there;
  for (const at::Tensor& t : gradients)
    if (t.defined()) there.push_back(t.requires_grad() ? t : t.detach().requires_grad_());
  const variable_list once = NotDifferentiable::apply(at::TensorList(there));
  auto next = once.begin();
  for (at::Tensor& t : gradients)
    if (t.defined()) t = *next++;
}

}  // namespace fsdp_quant
