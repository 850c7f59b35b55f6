// SPDX-License-Identifier: Apache-2.0
// Passes of a layer of experts in eager mode: tokens in groups, a matrix of the weight per group.
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_grouped_mm.h>
#include <torch/library.h>

#include "api/grouped_gemm.h"
#include "step/slots.h"

namespace fsdp_quant::step {

namespace {

c10::intrusive_ptr<LinearCall> grouped_call_of(
    int64_t plan, bool save, const MaybeTensor& step, at::TensorList ids, const MaybeTensor& guard, at::TensorList factors,
    at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories) {
  const at::Tensor none;
  auto call = call_of(plan, save, step.has_value() ? *step : none, none, guard, factors, grad_factors, histories, grad_histories);
  call->group_ids = ids.vec();
  return call;
}

// Values and the scales of their groups, of codes that are decoded; else codes as they are.
struct Multiplied {
  at::Tensor data;
  MaybeTensor scale;
  int64_t kind;
};

Multiplied multiplied(const OperandSpec& r, const Encoded& e) {
  if (!r.decodes()) return {e.data, e.scale, r.kind};
  const MaybeTensor none;
  const int64_t cols = codes_of(r.spec, e.data.size(1));
  // Of a columnwise direction too: its codes are turned.
  return {decode(e.data, e.scale, none, r.packed, false, cols, 0, at::kBFloat16, nullptr),
          tensor_decode_scale(e.tensor_amax, r.packed), kScaledValues};
}

// Codes of x [tokens, cols], of the input or of the gradient, as `append` lists them: of groups of tokens (see encode).
// factors: see Delayed.
std::vector<at::Tensor> linear_tokens(
    const at::Tensor& x, int64_t plan, int64_t slot, bool row, bool col, const MaybeTensor& guard, const at::Tensor& tables,
    int64_t groups, at::TensorList factors, const MaybeTensor& step, at::TensorList ids) {
  check_cuda(x, "x");
  TORCH_CHECK_VALUE(slot == kInput || slot == kGradOutput, "slot is ", slot, "; tokens are of 0 or ", int{kGradOutput});
  const auto call = grouped_call_of(plan, true, step, ids, guard, factors, factors, {}, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const TokenTables at = tables_of(tables, groups, x);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, groups};
  std::vector<at::Tensor> result;
  const Encodings made = quantize_slot(*call, static_cast<Slot>(slot), matrix(x), row, col, {}, {nullptr, &tokens});
  for (const Direction d : {kRowwise, kColumnwise}) append(result, call->plan->operand_specs[slot][d], made[d]);
  return result;
}

// Rows of values as torch._grouped_mm takes them.
at::Tensor of_values(const at::Tensor& rows) {
  const bool fits = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) && rows.stride(0) % 8 == 0 && is_aligned(rows.const_data_ptr(), 16);
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// The row behind each group's last, int32 [groups] of the tables of `token_groups`.
at::Tensor ends_of(const at::Tensor& tables, int64_t groups) {
  return tables.narrow(0, tables.numel() - 2 * (groups + 1) + 1, groups);
}

// out[rows of e] = a[rows of e] b[e]^T of codes, or of values: then it is torch's product, in bf16.
at::Tensor rows_product(
    const GroupedOperand& a, const GroupedOperand& b, const at::Tensor& tables, const TokenTables& at, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(b.data.dim() == 3 && b.data.size(0) == at.groups, "weight has shape ", b.data.sizes(), "; wanted [", at.groups,
                    ", N, K]");
  if (a.kind == 0) {
    TORCH_CHECK_NOT_IMPLEMENTED(b.kind == 0 && dtype == at::kBFloat16, "values are multiplied by values, in bfloat16");
    return at::_grouped_mm(of_values(a.data), b.data.transpose(1, 2), ends_of(tables, at.groups));
  }
  const at::Tensor out = new_empty(a.data, {a.data.size(0), b.data.size(1)}, dtype);
  m_grouped_gemm(out, a, b, at.offsets, nullptr, 0);
  return out;
}

// y of x [tokens, K] and the stacked operand of weights [E, N, K], the tables of the groups that end at `ends`
// (`token_groups`), and the codes that the backward keeps. Codes of weights that are decoded come as values, with scales [E].
// factors, histories: see Delayed. step, ids: of what is rounded stochastically.
std::vector<at::Tensor> grouped_step(
    const at::Tensor& x, const at::Tensor& ends, const at::Tensor& weight, const MaybeTensor& weight_scale, int64_t plan,
    bool save, const MaybeTensor& guard, at::ScalarType out_dtype, const MaybeTensor& wrong, int64_t tag,
    at::TensorList factors, at::TensorList histories, const MaybeTensor& step, at::TensorList ids) {
  check_cuda(x, "x");
  const auto call = grouped_call_of(plan, save, step, ids, guard, factors, {}, histories, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const at::Tensor rows = matrix(x), tables = token_groups(ends, rows.size(0), wrong, tag);
  const TokenTables at = tables_of(tables, ends.numel(), x);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, at.groups};
  const bool keeps = save && call->plan->saves == Saves::kCodes;
  const Encodings made = quantize_slot(*call, kInput, rows, true, keeps, {}, {nullptr, &tokens});
  const OperandSpec &of_x = call->plan->operand_specs[kInput][kRowwise], &of_weight = call->plan->operand_specs[kWeight][kRowwise];
  const Multiplied a = of_x.is_quantized() ? multiplied(of_x, made[kRowwise]) : Multiplied{rows, {}, 0};
  const int64_t kind = of_weight.decodes() ? kScaledValues : of_weight.kind;
  const at::Tensor y = rows_product({a.data, a.scale, a.kind}, {weight, weight_scale, kind}, tables, at, out_dtype);
  watch(*call, kFprop, a.data, a.scale, a.kind, weight, weight_scale, kind);
  count(plan, kSlots * kDirections + kFprop, at.groups);
  std::vector<at::Tensor> result = {y, tables};
  if (keeps) append(result, call->plan->operand_specs[kInput][kColumnwise], made[kColumnwise]);
  return result;
}

// dx [tokens, K] and dw [E, N, K] of dy [tokens, N]; empty where they are not needed. weight: the stacked columnwise
// operand (values: [E, N, K]), where dx is needed; saved: codes and scales of x, or x, where dw is. factors: of x.
// turned: dw is [E, K, N].
std::tuple<at::Tensor, at::Tensor> grouped_step_backward(
    const at::Tensor& dy, const at::Tensor& tables, int64_t groups, const MaybeTensor& weight, const MaybeTensor& weight_scale,
    at::TensorList saved, int64_t plan, const MaybeTensor& guard, at::TensorList factors, at::TensorList grad_factors,
    at::TensorList grad_histories, const MaybeTensor& step, at::TensorList ids, bool turned) {
  check_cuda(dy, "dy");
  const auto call = grouped_call_of(plan, true, step, ids, guard, factors, grad_factors, {}, grad_histories);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(dy.device());
  const TokenTables at = tables_of(tables, groups, dy);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, groups};
  const at::Tensor rows = matrix(dy);
  const OperandSpec(&r)[kSlots][kDirections] = call->plan->operand_specs;
  Encodings made = quantize_slot(*call, kGradOutput, rows, weight.has_value(), !saved.empty(), {}, {nullptr, &tokens});
  at::Tensor dx = new_empty(dy, {0}, dy.scalar_type()), dw = dx;
  if (!saved.empty()) {
    Encoded x;
    if (call->plan->saves == Saves::kCodes) {
      size_t at = 0;
      x = take(saved.vec(), at, r[kInput][kColumnwise]);
    } else if (r[kInput][kColumnwise].is_quantized()) {
      x = quantize_slot(*call, kInput, matrix(saved[0]), false, true, {}, {nullptr, &tokens})[kColumnwise];
    }
    const Encoded& d = made[kColumnwise];
    if (!r[kGradOutput][kColumnwise].is_quantized()) {  // values
      TORCH_CHECK_NOT_IMPLEMENTED(!x.data.defined(), "values are multiplied by values");
      const at::Tensor a = turned ? matrix(saved[0]) : rows, b = turned ? rows : matrix(saved[0]);
      dw = at::_grouped_mm(of_values(a).t(), of_values(b), ends_of(tables, groups));
    } else {
      Multiplied a = multiplied(r[kGradOutput][kColumnwise], d), b = multiplied(r[kInput][kColumnwise], x);
      if (turned) std::swap(a, b);
      dw = new_empty(dy, {groups, a.data.size(0), b.data.size(0)}, dy.scalar_type());
      k_grouped_gemm(dw, {a.data, a.scale, a.kind}, {b.data, b.scale, b.kind}, at.padded, groups, false, nullptr, 0);
      watch(*call, kWgrad, a.data, a.scale, a.kind, b.data, b.scale, b.kind);
    }
    count(plan, kSlots * kDirections + kWgrad, groups);
  }
  made[kColumnwise] = {};
  if (weight.has_value()) {
    const Encoded& d = made[kRowwise];
    const OperandSpec &of_dy = r[kGradOutput][kRowwise], &of_weight = r[kWeight][kColumnwise];
    const bool coded = of_dy.is_quantized();
    const at::Tensor operand = coded ? *weight : weight->transpose(1, 2);
    const Multiplied a = coded ? multiplied(of_dy, d) : Multiplied{rows, {}, 0};
    const int64_t kind = of_weight.decodes() ? kScaledValues : of_weight.kind;
    dx = rows_product({a.data, a.scale, a.kind}, {operand, weight_scale, kind}, tables, at, dy.scalar_type());
    watch(*call, kDgrad, a.data, a.scale, a.kind, operand, weight_scale, kind);
    count(plan, kSlots * kDirections + kDgrad, groups);
  }
  return {dx, dw};
}

}  // namespace

void register_grouped(torch::Library& m) {
  m.def(
      "linear_tokens(Tensor x, int plan, int slot, bool row, bool col, Tensor? guard, Tensor tables, "
      "int groups, Tensor[] factors, Tensor? step, Tensor[] ids) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_tokens));
  // Eager mode alone, as linear_step.
  m.def(
      "grouped_step(Tensor x, Tensor ends, Tensor weight, Tensor? weight_scale, int plan, bool save, Tensor? guard, "
      "ScalarType out_dtype, Tensor? wrong, int tag, Tensor[] factors, Tensor[] histories, Tensor? step, Tensor[] ids) "
      "-> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_step));
  m.def(
      "grouped_step_backward(Tensor dy, Tensor tables, int groups, Tensor? weight, Tensor? weight_scale, Tensor[] saved, "
      "int plan, Tensor? guard, Tensor[] factors, Tensor[] grad_factors, Tensor[] grad_histories, Tensor? step, Tensor[] ids, "
      "bool turned) -> (Tensor, Tensor)",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_step_backward));
}

}  // namespace fsdp_quant::step
