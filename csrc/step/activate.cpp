// SPDX-License-Identifier: Apache-2.0
// Gated activation in eager mode, with its autograd node.
#include <array>
#include <tuple>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "api/norm.h"
#include "step/saved.h"

namespace fsdp_quant::step {

namespace {

// act(g) (* u) and its amaxes. deferred: only the shape, with one element of memory and no amaxes.
std::tuple<at::Tensor, at::Tensor> activate(
    const at::Tensor& g, const MaybeTensor& u, int64_t kind, const MaybeTensor&, bool deferred, bool packed) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto [gate, up] = operands_of(g, u, packed);
  if (deferred) return {new_empty(g, {}, g.scalar_type()).expand(gate.sizes()), new_empty(g, {0}, at::kFloat)};
  const auto [h, amaxes] = activation(gate, up, kind);
  return {h, amaxes[0]};
}

struct Operands : torch::CustomClassHolder {
  Saved saved;
  MaybeTensor grad_amaxes;  // receives those of the gradients
};

// Saves g and u; the backward writes the gradients over them if nothing else holds them. packed: g holds both, as does its
// gradient.
struct Activate : torch::autograd::Function<Activate> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& g, const MaybeTensor& u, int64_t kind,
      const MaybeTensor& grad_amaxes, bool deferred, bool packed) {
    const auto operands = c10::make_intrusive<Operands>();
    operands->saved.save(u.has_value() ? std::vector<at::Tensor>{g, *u} : std::vector<at::Tensor>{g});
    operands->grad_amaxes = grad_amaxes;
    ctx->saved_data["operands"] = c10::IValue::make_capsule(operands);
    ctx->saved_data["kind"] = kind, ctx->saved_data["packed"] = packed;
    const auto [h, amaxes] = activate(g, u, kind, grad_amaxes, deferred, packed);
    ctx->mark_non_differentiable({amaxes});
    return {h, amaxes};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list result(6);
    at::Tensor dh = std::move(gradients[0]);
    if (!dh.defined()) return result;
    if (dh.key_set().has(c10::DispatchKey::Python)) dh = dh.clone();  // asynchronous collective output: waits
    const auto operands = c10::static_intrusive_pointer_cast<Operands>(ctx->saved_data["operands"].toCapsule());
    std::vector<at::Tensor> saved_tensors = operands->saved.unpack();
    const bool frees = !Saved::retains_graph();
    std::array<at::Tensor, 2> values, written;
    for (size_t i = 0; i < saved_tensors.size(); ++i) {
      values[i] = detach_values(saved_tensors[i]);
      if (frees && is_sole(values[i]) && values[i].is_contiguous()) written[i] = values[i];
    }
    {
      const at::AutoGradMode no_graph(false);
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      dh = dh.contiguous();
      if (!is_aligned(dh.const_data_ptr(), 16)) dh = dh.clone();
      const int64_t kind = ctx->saved_data["kind"].toInt();
      const bool packed = ctx->saved_data["packed"].toBool();
      if (packed) {
        result[0] = written[0].defined() ? written[0] : new_empty(values[0], values[0].sizes(), values[0].scalar_type());
        const auto [g, u] = operands_of(values[0], std::nullopt, true);
        const auto [dg, du] = operands_of(result[0], std::nullopt, true);
        backward_into(dg, *du, operands->grad_amaxes, dh, g, u, kind, true);
      } else {
        const MaybeTensor u = values[1].defined() ? MaybeTensor(values[1]) : std::nullopt;
        const auto [dg, du, amaxes] = backward_into(written[0], written[1], operands->grad_amaxes, dh, values[0], u, kind);
        result[0] = dg;
        if (u.has_value()) result[1] = du;
      }
    }
    forbid_double_backward(result);
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> activate_autograd(
    const at::Tensor& g, const MaybeTensor& u, int64_t kind, const MaybeTensor& grad_amaxes, bool deferred, bool packed) {
  const torch::autograd::variable_list outputs = Activate::apply(g, u, kind, grad_amaxes, deferred, packed);
  return {outputs[0], outputs[1]};
}

}  // namespace

void register_activate(torch::Library& m) {
  // Eager mode only: the backward writes `grad_amaxes`.
  m.def("activate(Tensor g, Tensor? u, int kind, Tensor? grad_amaxes, bool deferred, bool packed) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, activate));
  m.impl("activate", torch::dispatch(c10::DispatchKey::AutogradCUDA, activate_autograd));
}

}  // namespace fsdp_quant::step
