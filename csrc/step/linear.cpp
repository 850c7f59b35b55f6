// SPDX-License-Identifier: Apache-2.0
// A linear layer's step in eager mode: one call per pass quantizes a tensor and multiplies its codes, so that the host stays
// ahead of the device. Each part is also an operator of its own.
//
//   forward   x.rowwise, x.columnwise = quantize(x)         y  = x.rowwise w.rowwise^T + bias
//   backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = dy.rowwise w.columnwise^T
//                                                           dw = dy.columnwise x.columnwise^T
//
// x [.., K], w [N, K]. The weight is given as values, which the forward quantizes (in both directions if dgrad follows), or
// as code buffers; columnwise buffers may be empty until the backward (FSDP2 gathers them again).
//
// Ranks that share the layer (linear/program.py, "who holds what"): codes of a tensor that is cut along its rows are gathered
// before a product, partial sums are summed or scattered behind it.
//
// Why: host time is Python and the dispatch of custom operators with autograd. With those instead (H200), the host time of an
// eager 1024 x 1024 layer rose from 2.0 to 5.4 times nn.Linear's (mxfp8: 4.0 to 7.4), four fused MLPs fell from 1.593 to
// 1.517 of compiled bf16, Llama at 2048 tokens from .945 to .474. Each costs a microsecond on a slow host: `at::empty`
// through the dispatcher, a view, a name lookup in an nn.Module.
#include <array>
#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include "step/ranks.h"
#include "step/slots.h"
#include "step/weight.h"

namespace fsdp_quant::step {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// y [rows, cols] in the shape of its input; not a view, so that users may write it in place.
at::Tensor with_shape(const at::Tensor& y, at::IntArrayRef sizes) {
  if (y.sizes() == sizes) return y;
  return at::empty({0}, y.options()).set_(y.storage(), y.storage_offset(), sizes);
}

// The forward computes columnwise codes of x for the backward, besides those that it multiplies.
bool saves_columnwise(const LinearCall& call) {
  if (call.plan->saves == Saves::kInput) return false;
  return !call.ranks.gathers(kInput) || sent_direction(call, kInput, kColumnwise) == kColumnwise;
}

// Returns y, then the codes of x (of this rank's rows), computed or given (`codes`, from an earlier call).
std::vector<at::Tensor> forward(LinearCall& call, const at::Tensor& x, const MaybeTensor& bias, const Weight& weight,
                                bool dgrad, const MaybeTensor& amaxes, const std::vector<at::Tensor>& codes) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(x.device());
  const LinearPlan& plan = *call.plan;
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kInput];
  const at::Tensor rows = !codes.empty() && r[kRowwise].is_quantized() ? x : matrix(x);  // x may have no values
  Encodings encoded;
  const Ranks& ranks = call.ranks;
  const bool gathers = ranks.gathers(kInput), col = call.saves && saves_columnwise(call);
  if (codes.empty()) {
    call.input_amaxes = share_amaxes(call, kInput, rows, true, call.saves);
    const Amaxes known = ranks.group ? Amaxes::of(call.input_amaxes) : Amaxes::given(amaxes, x);
    encoded = gathers ? encode_rows(call, kInput, rows, true, col, call.input_amaxes)
                      : quantize_slot(call, kInput, rows, true, col, known);
  } else {
    size_t at = 0;
    for (const Direction d : {kRowwise, kColumnwise})
      if (wants(plan, kInput, d, true, col && ranks.reader == 0)) encoded[d] = next_encoded(codes, at, r[d]);
  }
  Encoded of_rows = r[kRowwise].is_quantized() ? encoded[kRowwise] : Encoded{rows, {}, {}, {}};
  if (gathers) of_rows = Gather(call, kInput, kRowwise, of_rows).take(kRowwise, rows.size(0) * ranks.count(), rows.size(1));
  const LinearOperand a = operand_of(r[kRowwise], kRowwise, of_rows);
  size_t at = 0;
  const OperandSpec& w = plan.operand_specs[kWeight][kRowwise];
  const std::vector<at::Tensor> operand = weight_operand(call, weight, dgrad);
  const LinearOperand b = operand_of(w, kRowwise, next_encoded(operand, at, w), &a);
  at::Tensor y;
  if (ranks.pieces > 1) {
    y = scattered_product(call, a, b, x.scalar_type());
  } else {
    y = multiply(a, b, x.scalar_type(), bias);
    record_error(call, kFprop, a, b);
    count(call.handle, kSlots * kDirections + kFprop);
    if (ranks.group && !ranks.column && (ranks.is_cut() || ranks.sums)) y = Sum(ranks, std::move(y), ranks.is_cut()).take();
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  if (ranks.is_cut()) sizes[ranks.cut] = ranks.column ? sizes[ranks.cut] * ranks.count() : sizes[ranks.cut] / ranks.count();
  std::vector<at::Tensor> result = {with_shape(y, sizes)};
  for (const Direction d : {kRowwise, kColumnwise}) append(result, r[d], encoded[d]);
  return result;
}

