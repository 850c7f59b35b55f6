// SPDX-License-Identifier: Apache-2.0
// A linear layer's step in eager mode: each of its passes is one call, which quantizes a tensor and multiplies its codes, so
// that the host stays ahead of the device. Each part is an operator of its own too.
//
//   forward   x.rowwise, x.columnwise = quantize(x)         y  = x.rowwise w.rowwise^T + bias
//   backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = dy.rowwise w.columnwise^T
//                                                           dw = dy.columnwise x.columnwise^T
//
// x [.., K], w [N, K]. The weight comes as values, which the forward quantizes, in both directions where dgrad follows; or as the
// buffers of its codes, of which the columnwise ones may be empty until the backward (FSDP2 gathers them again).
//
// Host time is Python, and the dispatcher's way through a custom operator's autograd. In its place
// (H200) the host of an eager 1024 x 1024 layer rose from 2.0 to 5.4 times nn.Linear's (mxfp8: 4.0
// to 7.4), four fused MLPs fell from 1.593 to 1.517 of compiled bf16, Llama at 2048 tokens from
// .945 to .474. A microsecond each on a slow host: `at::empty` through the dispatcher, a view, a
// name looked up in an nn.Module.
#include <array>
#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "step/slots.h"
#include "step/weight.h"

namespace fsdp_quant::step {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// y [rows, cols] in the shape of its input; no view, so that users may write it in place.
at::Tensor of_shape(const at::Tensor& y, at::IntArrayRef sizes) {
  if (y.sizes() == sizes) return y;
  return at::empty({0}, y.options()).set_(y.storage(), y.storage_offset(), sizes);
}

// y, then the codes of x that were made or given (`codes`, of an earlier call).
std::vector<at::Tensor> forward(
    LinearCall& call, const at::Tensor& x, const MaybeTensor& bias, const Weight& weight, bool dgrad, const MaybeTensor& amaxes,
    const std::vector<at::Tensor>& codes) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(x.device());
  const LinearPlan& plan = *call.plan;
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kInput];
  const at::Tensor rows = !codes.empty() && r[kRowwise].is_quantized() ? x : matrix(x);  // x may have no values
  const bool col = call.saves && plan.saves == Saves::kCodes;
  Encodings made;
  if (codes.empty()) {
    made = quantize_slot(call, kInput, rows, true, col, Amaxes::given(amaxes, x));
  } else {
    size_t at = 0;
    for (const Direction d : {kRowwise, kColumnwise})
      if (wants(plan, kInput, d, true, col)) made[d] = take(codes, at, r[d]);
  }
  const Encoded values = {rows, {}, {}, {}};
  const Operand a = operand_of(r[kRowwise], kRowwise, r[kRowwise].is_quantized() ? made[kRowwise] : values);
  size_t at = 0;
  const OperandSpec& w = plan.operand_specs[kWeight][kRowwise];
  const std::vector<at::Tensor> operand = weight_operand(call, weight, dgrad);
  const Operand b = operand_of(w, kRowwise, take(operand, at, w), &a);
  const at::Tensor y = multiply(a, b, x.scalar_type(), bias);
  watch(call, kFprop, a, b);
  count(call.handle, kSlots * kDirections + kFprop);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  std::vector<at::Tensor> result = {of_shape(y, sizes)};
  for (const Direction d : {kRowwise, kColumnwise}) append(result, r[d], made[d]);
  return result;
}

// Of the forward's result, what the backward keeps of x.
std::vector<at::Tensor> saved_of(const LinearCall& call, const at::Tensor& x, const std::vector<at::Tensor>& result) {
  const LinearPlan& plan = *call.plan;
  if (!call.saves) return {};
  if (plan.saves == Saves::kInput) return {x};
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kInput];
  size_t at = 1;
  Encoded kept;
  for (const Direction d : {kRowwise, kColumnwise})
    if (wants(plan, kInput, d, true, true)) kept = take(result, at, r[d]);  // the last is columnwise, or serves it
  std::vector<at::Tensor> saved;
  append(saved, r[kColumnwise].same ? r[kRowwise] : r[kColumnwise], kept);
  return saved;
}

