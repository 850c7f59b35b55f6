// SPDX-License-Identifier: Apache-2.0
// Passes of an expert layer: grouped tokens, one weight matrix per group.
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "api/grouped_gemm.h"
#include "api/norm.h"
#include "step/slots.h"
#include "step/weight.h"

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

// GEMM operand: values and scales per group if codes are decoded, else the codes.
GemmOperand grouped_operand(const OperandSpec& r, const Encoded& e) {
  if (!r.decodes()) return {e.data, e.scale, r.kind};
  const MaybeTensor none;
  const int64_t cols = codes_of(r.spec, e.data.size(1));
  // Columnwise codes are transposed.
  return {decode(e.data, e.scale, none, r.packed, false, cols, 0, at::kBFloat16, nullptr),
          tensor_decode_scale(e.tensor_amax, r.packed), kScaledValues};
}

// Rows aligned as torch._grouped_mm requires.
at::Tensor aligned_rows(const at::Tensor& rows) {
  const bool fits = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) && rows.stride(0) % 8 == 0 && is_aligned(rows.const_data_ptr(), 16);
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// End row of each group, int32 [groups], from the tables of `token_groups`.
at::Tensor ends_of(const at::Tensor& tables, int64_t groups) {
  return tables.narrow(0, tables.numel() - 2 * (groups + 1) + 1, groups);
}

// out[rows of e] = a[rows of e] b[e]^T (+ bias[e]) of codes, or of bf16 values by torch._grouped_mm; in bf16, rounded once.
at::Tensor m_grouped_product(
    const GemmOperand& a, const GemmOperand& b, const MaybeTensor& bias, const at::Tensor& tables, const TokenTables& tokens) {
  TORCH_CHECK_VALUE(b.data.dim() == 3 && b.data.size(0) == tokens.groups, "weight has shape ", b.data.sizes(), "; wanted [",
                    tokens.groups, ", N, K]");
  if (a.kind == 0) {
    TORCH_CHECK_NOT_IMPLEMENTED(b.kind == 0 && !bias.has_value(), "values are multiplied by values, without a bias");
    return at::_grouped_mm(aligned_rows(a.data), b.data.transpose(1, 2), ends_of(tables, tokens.groups));
  }
  const at::Tensor out = new_empty(a.data, {a.data.size(0), b.data.size(1)}, at::kBFloat16);
  m_grouped_gemm(out, a, b, bias, tokens.offsets, nullptr, 0);
  return out;
}

// Tables of the groups of x, or of the rows that are rows `order` of x.
TokenTables ordered_tables(const at::Tensor& tables, int64_t groups, const at::Tensor& x, const MaybeTensor& order) {
  TokenTables tokens = tables_of(tables, groups, x);
  if (order.has_value()) check_buffer(*order, "order", x, at::kLong, order->numel()), tokens.order = *order;
  return tokens;
}