// What the backward needs of x, from the forward's result. codes: the operand of an x that layers share, and what they save.
std::vector<at::Tensor> saved_for_backward(const LinearCall& call, const at::Tensor& x, const std::vector<at::Tensor>& codes,
                                           const std::vector<at::Tensor>& result) {
  const LinearPlan& plan = *call.plan;
  if (!call.saves) return {};
  if (call.ranks.reader != 0) return {codes.begin() + 2, codes.end()};  // behind data and scale
  if (plan.saves == Saves::kInput) return {x};
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kInput];
  size_t at = 1;
  Encoded x_codes;
  const bool col = saves_columnwise(call);
  for (const Direction d : {kRowwise, kColumnwise})
    if (wants(plan, kInput, d, true, col))
      x_codes = next_encoded(result, at, r[d]);  // the last one is columnwise or replaces it
  std::vector<at::Tensor> saved;
  append(saved, r[kColumnwise].same || !col ? r[kRowwise] : r[kColumnwise], x_codes);
  return saved;
}

// Returns dx [rows, K], dw [N, K], db [N]; undefined if not needed. Frees memory early: dy after its quantization, `saved`
// and the codes of wgrad before dgrad. Among ranks dgrad comes first: gathers for wgrad overlap it, and the sum of dx overlaps
// wgrad. dy: rows of this rank.
std::array<at::Tensor, 3> backward(
    const LinearCall& call, at::Tensor dy, std::vector<at::Tensor> saved, bool needs_x, bool needs_w,
    bool needs_b, const Amaxes& known) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(dy.device());
  const LinearPlan& plan = *call.plan;
  const Ranks& ranks = call.ranks;
  const at::ScalarType dtype = dy.scalar_type();
  const OperandSpec(&r)[kDirections] = plan.operand_specs[kGradOutput];
  const OperandSpec& of_x = plan.operand_specs[kInput][kColumnwise];
  const bool gathers = ranks.gathers(kGradOutput), needs[kDirections] = {needs_x, needs_w};
  const int64_t rows = dy.size(0) * (gathers ? ranks.count() : 1), cols = dy.size(1);
  std::array<at::Tensor, 3> result;
  const EncodeExtras extras = {nullptr, nullptr, needs_b ? &result[2] : nullptr};
  const ScalingAmaxes amaxes = share_amaxes(call, kGradOutput, dy, needs_x, needs_w);
  Encodings encoded = gathers ? encode_rows(call, kGradOutput, dy, needs_x, needs_w, amaxes)
                              : quantize_slot(call, kGradOutput, dy, needs_x, needs_w, ranks.group ? Amaxes::of(amaxes) : known, extras);
  if (needs_b && !result[2].defined()) result[2] = dy.sum(0);
  std::optional<Gather> gathered[kDirections], input;
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!r[d].is_quantized()) encoded[d].data = dy;
    const Direction sent = sent_direction(call, kGradOutput, d);
    if (gathers && needs[d] && !gathered[sent].has_value()) gathered[sent].emplace(call, kGradOutput, sent, encoded[sent]);
  }
  dy.reset();
  Encoded x_codes;
  std::vector<at::Tensor> shared;
  if (ranks.reader != 0) {
    shared = exchange(call, false, saved);
    saved.clear();
  } else if (needs_w && plan.saves == Saves::kCodes) {
    size_t at = 0;
    x_codes = next_encoded(saved, at, of_x);
  } else if (needs_w) {
    x_codes.data = matrix(saved.at(0));
    if (ranks.gathers(kInput)) {
      x_codes = encode_rows(call, kInput, x_codes.data, false, true, call.input_amaxes)[sent_direction(call, kInput, kColumnwise)];
    } else if (of_x.is_quantized()) {
      Encodings requantized = quantize_slot(call, kInput, x_codes.data, false, true, Amaxes::of(call.input_amaxes));
      x_codes = requantized[of_x.same ? kRowwise : kColumnwise];
    }
  }
  if (needs_w && ranks.gathers(kInput)) input.emplace(call, kInput, kColumnwise, x_codes);
  const auto gradient = [&](Direction d) {
    if (gathers) encoded[d] = gathered[sent_direction(call, kGradOutput, d)]->take(d, rows, cols);
    return operand_of(r[d], d, encoded[d == kColumnwise && r[d].same ? kRowwise : d]);
  };
  const auto wgrad = [&] {
    const LinearOperand a = gradient(kColumnwise);
    if (input.has_value()) x_codes = input->take(kColumnwise, rows, codes_of(of_x.spec, x_codes.data.size(1)));
    const LinearOperand b = operand_of(of_x, kColumnwise, x_codes, &a);
    if (call.main_grad.has_value()) {
      product_into(*call.main_grad, a, b, true);
    } else {
      result[1] = multiply(a, b, dtype, std::nullopt);
    }
    record_error(call, kWgrad, a, b);
    count(call.handle, kSlots * kDirections + kWgrad);
  };
  const auto dgrad = [&] {
    const LinearOperand a = gradient(kRowwise);
    const OperandSpec& w = plan.operand_specs[kWeight][kColumnwise];
    size_t at = 0;
    const LinearOperand b = operand_of(w, kColumnwise, next_encoded(call.columnwise, at, w), &a);
    if (shared.empty()) {
      result[0] = multiply(a, b, dtype, std::nullopt);
    } else {
      product_into(result[0] = shared[0], a, b, true);
    }
    record_error(call, kDgrad, a, b);
    count(call.handle, kSlots * kDirections + kDgrad);
  };
  std::optional<Sum> sum;
  if (ranks.group && needs_x) {
    dgrad();
    if (ranks.column && ranks.reader == 0 && (ranks.is_cut() || ranks.sums)) sum.emplace(ranks, std::move(result[0]), ranks.is_cut());
  }
  if (ranks.reader != 0) {
    std::vector<at::Tensor> dx;
    if (needs_x) dx.push_back(std::move(result[0]));
    shared = exchange(call, true, dx);
    size_t at = 0;
    if (needs_w) x_codes = next_encoded(shared, at, of_x);
  }
  if (needs_w) wgrad();
  saved.clear(), x_codes = {}, encoded[kColumnwise] = {};
  if (!ranks.group && needs_x) dgrad();
  if (sum.has_value()) result[0] = sum->take();
  return result;
}