// dx [rows, K], dw [N, K], db [N]; undefined where they are not needed. Memory is
// let go as soon as it has served: dy as its codes are there, and `saved` and the codes of wgrad before dx is made.
std::array<at::Tensor, 3> backward(
    const LinearCall& call, at::Tensor dy, std::vector<at::Tensor> saved, bool needs_x, bool needs_w,
    bool needs_b, const Amaxes& known) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(dy.device());
  const LinearPlan& plan = *call.plan;
  const at::ScalarType dtype = dy.scalar_type();
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kGradOutput];
  std::array<at::Tensor, 3> result;
  const EncodeExtras extras = {nullptr, nullptr, needs_b ? &result[2] : nullptr};
  Encodings made = quantize_slot(call, kGradOutput, dy, needs_x, needs_w, known, extras);
  if (needs_b && !result[2].defined()) result[2] = dy.sum(0);
  for (int d = 0; d < kDirections; ++d)
    if (!r[d].is_quantized()) made[d].data = dy;
  dy.reset();
  if (needs_w) {
    const OperandSpec& x = plan.operand_specs[kInput][kColumnwise];
    const Operand a = operand_of(r[kColumnwise], kColumnwise, made[r[kColumnwise].same ? kRowwise : kColumnwise]);
    Encoded kept;
    if (plan.saves == Saves::kCodes) {
      size_t at = 0;
      kept = take(saved, at, x);
    } else {
      kept.data = matrix(saved.at(0));
      if (x.is_quantized()) {
        Encodings again = quantize_slot(call, kInput, kept.data, false, true, {});
        kept = again[x.same ? kRowwise : kColumnwise];
      }
    }
    const Operand b = operand_of(x, kColumnwise, kept, &a);
    result[1] = multiply(a, b, dtype, std::nullopt);
    watch(call, kWgrad, a, b);
    count(call.handle, kSlots * kDirections + kWgrad);
  }
  saved.clear(), made[kColumnwise] = {};
  if (needs_x) {
    const Operand a = operand_of(r[kRowwise], kRowwise, made[kRowwise]);
    const OperandSpec& w = plan.operand_specs[kWeight][kColumnwise];
    size_t at = 0;
    const Operand b = operand_of(w, kColumnwise, take(call.columnwise, at, w), &a);
    result[0] = multiply(a, b, dtype, std::nullopt);
    watch(call, kDgrad, a, b);
    count(call.handle, kSlots * kDirections + kDgrad);
  }
  return result;
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias,
      const c10::intrusive_ptr<LinearCall>& call, const Weight* weight, bool dgrad, const MaybeTensor* amaxes,
      const std::vector<at::Tensor>* codes, std::vector<at::Tensor>* result) {
    *result = step::forward(*call, x, bias, *weight, dgrad, *amaxes, *codes);
    call->kept.keep(saved_of(*call, x, *result));
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["dtype"] = static_cast<int64_t>(edge.scalar_type());
    ctx->saved_data["shape"] = x.sizes();
    if (bias.has_value()) ctx->saved_data["bias"] = static_cast<int64_t>(bias->scalar_type());
    return (*result)[0];
  }

  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    constexpr size_t kInputs = 9;
    variable_list result(kInputs);
    at::Tensor dy = std::move(gradients[0]);
    if (!dy.defined()) return result;
    const auto call = c10::static_intrusive_pointer_cast<LinearCall>(ctx->saved_data["call"].toCapsule());
    const auto dtype_of_weight = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    std::vector<at::Tensor> saved = call->kept.take();  // by hooks, which may run a forward again
    const bool has_bias = ctx->saved_data.count("bias") != 0;
    const bool needs_x = ctx->needs_input_grad(0), needs_w = ctx->needs_input_grad(1);
    const bool needs_b = has_bias && ctx->needs_input_grad(2);
    if (needs_x) check_not_freed(*call);
    variable_list made(3);
    {
      const at::AutoGradMode no_graph(false);
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      if (dy.key_set().has(c10::DispatchKey::Python)) dy = dy.clone();  // of a collective that is under way: waits
      const Amaxes known = Amaxes::given(call->grad_amaxes, dy);
      dy = matrix(dy);
      auto [dx, dw, db] = step::backward(*call, std::move(dy), std::move(saved), needs_x, needs_w, needs_b, known);
      if (needs_x) made[0] = of_shape(dx, ctx->saved_data["shape"].toIntVector());
      if (needs_w) made[1] = dw.scalar_type() == dtype_of_weight ? dw : dw.to(dtype_of_weight);
      if (needs_b) made[2] = db.to(static_cast<at::ScalarType>(ctx->saved_data["bias"].toInt()));
    }
    if (!Saved::graph_is_kept()) call->columnwise.clear();
    refuse_second_derivatives(made);
    std::move(made.begin(), made.end(), result.begin());
    return result;
  }

  // FSDP2 frees gathered codes when it reshards, and fills them again before the backward that reads them.
  static void check_not_freed(const LinearCall& call) {
    TORCH_CHECK(!call.columnwise.empty(), "the codes that this backward reads were freed by an earlier one; pass retain_graph=True "
                "to it");
    for (const at::Tensor& t : call.columnwise)
      TORCH_CHECK(t.numel() == 0 || t.storage().nbytes() != 0, "StaleWeightError: the columnwise codes of a gathered weight were "
                  "freed: FSDP resharded the weight or gathered the other direction only; if this block is recomputed in a way "
                  "that hooks cannot see, set recomputes_forward=True on its fq.Linear");
  }
};