// Returns y of x [tokens, K] (with `order`, of rows `order` of x) and the stacked weight operand [E, N, K], the tables of the groups that end at `ends`
// (`token_groups`), and the codes saved for the backward. Weight codes that are decoded are given as values, with scales [E].
// bias: [E, N], of codes only. factors, histories: see Delayed. step, ids: for stochastic rounding. shares: fp32 [tokens]; the
// codes are of silu(g) * u times these, with [g, u] = x [tokens, 2 K].
std::vector<at::Tensor> grouped_step(
    const at::Tensor& x, const at::Tensor& ends, const at::Tensor& weight, const MaybeTensor& weight_scale, int64_t plan,
    bool save, const MaybeTensor& guard, const MaybeTensor& bias, const MaybeTensor& wrong, int64_t tag,
    at::TensorList factors, at::TensorList histories, const MaybeTensor& step, at::TensorList ids, const MaybeTensor& order,
    const MaybeTensor& shares) {
  check_cuda(x, "x");
  const auto call = grouped_call_of(plan, save, step, ids, guard, factors, {}, histories, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const at::Tensor rows = order.has_value() ? aligned_rows(matrix(x)) : matrix(x),
                   tables = token_groups(ends, order.has_value() ? order->numel() : rows.size(0), wrong, tag);
  const TokenTables tokens = ordered_tables(tables, ends.numel(), x, order);
  const bool keeps = save && call->plan->saves == Saves::kCodes, swiglu = shares.has_value();
  if (swiglu) check_buffer(*shares, "shares", x, at::kFloat, rows.size(0));
  TORCH_CHECK_VALUE(!swiglu || (!order.has_value() && call->plan->operand_specs[kInput][kRowwise].is_quantized() && keeps == save),
                    "swiglu is of rows in order that are quantized, and whose codes are saved");
  const auto [gate, up] = operands_of(rows, std::nullopt, swiglu);
  const GatedInput gated = {swiglu ? *up : rows, Activation::kSilu, false, shares.value_or(at::Tensor())};
  const Encodings encoded = quantize_slot(*call, kInput, gate, true, keeps, {}, {swiglu ? &gated : nullptr, &tokens});
  const OperandSpec &of_x = call->plan->operand_specs[kInput][kRowwise],
                    &of_weight = call->plan->operand_specs[kWeight][kRowwise];
  const GemmOperand a = of_x.is_quantized() ? grouped_operand(of_x, encoded[kRowwise]) : GemmOperand{ordered_rows(rows, &tokens)};
  const GemmOperand b = {weight, weight_scale, of_weight.decodes() ? kScaledValues : of_weight.kind};
  const bool converts = bias.has_value() && bias->scalar_type() != at::kBFloat16;
  const at::Tensor y = m_grouped_product(a, b, converts ? bias->to(at::kFloat) : bias, tables, tokens);
  record_error(*call, kFprop, a, b, kProbedStepsOfGroups);
  count(plan, kSlots * kDirections + kFprop, tokens.groups);
  std::vector<at::Tensor> result = {y, tables};
  if (keeps) append(result, call->plan->operand_specs[kInput][kColumnwise], encoded[kColumnwise]);
  return result;
}

// Returns dx [tokens, K] of dy [tokens, N] (empty without weight), the gradient of shares, fp32 [tokens] (empty without swiglu),
// and, if it `keeps` them, the columnwise codes of the gradients, for dw. weight: the stacked columnwise operand (values: [E, N,
// K]). swiglu: [g, u] and shares, if dy is the gradient of silu(g) * u times shares [tokens, N / 2]. order: the gradients are rows
// `order` of dy.
std::vector<at::Tensor> grouped_dgrad(
    const at::Tensor& dy, const at::Tensor& tables, int64_t groups, const MaybeTensor& weight, const MaybeTensor& weight_scale,
    bool keeps, int64_t plan, const MaybeTensor& guard, at::TensorList factors, at::TensorList histories, const MaybeTensor& step,
    at::TensorList ids, at::TensorList swiglu, const MaybeTensor& order) {
  check_cuda(dy, "dy");
  const auto call = grouped_call_of(plan, true, step, ids, guard, {}, factors, {}, histories);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(dy.device());
  const at::Tensor rows = order.has_value() ? aligned_rows(matrix(dy)) : matrix(dy);
  const TokenTables tokens = ordered_tables(tables, groups, rows, order);
  const OperandSpec(&r)[kSlots][kDirections] = call->plan->operand_specs;
  GatedInput gated = {rows, Activation::kSilu, true};
  if (!swiglu.empty()) {
    TORCH_CHECK_VALUE(swiglu.size() == 2, "swiglu has ", swiglu.size(), " tensors; wanted [g, u] and shares");
    check_buffer(swiglu[1], "shares", dy, at::kFloat, rows.size(0));
    gated.weights = swiglu[1], gated.dots = at::zeros({ceil_div(rows.size(1), kTile), rows.size(0)}, gated.weights.options());
  }
  TORCH_CHECK_VALUE(!(gated.weights.defined() || order.has_value()) ||
                        (r[kGradOutput][kRowwise].is_quantized() && r[kGradOutput][kColumnwise].is_quantized()),
                    "swiglu and order are of gradients that are quantized");
  TORCH_CHECK_VALUE(!order.has_value() || call->plan->saves == Saves::kCodes, "order is of gradients alone: x is saved as codes");
  const Encodings encoded = quantize_slot(*call, kGradOutput, swiglu.empty() ? rows : matrix(swiglu[0]), weight.has_value(), keeps, {},
                                          {swiglu.empty() ? nullptr : &gated, &tokens});
  at::Tensor dx = new_empty(dy, {0}, dy.scalar_type());
  if (weight.has_value()) {
    const OperandSpec &of_dy = r[kGradOutput][kRowwise], &of_weight = r[kWeight][kColumnwise];
    const bool coded = of_dy.is_quantized();
    const GemmOperand a = coded ? grouped_operand(of_dy, encoded[kRowwise]) : GemmOperand{rows};
    const GemmOperand b = {coded ? *weight : weight->transpose(1, 2), weight_scale,
                           of_weight.decodes() ? kScaledValues : of_weight.kind};
    dx = m_grouped_product(a, b, {}, tables, tokens);
    record_error(*call, kDgrad, a, b, kProbedStepsOfGroups);
    count(plan, kSlots * kDirections + kDgrad, groups);
  }
  std::vector<at::Tensor> result = {dx, gated.dots.defined() ? gated.dots.sum(0) : new_empty(dy, {0}, at::kFloat)};
  if (keeps && r[kGradOutput][kColumnwise].is_quantized()) append(result, r[kGradOutput][kColumnwise], encoded[kColumnwise]);
  return result;
}

// Returns dw [E, N, K] of dy [tokens, N], or of its columnwise codes, and of `saved`: codes and scales of x, or x. turned: dw is
// [E, K, N].
at::Tensor grouped_wgrad(const at::Tensor& dy, at::TensorList codes, const at::Tensor& tables, int64_t groups, at::TensorList saved,
                         int64_t plan, const MaybeTensor& guard, at::TensorList factors, const MaybeTensor& step, at::TensorList ids,
                         bool turned) {
  check_cuda(dy, "dy");
  const auto call = grouped_call_of(plan, true, step, ids, guard, factors, {}, {}, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(dy.device());
  const TokenTables tokens = tables_of(tables, groups, matrix(dy));
  const OperandSpec(&r)[kSlots][kDirections] = call->plan->operand_specs;
  size_t at = 0, of_dy = 0;
  Encoded x;
  if (call->plan->saves == Saves::kCodes) {
    x = next_encoded(saved.vec(), at, r[kInput][kColumnwise]);
  } else if (r[kInput][kColumnwise].is_quantized()) {
    x = quantize_slot(*call, kInput, matrix(saved[0]), false, true, {}, {nullptr, &tokens})[kColumnwise];
  }
  count(plan, kSlots * kDirections + kWgrad, groups);
  if (!r[kGradOutput][kColumnwise].is_quantized()) {  // values
    TORCH_CHECK_NOT_IMPLEMENTED(!x.data.defined(), "values are multiplied by values");
    const at::Tensor rows = matrix(dy), a = turned ? matrix(saved[0]) : rows, b = turned ? rows : matrix(saved[0]);
    return at::_grouped_mm(aligned_rows(a).t(), aligned_rows(b), ends_of(tables, groups));
  }
  const Encoded d = next_encoded(codes.vec(), of_dy, r[kGradOutput][kColumnwise]);
  GemmOperand a = grouped_operand(r[kGradOutput][kColumnwise], d), b = grouped_operand(r[kInput][kColumnwise], x);
  if (turned) std::swap(a, b);
  const at::Tensor dw = new_empty(dy, {groups, a.data.size(0), b.data.size(0)}, dy.scalar_type());
  k_grouped_gemm(dw, a, b, tokens.padded, groups, false, nullptr, 0);
  record_error(*call, kWgrad, a, b, kProbedStepsOfGroups, tokens.padded + groups);  // tiles after the last group are not written
  return dw;
}

// int64 [1] of the host, to which `token_groups` writes (linear/bad_splits.py).
at::Tensor bad_splits_flag() {
  static auto* const flag = new at::Tensor(at::zeros({1}, at::TensorOptions(at::kLong).pinned_memory(true)));
  return *flag;
}

// In compiled graphs: the operators of linear/grouped_ops.py, with the encoding of the weights.

// `_Spec` of linear/grouped_ops.py.
struct ExpertsSpec {
  int64_t experts, n, k;
  bool transposed, gathered, save;
  int64_t plan, weight_plan;  // -1: the operators are Python functions
  bool round_to_bf16, turns_wgrad;

  explicit ExpertsSpec(at::IntArrayRef f)
      : experts(f.at(0)), n(f.at(1)), k(f.at(2)), transposed(f.at(4) != 0), gathered(f.at(5) != 0), save(f.at(6) != 0),
        plan(f.at(7)), weight_plan(f.at(8)), round_to_bf16(f.at(9) != 0), turns_wgrad(f.at(10) != 0) {}

  // Else Python functions run. key: of the graph's plan; numbers are of the process that traced it.
  bool is_native(c10::string_view key, at::TensorList weights, at::TensorList factors) const {
    const std::string of_plan(key), of_weight = transposed ? of_plan + "T" : of_plan;  // as `GemmPlan._turn` names it
    if (!is_plan(plan, of_plan) || !factors.empty()) return false;
    if (gathered) return weights.size() == 2 && weights[0].storage().nbytes() > 0;  // else FSDP has freed them
    return is_plan(weight_plan, of_weight) && weights.size() == 1 && weights[0].dim() == 3 && weights[0].is_contiguous();
  }
};

// Runs the Python function of an operator, which is its kernel for every device but CUDA.
template <class... Args>
std::vector<at::Tensor> in_python(const char* op, const Args&... args) {
  torch::jit::Stack stack;
  (stack.emplace_back(args), ...);
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack.back().toTensorVector();
}

// The operand [E, outer, contraction] that a pass multiplies, and its scales, of values [E, N, K] ([E, K, N] if `s` says so), or of
// gathered codes [E * N, K] and scales of one level.
GemmOperand stacked_operand(const ExpertsSpec& s, at::TensorList weights, Direction d) {
  const OperandSpec& r = plan_of(s.plan).operand_specs[kWeight][d];
  const at::Tensor& weight = weights[0];
  if (s.gathered) {
    Encoded codes = {weight.unflatten(0, {s.experts, -1}), weights[1].unflatten(0, {s.experts, -1})};
    if (r.is_anchored()) {
      anchor(codes, r, d, s.n, s.k);
      return {codes.data, codes.scale.flatten()};
    }
    // GEMMs read scales of 1 x 128 blocks by column, and of 128 x 128 blocks in rows padded to 4
    at::Tensor scale = !r.spec.whole() && (d == kColumnwise) != (r.spec.outer == 1) ? codes.scale.transpose(1, 2) : codes.scale;
    if (!r.spec.whole()) scale = at::constant_pad_nd(scale, {0, ceil_div(scale.size(2), 4) * 4 - scale.size(2)});
    return {d == kColumnwise ? transpose_stack(codes.data) : codes.data, scale.flatten()};
  }
  if (!r.is_quantized()) return {s.transposed ? weight.transpose(1, 2) : weight};
  const bool row = (d == kRowwise) != s.transposed;  // the plan of transposed weights encodes each direction as the other
  const std::vector<at::Tensor> buffers = linear_weight(weight, s.weight_plan, row, !row, s.round_to_bf16, {}, {});
  size_t at = 0;
  const Encoded codes = next_encoded(buffers, at, r);
  if (!r.spec.two_level()) return {codes.data, codes.scale.flatten()};
  const GemmOperand o = grouped_operand(r, codes);  // columnwise, matrices are side by side, each from a tile
  if (d == kRowwise) return {o.data.view({s.experts, s.n, s.k}), o.scale->flatten()};
  const int64_t pitch = ceil_div(s.n, kTile) * kTile;
  return {o.data.as_strided({s.experts, s.k, s.n}, {pitch, o.data.size(1), 1}), o.scale->flatten()};
}

// Sums over the tokens of each group, [groups, N].
at::Tensor bias_gradients(const at::Tensor& dy, const at::Tensor& tables, int64_t groups) {
  const at::Tensor tokens = at::arange(dy.size(0), tables.options());
  const at::Tensor group = at::searchsorted(ends_of(tables, groups), tokens, false, true);
  return at::arange(groups, group.options()).unsqueeze(1).eq(group).to(dy.scalar_type()).matmul(dy);
}

std::vector<at::Tensor> experts(
    const at::Tensor& x, const MaybeTensor& tokens, const at::Tensor& ends, at::TensorList weights, at::TensorList biases,
    const MaybeTensor& shares, c10::string_view key, at::IntArrayRef spec, at::TensorList guards, const MaybeTensor& step,
    at::TensorList ids, at::TensorList factors) {
  const ExpertsSpec s(spec);
  if (!s.is_native(key, weights, factors) || biases.size() > 1)
    return in_python("fsdp_quant::experts", x, tokens, ends, weights, biases, shares, key, spec, guards, step, ids, factors);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const MaybeTensor guard = guards.empty() ? std::nullopt : MaybeTensor(guards[0]);
  const GemmOperand weight = stacked_operand(s, weights, kRowwise);
  MaybeTensor bias;
  if (!biases.empty())
    bias = biases[0].is_contiguous() && is_aligned(biases[0].const_data_ptr(), 16) ? biases[0] : biases[0].clone(at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> result = grouped_step(x, ends.contiguous(), weight.data, weight.scale, s.plan, s.save, guard, bias,
                                                bad_splits_flag(), 0, {}, {}, step, ids, tokens, shares);
  if (result.size() > 4) result[3] = result[3].view({result[2].size(0), -1});  // with amaxes of tensors
  return result;
}

std::vector<at::Tensor> experts_backward(
    const at::Tensor& given, const MaybeTensor& tokens, at::TensorList saved, at::TensorList weights, at::TensorList swiglu,
    c10::string_view key, at::IntArrayRef spec, const c10::List<bool>& needs, at::TensorList guards,
    const MaybeTensor& step, at::TensorList ids, at::TensorList factors) {
  const ExpertsSpec s(spec);
  const bool need_x = needs[0], need_w = needs[1];
  if (!s.is_native(key, weights, factors) || !(need_x || need_w))
    return in_python("fsdp_quant::experts_backward", given, tokens, saved, weights, swiglu, key, spec, needs, guards, step, ids, factors);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(given.device());
  const at::Tensor dy = given.contiguous(), tables = saved[0];
  const MaybeTensor guard = guards.empty() ? std::nullopt : MaybeTensor(guards[0]);
  std::optional<GemmOperand> weight;
  if (need_x) weight = stacked_operand(s, weights, kColumnwise);
  const std::vector<at::Tensor> of_dy =
      grouped_dgrad(dy, tables, s.experts, weight ? MaybeTensor(weight->data) : std::nullopt, weight ? weight->scale : std::nullopt, need_w,
                    s.plan, guard, {}, {}, step, ids, swiglu, tokens);
  weight.reset();  // before dw is allocated
  std::vector<at::Tensor> result;
  if (need_x) result.push_back(of_dy[0]);
  if (need_w) {
    const bool turned = s.transposed && s.turns_wgrad;
    const at::Tensor dw = grouped_wgrad(dy, at::TensorList(of_dy).slice(2), tables, s.experts, saved.slice(1), s.plan, guard, {}, step,
                                        ids, turned);
    result.push_back(s.transposed && !turned ? dw.transpose(1, 2).contiguous() : dw);
  }
  if (needs[2]) result.push_back(swiglu.empty() ? bias_gradients(dy, tables, s.experts) : of_dy[1]);
  return result;
}

}  // namespace

void register_grouped(torch::Library& m) {
  m.def("bad_splits_flag() -> Tensor", bad_splits_flag);
  m.impl("experts", torch::dispatch(c10::DispatchKey::CUDA, experts));
  m.impl("experts_backward", torch::dispatch(c10::DispatchKey::CUDA, experts_backward));
  // Eager mode only, as linear_step.
  m.def(
      "grouped_step(Tensor x, Tensor ends, Tensor weight, Tensor? weight_scale, int plan, bool save, Tensor? guard, "
      "Tensor? bias, Tensor? wrong, int tag, Tensor[] factors, Tensor[] histories, Tensor? step, Tensor[] ids, "
      "Tensor? order, Tensor? shares=None) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_step));
  m.def(
      "grouped_dgrad(Tensor dy, Tensor tables, int groups, Tensor? weight, Tensor? weight_scale, bool keeps, int plan, "
      "Tensor? guard, Tensor[] factors, Tensor[] histories, Tensor? step, Tensor[] ids, Tensor[] swiglu, Tensor? order) "
      "-> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_dgrad));
  m.def(
      "grouped_wgrad(Tensor dy, Tensor[] codes, Tensor tables, int groups, Tensor[] saved, int plan, Tensor? guard, "
      "Tensor[] factors, Tensor? step, Tensor[] ids, bool turned) -> Tensor",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_wgrad));
}

}  // namespace fsdp_quant::step