at::Tensor placeholder_of(const LinearCall& call, at::ScalarType dtype) {
  if (call.placeholder == Placeholder::kNone) return {};
  at::Tensor dw = new_empty(*call.main_grad, call.main_grad->sizes(), dtype);
  return call.placeholder == Placeholder::kZeros ? dw.zero_() : dw;
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias,
      const c10::intrusive_ptr<LinearCall>& call, const Weight* weight, bool dgrad, const MaybeTensor* amaxes,
      const std::vector<at::Tensor>* codes, std::vector<at::Tensor>* result) {
    *result = step::forward(*call, x, bias, *weight, dgrad, *amaxes, *codes);
    call->dgrad = dgrad, call->saved_input.save(saved_for_backward(*call, x, *codes, *result));
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
    std::vector<at::Tensor> saved = call->saved_input.unpack();  // hooks may run a forward again
    const bool has_bias = ctx->saved_data.count("bias") != 0;
    // Among ranks, whatever this backward wants, they exchange what those that run the program do.
    const bool is_shared = call->ranks.group.defined();
    const bool needs_x = is_shared ? call->dgrad : ctx->needs_input_grad(0);
    const bool needs_w = is_shared ? call->saves : ctx->needs_input_grad(1);
    const bool needs_b = has_bias && ctx->needs_input_grad(2);
    if (needs_x) check_not_freed(*call);
    variable_list input_grads(3);
    {
      const at::AutoGradMode no_graph(false);
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      if (dy.key_set().has(c10::DispatchKey::Python)) dy = dy.clone();  // asynchronous collective output: waits
      const Amaxes known = Amaxes::given(call->grad_amaxes, dy);
      dy = matrix(dy);
      auto [dx, dw, db] = step::backward(*call, std::move(dy), std::move(saved), needs_x, needs_w, needs_b, known);
      if (dx.defined()) input_grads[0] = with_shape(dx, ctx->saved_data["shape"].toIntVector());
      if (needs_w && call->main_grad.has_value()) dw = placeholder_of(*call, dtype_of_weight);
      if (dw.defined()) input_grads[1] = dw.scalar_type() == dtype_of_weight ? dw : dw.to(dtype_of_weight);
      if (needs_b) input_grads[2] = db.to(static_cast<at::ScalarType>(ctx->saved_data["bias"].toInt()));
    }
    if (!Saved::retains_graph()) call->columnwise.clear();
    forbid_double_backward(input_grads);
    std::move(input_grads.begin(), input_grads.end(), result.begin());
    return result;
  }

  // FSDP2 frees gathered codes on reshard and gathers them again before the backward.
  static void check_not_freed(const LinearCall& call) {
    TORCH_CHECK(!call.columnwise.empty(), "the codes that this backward reads were freed by an earlier one; pass retain_graph=True "
                "to it");
    for (const at::Tensor& t : call.columnwise)
      TORCH_CHECK(t.numel() == 0 || t.storage().nbytes() != 0, "StaleWeightError: the columnwise codes of a gathered weight were "
                  "freed: FSDP resharded the weight or gathered the other direction only; if this block is recomputed in a way "
                  "that hooks cannot see, set recomputes_forward=True on its fq.Linear");
  }
};