// Codes of the input act(gate) * up, for a step whose x has the shape alone.
std::vector<at::Tensor> linear_gated(
    const at::Tensor& gate, const at::Tensor& up, int64_t activation, int64_t plan, bool save, const at::Tensor& step,
    const at::Tensor& ids, const MaybeTensor& guard, at::TensorList factors, at::TensorList histories) {
  check_cuda(gate, "gate");
  TORCH_CHECK_VALUE(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), "up is ", up.scalar_type(), " ",
                    up.sizes(), "; wanted gate's ", gate.scalar_type(), " ", gate.sizes());
  TORCH_CHECK_VALUE(activation >= 0 && activation <= static_cast<int64_t>(Activation::kReluSquared),
                    "there is no activation ", activation);
  const auto call = call_of(plan, save, step, ids, guard, factors, {}, histories, {});
  TORCH_CHECK_VALUE(call->plan->operand_specs[kInput][kRowwise].is_quantized() && (!save || call->plan->saves == Saves::kCodes),
                    "the layer multiplies or keeps the input itself; make it first");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(gate.device());
  const GatedInput gated = {matrix(up), static_cast<Activation>(activation)};
  std::vector<at::Tensor> codes;
  const Encodings made = quantize_slot(*call, kInput, matrix(gate), true, save, {}, {&gated});
  for (const Direction d : {kRowwise, kColumnwise}) append(codes, call->plan->operand_specs[kInput][d], made[d]);
  return codes;
}

std::vector<at::Tensor> dispatch_step(
    bool with_node, const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias, const Weight& weight, int64_t plan,
    bool save, const at::Tensor& step, const at::Tensor& ids, const MaybeTensor& guard, at::TensorList factors,
    at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories, at::TensorList codes,
    const MaybeTensor& amaxes, const MaybeTensor& grad_amaxes) {
  check_cuda(x, "x");
  const auto call = call_of(plan, save, step, ids, guard, factors, grad_factors, histories, grad_histories);
  call->grad_amaxes = grad_amaxes;
  const std::vector<at::Tensor> given = codes.vec();
  if (!with_node) return forward(*call, x, bias, weight, false, amaxes, given);
  std::vector<at::Tensor> result;
  at::Tensor y = Linear::apply(x, edge, bias, call, &weight, x.requires_grad(), &amaxes, &given, &result);
  result[0] = std::move(y);
  return result;
}

template <bool kWithNode>
std::vector<at::Tensor> linear_step(
    const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias, const MaybeTensor& values, at::TensorList rowwise,
    at::TensorList columnwise, int64_t plan, bool round_to_bf16, bool save, const at::Tensor& step, const at::Tensor& ids,
    const MaybeTensor& guard, at::TensorList factors, at::TensorList grad_factors, at::TensorList weight_factors,
    at::TensorList histories, at::TensorList grad_histories, at::TensorList weight_histories, at::TensorList codes,
    const MaybeTensor& amaxes, const MaybeTensor& grad_amaxes) {
  const Weight weight = {values, round_to_bf16, rowwise, columnwise, weight_factors, weight_histories};
  return dispatch_step(kWithNode && at::GradMode::is_enabled(), x, edge, bias, weight, plan, save, step, ids, guard, factors,
                  grad_factors, histories, grad_histories, codes, amaxes, grad_amaxes);
}

}  // namespace

void register_linear(torch::Library& m) {
  // Eager mode alone: the guard and the histories are written, which the schema does not say.
  m.def(
      "linear_step(Tensor x, Tensor edge, Tensor? bias, Tensor? values, Tensor[] rowwise, Tensor[] columnwise, int plan, "
      "bool round_to_bf16, bool save, Tensor step, Tensor ids, Tensor? guard, Tensor[] factors, Tensor[] grad_factors, "
      "Tensor[] weight_factors, Tensor[] histories, Tensor[] grad_histories, Tensor[] weight_histories, Tensor[] codes, "
      "Tensor? amaxes, Tensor? grad_amaxes) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_step<false>));
  m.impl("linear_step", torch::dispatch(c10::DispatchKey::AutogradCUDA, linear_step<true>));
  m.def(
      "linear_gated(Tensor gate, Tensor up, int activation, int plan, bool save, Tensor step, Tensor ids, Tensor? guard, "
      "Tensor[] factors, Tensor[] histories) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_gated));
  m.impl("linear_gated", torch::dispatch(c10::DispatchKey::AutogradCUDA, linear_gated));
}

}  // namespace fsdp_quant::step