// Codes of the input act(gate) * up, for a step whose x has only the shape.
std::vector<at::Tensor> linear_gated(
    const at::Tensor& gate, const at::Tensor& up, int64_t activation, int64_t plan, bool save, const at::Tensor& step,
    const at::Tensor& ids, const MaybeTensor& guard, at::TensorList factors, at::TensorList histories) {
  check_cuda(gate, "gate");
  TORCH_CHECK_VALUE(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), "up is ", up.scalar_type(), " ",
                    up.sizes(), "; wanted gate's ", gate.scalar_type(), " ", gate.sizes());
  TORCH_CHECK_VALUE(activation >= 0 && activation <= static_cast<int64_t>(Activation::kReluSquared),
                    "there is no activation ", activation);
  const auto call = call_of(plan, save, step, ids, guard, factors, {}, histories, {});
  TORCH_CHECK_VALUE(
      call->plan->operand_specs[kInput][kRowwise].is_quantized() && (!save || call->plan->saves == Saves::kCodes),
      "the layer multiplies or keeps the input itself; compute it first");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(gate.device());
  const GatedInput gated = {matrix(up), static_cast<Activation>(activation)};
  std::vector<at::Tensor> codes;
  const Encodings encoded = quantize_slot(*call, kInput, matrix(gate), true, save, {}, {&gated});
  for (const Direction d : {kRowwise, kColumnwise}) append(codes, call->plan->operand_specs[kInput][d], encoded[d]);
  return codes;
}

template <bool kWithNode>
std::vector<at::Tensor> linear_step(
    const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias, const MaybeTensor& values, at::TensorList rowwise,
    at::TensorList columnwise, int64_t plan, bool round_to_bf16, bool save, const at::Tensor& step, const at::Tensor& ids,
    const MaybeTensor& guard, at::TensorList factors, at::TensorList grad_factors, at::TensorList weight_factors,
    at::TensorList histories, at::TensorList grad_histories, at::TensorList weight_histories, at::TensorList codes,
    const MaybeTensor& amaxes, const MaybeTensor& grad_amaxes, c10::string_view group, bool column, int64_t cut, bool sums,
    bool spans_weight, int64_t pieces, int64_t reader, const MaybeTensor& main_grad, int64_t placeholder) {
  check_cuda(x, "x");
  const Weight weight = {values, round_to_bf16, rowwise, columnwise, weight_factors, weight_histories};
  const auto call = call_of(plan, save, step, ids, guard, factors, grad_factors, histories, grad_histories);
  call->grad_amaxes = grad_amaxes;
  if (!group.empty()) {
    TORCH_CHECK_VALUE(cut < x.dim() - 1, "dim ", cut, " of x ", x.sizes(), " is cut; wanted one before the last");
    const int64_t outer = cut < 0 ? 1 : c10::multiply_integers(x.sizes().slice(0, cut));
    call->ranks = {c10d::resolve_process_group(std::string(group)), column, cut, sums, spans_weight, pieces, reader, outer};
  }
  call->main_grad = main_grad, call->placeholder = static_cast<Placeholder>(placeholder);
  const std::vector<at::Tensor> given = codes.vec();
  if (!kWithNode || !at::GradMode::is_enabled()) return forward(*call, x, bias, weight, false, amaxes, given);
  std::vector<at::Tensor> result;
  at::Tensor y = Linear::apply(x, edge, bias, call, &weight, x.requires_grad(), &amaxes, &given, &result);
  result[0] = std::move(y);
  return result;
}

}  // namespace

void register_linear(torch::Library& m) {
  // Eager mode only: writes the guard and the histories, which the schema does not declare.
  m.def(
      "linear_step(Tensor x, Tensor edge, Tensor? bias, Tensor? values, Tensor[] rowwise, Tensor[] columnwise, int plan, "
      "bool round_to_bf16, bool save, Tensor step, Tensor ids, Tensor? guard, Tensor[] factors, Tensor[] grad_factors, "
      "Tensor[] weight_factors, Tensor[] histories, Tensor[] grad_histories, Tensor[] weight_histories, Tensor[] codes, "
      "Tensor? amaxes, Tensor? grad_amaxes, str group, bool column, int cut, bool sums, bool spans_weight, int pieces, int reader, "
      "Tensor? main_grad, int placeholder) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_step<false>));
  m.impl("linear_step", torch::dispatch(c10::DispatchKey::AutogradCUDA, linear_step<true>));
  m.def(
      "linear_gated(Tensor gate, Tensor up, int activation, int plan, bool save, Tensor step, Tensor ids, Tensor? guard, "
      "Tensor[] factors, Tensor[] histories) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_gated));
  m.impl("linear_gated", torch::dispatch(c10::DispatchKey::AutogradCUDA, linear_gated));
}

}  // namespace fsdp_quant::step
