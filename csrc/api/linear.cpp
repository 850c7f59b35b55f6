// A linear layer's step in eager mode: each of its passes is one call, which quantizes a tensor and multiplies its codes, so
// that the host stays ahead of the device. Each part is an operator of its own too.
//
//   forward   x.rowwise, x.columnwise = quantize(x)         y  = x.rowwise w.rowwise^T + bias
//   backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = dy.rowwise w.columnwise^T
//                                                           dw = dy.columnwise x.columnwise^T
//
// x [.., K], w [N, K]. The weight comes as values, which the forward quantizes, in both directions where dgrad follows; or as the
// buffers of its codes, of which the columnwise ones may be empty until the backward (FSDP2 gathers them again).
#include <array>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/gemm.h"
#include "api/layout.h"
#include "api/norm.h"
#include "api/parts.h"
#include "api/quantize.h"
#include "api/saved.h"
#include "layout/scalars.h"
#include "norm/norm.h"

namespace fsdp_quant {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum Slot { kInput, kWeight, kGradOutput, kSlots };
enum Direction { kRowwise, kColumnwise, kDirections };
// What the backward keeps of the input.
enum class Saves : int64_t { kCodes = 0, kInput = 1 };

constexpr int64_t kOfBlocks = -1;

// How one direction of a slot is quantized, and how its product reads it.
struct Reading {
  int64_t packed;  // side (api/quantize.h); 0: the values themselves
  Side side;
  int64_t run;     // of its anchors, 0 the whole contraction; kOfTensor, kOfBlocks: none, but scales of blocks
  int64_t kind;    // of the operand (`gemm`); 0: 16-bit values, to which codes are decoded
  bool same;       // columnwise: the rowwise codes
  int64_t factor;  // index of its history among the slot's; -1: no delayed scaling

  bool is_quantized() const { return packed != 0; }
  bool is_anchored() const { return run != kOfBlocks; }
  bool decodes() const { return is_quantized() && kind == 0; }
  bool has_tensor_amax() const { return side.two_level() && !side.operand(); }  // beside data and scale
};

constexpr int kReadingFields = 5;
constexpr int64_t kScaledValues = 1 << 3;  // kind of 16-bit values with one scale a tensor
enum { kFprop, kDgrad, kWgrad, kProducts };
constexpr int kCounts = kSlots * kDirections + kProducts;  // quantizations, products

struct Plan {
  Reading readings[kSlots][kDirections];
  Saves saves;
  int64_t watched[kProducts];  // which operands `product_error` counts
  std::string key;  // of the plan, for Python
};

// What was built and what ran; nothing is ever removed.
struct Registry {
  std::mutex mutex;
  std::deque<Plan> plans;
  std::deque<std::array<int64_t, kCounts>> counts;
};

Registry& registry() {
  static auto* const made = new Registry;  // backward threads may outlive static destructors
  return *made;
}

const Plan& plan_of(int64_t handle) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  TORCH_CHECK_VALUE(handle >= 0 && handle < static_cast<int64_t>(r.plans.size()), "there is no linear plan ", handle);
  return r.plans[handle];
}

void count(int64_t handle, int what, int64_t times = 1) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.counts[handle][what] += times;
}

// Everything of a call that autograd does not see.
struct Call : torch::CustomClassHolder {
  int64_t handle;
  const Plan* plan;
  bool saves;
  at::Tensor step, ids;
  std::vector<at::Tensor> group_ids;  // of groups of tokens, whose random keys are their own
  MaybeTensor guard;
  std::vector<at::Tensor> factors, grad_factors, histories, grad_histories;
  std::vector<at::Tensor> columnwise;  // operand of the weight
  MaybeTensor grad_amaxes;             // memory in which the node before leaves those of dy
  Saved kept;                          // of the input
};

bool wants(const Plan& plan, Slot slot, Direction d, bool row, bool col) {
  const Reading(&r)[kDirections] = plan.readings[slot];
  if (d == kColumnwise) return col && r[d].is_quantized() && !r[d].same;
  return r[d].is_quantized() && (row || (col && r[kColumnwise].same));
}

at::Tensor random_key(const at::Tensor& step, const at::Tensor& ids, int64_t slot, int64_t rows) {
  check_buffer(step, "step", step, at::kLong, 5);
  check_buffer(ids, "ids", step, at::kLong, kSlots);
  TORCH_CHECK_VALUE(slot >= 0 && slot < kSlots, "slot is ", slot, "; wanted 0 to ", kSlots - 1);
  check_cuda(step, "step");
  const c10::cuda::CUDAGuard guard(step.device());
  const at::Tensor key = new_empty(step, {5}, at::kLong);
  check_launch(launch_random_key(step.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + slot, rows,
                                 key.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()), "random_key");
  return key;
}

// The largest finite amax so far, in place.
void record_amax(const at::Tensor& amaxes, const at::Tensor& amax) {
  check_cuda(amaxes, "amaxes");
  check_buffer(amaxes, "amaxes", amaxes, at::kFloat, amaxes.numel());
  check_buffer(amax, "amax", amaxes, at::kFloat, 1);
  const c10::cuda::CUDAGuard guard(amaxes.device());
  check_launch(launch_record_amax(amaxes.mutable_data_ptr<float>(), amax.const_data_ptr<float>(),
                                  c10::cuda::getCurrentCUDAStream()), "record_amax");
}

// The factors and histories of a slot's delayed sides.
struct History {
  const std::vector<at::Tensor>&factors, &amaxes;
};

// What is known of a tensor's amaxes: of all of it [1], of every row, of every column over kAmaxRun rows
// [runs, cols].
struct Amaxes {
  MaybeTensor whole, rows, runs;

  static Amaxes of(const at::Tensor& all, int64_t rows, int64_t cols) {  // as AmaxesOf
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const AmaxesOf layout = {rows, cols};
    const auto part = [&](int64_t at, int64_t size) { return all.narrow(-1, at, size); };
    return {part(0, 1), part(layout.at_rows(), rows), part(layout.at_runs(), layout.runs() * cols)};
  }

  // all: of x [rows, cols], as AmaxesOf, or its first alone.
  static Amaxes given(const MaybeTensor& all, const at::Tensor& x) {
    if (!all.has_value()) return {};
    const int64_t cols = x.size(-1), rows = x.numel() / cols;
    const bool is_whole = all->numel() == 1;
    check_buffer(*all, "amaxes", x, at::kFloat, is_whole ? 1 : AmaxesOf{rows, cols}.size());
    return is_whole ? Amaxes{all->view({1})} : of(*all, rows, cols);
  }
};

// What scales the delayed sides, and where their amaxes go: of one tensor, or of several, whose factors and histories follow
// each other, those of the first side first.
struct Delayed {
  at::TensorList factors[kDirections], records[kDirections];
};

Delayed delayed_of(const Reading (&r)[kDirections], const Side (&sides)[kDirections], const History& history, int64_t tensors = 1) {
  Delayed by;
  for (int d = 0; d < kDirections; ++d) {
    const int64_t i = r[d].factor;
    if (!sides[d].present() || i < 0) continue;
    const auto of_side = [&](const std::vector<at::Tensor>& list) { return at::TensorList(list).slice(i * tensors, tensors); };
    TORCH_CHECK_VALUE((i + 1) * tensors <= static_cast<int64_t>(history.factors.size()), "the plan scales by history ", i, " of ",
                      tensors, " tensors; got ", history.factors.size());
    by.factors[d] = of_side(history.factors);
    const bool recorded = d == 1 && !by.records[0].empty() && r[0].factor == i;  // sides of one storage share a history
    if ((i + 1) * tensors <= static_cast<int64_t>(history.amaxes.size()) && !recorded) by.records[d] = of_side(history.amaxes);
  }
  return by;
}

template <class T>
Apart<T> apart(at::TensorList tensors, const char* name, int64_t numel) {
  Apart<T> made = {};
  TORCH_CHECK_VALUE(tensors.size() <= std::size(made.at), "there are ", tensors.size(), " groups; wanted at most ",
                    std::size(made.at));
  made.count = static_cast<int32_t>(tensors.size());
  for (size_t e = 0; e < tensors.size(); ++e) {
    check_buffer(tensors[e], name, tensors[0], c10::CppTypeToScalarType<T>::value, numel);
    made.at[e] = tensors[e].const_data_ptr<T>();
  }
  return made;
}

// Factors of groups in one buffer.
at::Tensor collected(at::TensorList factors) {
  const Apart<float> scalars = apart<float>(factors, "enc", 1);
  at::Tensor made = new_empty(factors[0], {scalars.count}, at::kFloat);
  check_launch(launch_collect(scalars, made.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()), "linear_tokens");
  return made;
}

// The random keys of groups of tokens, [groups, 5].
at::Tensor random_keys(const Call& call, Slot slot, const Tokens& tokens) {
  check_buffer(call.step, "step", call.step, at::kLong, 5);
  TORCH_CHECK_VALUE(static_cast<int64_t>(call.group_ids.size()) == tokens.groups, "got the ids of ", call.group_ids.size(),
                    " groups; wanted ", tokens.groups);
  Apart<int64_t> ids = apart<int64_t>(call.group_ids, "ids", kSlots);
  for (int32_t e = 0; e < ids.count; ++e) ids.at[e] += slot;
  at::Tensor keys = new_empty(call.step, {tokens.groups, 5}, at::kLong);
  check_launch(launch_random_keys(call.step.const_data_ptr<int64_t>(), ids, tokens.offsets, keys.mutable_data_ptr<int64_t>(),
                                  c10::cuda::getCurrentCUDAStream()), "linear_tokens");
  return keys;
}

// Codes of x for these sides, where their Side is present; amaxes of delayed sides go into their histories.
// amax: of x, where it is known.
Encodings encode_sides(
    const Side (&sides)[kDirections], const at::Tensor& x, const Delayed& by, const MaybeTensor& key, bool through_bf16,
    const MaybeTensor& amax, const Beside& beside = {}) {
  const MaybeTensor none;
  const auto given = [&](int d) -> const MaybeTensor& { return sides[d].whole_tensor() ? amax : none; };
  MaybeTensor enc[kDirections];
  for (int d = 0; d < kDirections; ++d) {
    if (by.factors[d].empty()) continue;
    const bool is_shared = d == 1 && by.factors[0].data() == by.factors[1].data();
    enc[d] = is_shared ? enc[0] : beside.tokens != nullptr ? collected(by.factors[d]) : by.factors[d][0];
  }
  const auto known_of = [&](int d) -> Known {
    if (beside.tokens != nullptr || by.records[d].empty()) return {given(d), none, enc[d], key, nullptr, by.records[d]};
    return {given(d), none, enc[d], key, &by.records[d][0]};
  };
  const Known known[2] = {known_of(0), known_of(1)};
  return encode(x, sides[0], sides[1], known, 0, through_bf16, false, nullptr, beside);
}

// A columnwise side of codes that are decoded for a product of groups, whose operands are K-major.
Side turned(Side side) {
  side.transposed = true;
  if (!side.operand()) side.scale_layout = ScaleLayout::kHopper;
  return side;
}

// The storages of x that are wanted. known: of x itself; beside: see encode, where nothing is encoded there are no sums.
Encodings quantize_slot(const Call& call, Slot slot, at::Tensor x, bool row, bool col, Amaxes known, Beside beside = {}) {
  const Tokens* const tokens = beside.tokens;
  const Reading(&r)[kDirections] = call.plan->readings[slot];
  const History history = slot == kInput ? History{call.factors, call.histories}
                                         : History{call.grad_factors, call.grad_histories};
  Side plain[kDirections] = {};
  int64_t anchors[kDirections] = {};
  MaybeTensor key;
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!wants(*call.plan, slot, d, row, col)) continue;
    count(call.handle, slot * kDirections + d);
    if (r[d].run >= 0) {
      anchors[d] = r[d].packed;
    } else {
      plain[d] = tokens != nullptr && d == kColumnwise && r[d].decodes() ? turned(r[d].side) : r[d].side;
      if (r[d].side.stochastic && !key.has_value())
        key = tokens != nullptr ? random_keys(call, slot, *tokens) : random_key(call.step, call.ids, slot, x.size(0));
    }
  }
  const Delayed by = delayed_of(r, plain, history, tokens != nullptr ? tokens->groups : 1);
  const bool is_anchored = anchors[0] != 0 || anchors[1] != 0;
  const auto enc_of = [&](int d) { return by.factors[d].empty() ? MaybeTensor() : MaybeTensor(by.factors[d][0]); };
  const MaybeTensor encs[kDirections] = {enc_of(0), enc_of(1)};  // of one tensor
  if (beside.gated != nullptr && (is_anchored || !encodes_gated(x, plain[0], plain[1], encs, *beside.gated))) {
    const auto [h, amaxes] = activation(x, beside.gated->up, static_cast<int64_t>(beside.gated->kind));
    x = h, known = Amaxes::of(amaxes, x.size(0), x.size(1)), beside.gated = nullptr;
  }
  Encodings made;
  if (plain[0].present() || plain[1].present()) {
    made = encode_sides(plain, x, by, key, false, beside.tokens == nullptr ? known.whole : std::nullopt, beside);
    beside.column_sums = nullptr;
  }
  if (is_anchored) {
    const MaybeTensor none;
    if (anchors[1] == 0) beside.tokens = nullptr;
    auto sides = anchored(x, anchors[0], anchors[1], std::max<int64_t>(r[0].run, 0), std::max<int64_t>(r[1].run, 0),
                          anchors[0] != 0 && r[0].run == 0 ? known.rows : none,
                          anchors[1] != 0 && r[1].run == kAmaxRun ? known.runs : none, false, beside);
    auto next = sides.begin();
    for (int d = 0; d < kDirections; ++d)
      if (anchors[d] != 0) made[d].data = std::move(*next++), made[d].scale = std::move(*next++);
  }
  return made;
}

// One operand of a product: codes and scales, or 16-bit values; and a factor that multiplies the product. alpha: of both
// operands, where it is made already.
struct Operand {
  at::Tensor data;
  MaybeTensor scale;
  int64_t kind = 0;
  Factor factor = {};
  at::Tensor alpha;
};

// e: compact codes where the reading decodes them, else in the layout that the product reads. other: the operand before
// it, with whose factor alpha is made on the way.
Operand operand_of(const Reading& r, Direction d, const Encoded& e, const Operand* other = nullptr) {
  if (!r.is_quantized()) return {d == kColumnwise ? e.data.t() : e.data};
  const auto pointer = [](const at::Tensor& t) { return t.const_data_ptr<float>(); };
  const bool outside = r.decodes() && r.side.whole();  // the scale of the whole tensor
  Operand o;
  if (outside) o.factor = {pointer(e.scale), 0.0f};
  if (e.tensor_amax.defined() && r.has_tensor_amax()) o.factor = {pointer(e.tensor_amax), r.side.tensor_max};
  if (!r.decodes()) {
    o.data = e.data, o.scale = e.scale, o.kind = r.kind;
    return o;
  }
  Alpha alpha = {{other != nullptr ? other->factor : Factor{}, o.factor}, nullptr};
  if (other != nullptr && (alpha.factors[0].value != nullptr || alpha.factors[1].value != nullptr)) {
    o.alpha = new_empty(e.data, {1}, at::kFloat);
    alpha.out = o.alpha.mutable_data_ptr<float>();
  }
  const int64_t cols = e.data.size(1) * (r.side.four_bit() ? 2 : 1);
  const MaybeTensor none;
  o.data = decode(e.data, outside ? none : MaybeTensor(e.scale), none, r.packed, d == kColumnwise, cols, 0, at::kBFloat16,
                  &alpha);
  if (d == kColumnwise) o.data = o.data.t();
  return o;
}

// Adds what the product of these operands lost to its anchors to the guard, where it is watched.
void watch(
    const Call& call, int product, const at::Tensor& a, const MaybeTensor& a_scale, int64_t a_kind, const at::Tensor& b,
    const MaybeTensor& b_scale, int64_t b_kind) {
  const int64_t counted = call.plan->watched[product];
  if (!call.guard.has_value() || counted == 0) return;
  product_error(a, b, a_scale, b_scale, a_kind, b_kind, counted, call.step, *call.guard, product);
}

void watch(const Call& call, int product, const Operand& a, const Operand& b) {
  watch(call, product, a.data, a.scale, a.kind, b.data, b.scale, b.kind);
}

at::Tensor multiply(const Operand& a, const Operand& b, at::ScalarType dtype, const MaybeTensor& bias) {
  MaybeTensor alpha;
  if (b.alpha.defined()) {
    alpha = b.alpha;
  } else if (a.factor.value != nullptr || b.factor.value != nullptr) {
    alpha = new_empty(a.data, {1}, at::kFloat);
    check_launch(launch_alpha(a.factor, b.factor, alpha->mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()),
                 "linear_step");
  } else if (a.kind == 0 && b.kind == 0) {
    return at::linear(a.data, b.data, bias);  // exactly torch's
  }
  return gemm(a.data, b.data, a.scale, b.scale, a.kind, b.kind, dtype, bias, alpha);
}

// Codes as one list: data, scale and tensor amax of each side that is there.
void append(std::vector<at::Tensor>& list, const Reading& r, const Encoded& e) {
  for (const at::Tensor* t : {&e.data, &e.scale, &e.tensor_amax})
    if (t->defined() && (t != &e.tensor_amax || r.has_tensor_amax())) list.push_back(*t);
}

Encoded take(const std::vector<at::Tensor>& list, size_t& at, const Reading& r) {
  Encoded e;
  const size_t fields = r.is_quantized() ? 2 + r.has_tensor_amax() : 1;
  TORCH_CHECK_VALUE(at + fields <= list.size(), "got ", list.size(), " buffers of codes; more are wanted");
  e.data = list[at];
  if (fields > 1) e.scale = list[at + 1];
  if (fields > 2) e.tensor_amax = list[at + 2];
  at += fields;
  return e;
}

at::Tensor matrix(const at::Tensor& x) {
  at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

// y [rows, cols] in the shape of its input; no view, so that users may write it in place.
at::Tensor of_shape(const at::Tensor& y, at::IntArrayRef sizes) {
  if (y.sizes() == sizes) return y;
  return at::empty({0}, y.options()).set_(y.storage(), y.storage_offset(), sizes);
}

// A weight as a call is given it: values to quantize, or the buffers of its operands.
struct Weight {
  MaybeTensor values;
  bool round_to_bf16;
  at::TensorList rowwise, columnwise, factors, histories;
};

std::vector<at::Tensor> linear_weight(
    const at::Tensor& weight, int64_t plan, bool row, bool col, bool round_to_bf16, at::TensorList factors,
    at::TensorList histories);

// The rowwise operand of the weight; the columnwise one, where dgrad follows, goes to the call.
std::vector<at::Tensor> take_weight(Call& call, const Weight& weight, bool dgrad) {
  if (!weight.values.has_value()) {
    call.columnwise = weight.columnwise.vec();
    return weight.rowwise.vec();
  }
  const Reading(&r)[kDirections] = call.plan->readings[kWeight];
  std::vector<at::Tensor> made = linear_weight(*weight.values, call.handle, true, dgrad, weight.round_to_bf16, weight.factors,
                                               weight.histories);
  size_t at = 0;
  std::vector<at::Tensor> operands[kDirections];
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (d == kColumnwise && !dgrad) continue;
    if (!r[d].is_quantized()) {
      operands[d] = {*weight.values};
    } else if (d == kColumnwise && r[d].same) {
      operands[d] = operands[kRowwise];
    } else {
      append(operands[d], r[d], take(made, at, r[d]));
    }
  }
  call.columnwise = std::move(operands[kColumnwise]);
  return operands[kRowwise];
}

// y, then the codes of x that were made or given (`codes`, of an earlier call).
std::vector<at::Tensor> forward(
    Call& call, const at::Tensor& x, const MaybeTensor& bias, const Weight& weight, bool dgrad, const MaybeTensor& amaxes,
    const std::vector<at::Tensor>& codes) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(x.device());
  const Plan& plan = *call.plan;
  const Reading(&r)[kDirections] = plan.readings[kInput];
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
  const Reading& w = plan.readings[kWeight][kRowwise];
  const std::vector<at::Tensor> operand = take_weight(call, weight, dgrad);
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
std::vector<at::Tensor> saved_of(const Call& call, const at::Tensor& x, const std::vector<at::Tensor>& result) {
  const Plan& plan = *call.plan;
  if (!call.saves) return {};
  if (plan.saves == Saves::kInput) return {x};
  const Reading(&r)[kDirections] = plan.readings[kInput];
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
    const Call& call, at::Tensor dy, std::vector<at::Tensor> saved, bool needs_x, bool needs_w,
    bool needs_b, const Amaxes& known) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(dy.device());
  const Plan& plan = *call.plan;
  const at::ScalarType dtype = dy.scalar_type();
  const Reading(&r)[kDirections] = plan.readings[kGradOutput];
  std::array<at::Tensor, 3> result;
  const Beside beside = {nullptr, nullptr, needs_b ? &result[2] : nullptr};
  Encodings made = quantize_slot(call, kGradOutput, dy, needs_x, needs_w, known, beside);
  if (needs_b && !result[2].defined()) result[2] = dy.sum(0);
  for (int d = 0; d < kDirections; ++d)
    if (!r[d].is_quantized()) made[d].data = dy;
  dy.reset();
  if (needs_w) {
    const Reading& x = plan.readings[kInput][kColumnwise];
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
    const Reading& w = plan.readings[kWeight][kColumnwise];
    size_t at = 0;
    const Operand b = operand_of(w, kColumnwise, take(call.columnwise, at, w), &a);
    result[0] = multiply(a, b, dtype, std::nullopt);
    watch(call, kDgrad, a, b);
    count(call.handle, kSlots * kDirections + kDgrad);
  }
  return result;
}

// Gradients under create_graph=True: there, but not to be differentiated.
struct OnlyOnce : torch::autograd::Function<OnlyOnce> {
  static variable_list forward(AutogradContext*, at::TensorList gradients) { return gradients.vec(); }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the layers of a "
               "gradient penalty out of fq.convert");
  }
};

}  // namespace

void refuse_second_derivatives(variable_list& gradients) {
  if (!at::GradMode::is_enabled()) return;
  variable_list there;
  for (const at::Tensor& t : gradients)
    if (t.defined()) there.push_back(t.requires_grad() ? t : t.detach().requires_grad_());
  const variable_list once = OnlyOnce::apply(at::TensorList(there));
  auto next = once.begin();
  for (at::Tensor& t : gradients)
    if (t.defined()) t = *next++;
}

namespace {

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const at::Tensor& edge, const MaybeTensor& bias,
      const c10::intrusive_ptr<Call>& call, const Weight* weight, bool dgrad, const MaybeTensor* amaxes,
      const std::vector<at::Tensor>* codes, std::vector<at::Tensor>* result) {
    *result = fsdp_quant::forward(*call, x, bias, *weight, dgrad, *amaxes, *codes);
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
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
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
      auto [dx, dw, db] = fsdp_quant::backward(*call, std::move(dy), std::move(saved), needs_x, needs_w, needs_b, known);
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
  static void check_not_freed(const Call& call) {
    TORCH_CHECK(!call.columnwise.empty(), "the codes that this backward reads were freed by an earlier one; pass retain_graph=True "
                "to it");
    for (const at::Tensor& t : call.columnwise)
      TORCH_CHECK(t.numel() == 0 || t.storage().nbytes() != 0, "StaleWeightError: the columnwise codes of a gathered weight were "
                  "freed: FSDP resharded the weight or gathered the other direction only; if this block is recomputed in a way "
                  "that hooks cannot see, set recomputes_forward=True on its fq.Linear");
  }
};

c10::intrusive_ptr<Call> call_of(
    int64_t plan, bool save, const at::Tensor& step, const at::Tensor& ids, const MaybeTensor& guard,
    at::TensorList factors, at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories) {
  auto call = c10::make_intrusive<Call>();
  call->handle = plan, call->plan = &plan_of(plan), call->saves = save;
  call->step = step, call->ids = ids, call->guard = guard;
  call->factors = factors.vec(), call->grad_factors = grad_factors.vec();
  call->histories = histories.vec(), call->grad_histories = grad_histories.vec();
  return call;
}

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
  TORCH_CHECK_VALUE(call->plan->readings[kInput][kRowwise].is_quantized() && (!save || call->plan->saves == Saves::kCodes),
                    "the layer multiplies or keeps the input itself; make it first");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(gate.device());
  const Gated gated = {matrix(up), static_cast<Activation>(activation)};
  std::vector<at::Tensor> codes;
  const Encodings made = quantize_slot(*call, kInput, matrix(gate), true, save, {}, {&gated});
  for (const Direction d : {kRowwise, kColumnwise}) append(codes, call->plan->readings[kInput][d], made[d]);
  return codes;
}

std::vector<at::Tensor> run_step(
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
  return run_step(kWithNode && at::GradMode::is_enabled(), x, edge, bias, weight, plan, save, step, ids, guard, factors,
                  grad_factors, histories, grad_histories, codes, amaxes, grad_amaxes);
}

// The same as `linear_weight` of matrices [E, N, K] in 4 bits, as groups of tokens: compact rowwise codes [E * N, K / 2] and scales,
// columnwise ones [K, E * n / 2], where n is N rounded up to 128 and scales are [K or its blocks, E * n / 16], and tensor amaxes [E].
// Operands (ScaleLayout) have a byte per code, and scales [E].
std::vector<at::Tensor> stacked_runs(const at::Tensor& weight, int64_t plan, bool row, bool col) {
  const Reading(&r)[kDirections] = plan_of(plan).readings[kWeight];
  check_cuda(weight, "weight");
  const c10::cuda::CUDAGuard guard(weight.device());
  const int64_t matrices = weight.size(0), rows = weight.size(1);
  TORCH_CHECK_VALUE(weight.is_contiguous() && rows % kRotationBlock == 0, "weight has shape ", weight.sizes(), " and strides ",
                    weight.strides(), "; wanted contiguous matrices, of multiples of ", kRotationBlock, " rows");
  const Side none = {}, of_col = (r[kColumnwise].same ? r[kRowwise] : r[kColumnwise]).side;
  Side of_row = row ? r[kRowwise].side : of_col;
  of_row.transposed = false;
  const bool both = (col ? of_col : of_row).outer != 1;  // a square block serves both
  const Side side[kDirections] = {row || both ? of_row : none, col || both ? turned(col ? of_col : of_row) : none};
  const at::Tensor ends = at::arange(rows, (matrices + 1) * rows, rows, weight.options().dtype(at::kInt));
  const at::Tensor tables = token_groups(ends, matrices * rows, std::nullopt, 0);
  const TokenTables at = tables_of(tables, matrices, weight);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, at.groups};
  const MaybeTensor unknown;
  const Known known[kDirections] = {{unknown, unknown, unknown, unknown}, {unknown, unknown, unknown, unknown}};
  const Encodings made =
      encode(weight.view({matrices * rows, weight.size(2)}), side[0], side[1], known, 0, false, false, nullptr, {nullptr, &tokens});
  std::vector<at::Tensor> result;
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!(d == kRowwise ? row : col)) continue;
    count(plan, kWeight * kDirections + (r[d].same ? kRowwise : d), matrices);
    append(result, r[d], made[d]);
  }
  return result;
}

// The weight's operands, as `append` lists them; of matrices [E, N, K] those of each, stacked. Anchored codes are those of
// compact codes, as they are in a gather; one kernel makes both where it can.
std::vector<at::Tensor> linear_weight(
    const at::Tensor& weight, int64_t plan, bool row, bool col, bool through_bf16, at::TensorList factors,
    at::TensorList histories) {
  const Plan& p = plan_of(plan);
  const Reading(&r)[kDirections] = p.readings[kWeight];
  const std::vector<at::Tensor> scales_by = factors.vec(), recorded = histories.vec();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool stacked = weight.dim() == 3;
  const bool runs[kDirections] = {r[kRowwise].side.two_level(), (r[kColumnwise].same ? r[kRowwise] : r[kColumnwise]).side.two_level()};
  if (stacked && ((row && runs[kRowwise]) || (col && runs[kColumnwise]))) {
    std::vector<at::Tensor> made = stacked_runs(weight, plan, row && runs[kRowwise], col && runs[kColumnwise]), rest;
    if ((row && !runs[kRowwise]) || (col && !runs[kColumnwise]))
      rest = linear_weight(weight, plan, row && !runs[kRowwise], col && !runs[kColumnwise], through_bf16, factors, histories);
    if (!runs[kRowwise]) made.swap(rest);  // rowwise buffers first
    made.insert(made.end(), rest.begin(), rest.end());
    return made;
  }
  const int64_t matrices = stacked ? weight.size(0) : 1;
  TORCH_CHECK_VALUE(!stacked || matrices > 0, "weight has shape ", weight.sizes(), "; wanted one matrix or more");
  Side sides[kDirections] = {};
  int64_t at_once[kDirections] = {};
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!wants(p, kWeight, d, row, col)) continue;
    if (!stacked && r[d].run == kOfTensor && anchors_codes(weight, r[d].side, through_bf16)) {
      at_once[d] = r[d].packed;
      continue;
    }
    sides[d] = r[d].side;
    if (r[d].is_anchored()) sides[d].transposed = false;  // compact, as `anchor_codes` reads them
    TORCH_CHECK_NOT_IMPLEMENTED(!stacked || (!sides[d].two_level() && r[d].kind != 0),
                                "matrices are stacked as products of groups read them");
  }
  const Delayed by = delayed_of(r, sides, {scales_by, recorded}, matrices);
  Encodings made;
  if (stacked) {
    made = encode_stacked(weight, sides[0], sides[1], through_bf16, {{by.factors[0], by.records[0]}, {by.factors[1], by.records[1]}});
  } else if (sides[0].present() || sides[1].present()) {
    made = encode_sides(sides, matrix(weight), by, std::nullopt, through_bf16, std::nullopt);
  }
  std::vector<at::Tensor> anchors;
  if (at_once[0] != 0 || at_once[1] != 0)
    anchors = anchored(matrix(weight), at_once[0], at_once[1], kOfTensor, kOfTensor, std::nullopt, std::nullopt, through_bf16);
  std::vector<at::Tensor> result;
  auto next = anchors.begin();
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!sides[d].present() && at_once[d] == 0) continue;
    count(plan, kWeight * kDirections + d, matrices);
    const bool turned = d == kColumnwise;
    if (at_once[d] != 0) {
      made[d].data = *next++, made[d].scale = next++->view({1});
    } else if (r[d].is_anchored()) {
      std::tie(made[d].data, made[d].scale) =
          anchor_codes(made[d].data, made[d].scale, std::nullopt, r[d].packed, turned, turned, r[d].run == kOfTensor,
                       weight.size(-1));
    }
    append(result, r[d], made[d]);
  }
  return result;
}

c10::intrusive_ptr<Call> call_of_groups(
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

Multiplied multiplied(const Reading& r, const Encoded& e) {
  if (!r.decodes()) return {e.data, e.scale, r.kind};
  const MaybeTensor none;
  const int64_t cols = e.data.size(1) * (r.side.four_bit() ? 2 : 1);
  // Of a columnwise side too: its codes are turned.
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
  const auto call = call_of_groups(plan, true, step, ids, guard, factors, factors, {}, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const TokenTables at = tables_of(tables, groups, x);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, groups};
  std::vector<at::Tensor> result;
  const Encodings made = quantize_slot(*call, static_cast<Slot>(slot), matrix(x), row, col, {}, {nullptr, &tokens});
  for (const Direction d : {kRowwise, kColumnwise}) append(result, call->plan->readings[slot][d], made[d]);
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
  multiply_rows(out, a, b, at.offsets, nullptr, 0);
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
  const auto call = call_of_groups(plan, save, step, ids, guard, factors, {}, histories, {});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(x.device());
  const at::Tensor rows = matrix(x), tables = token_groups(ends, rows.size(0), wrong, tag);
  const TokenTables at = tables_of(tables, ends.numel(), x);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, at.groups};
  const bool keeps = save && call->plan->saves == Saves::kCodes;
  const Encodings made = quantize_slot(*call, kInput, rows, true, keeps, {}, {nullptr, &tokens});
  const Reading &of_x = call->plan->readings[kInput][kRowwise], &of_weight = call->plan->readings[kWeight][kRowwise];
  const Multiplied a = of_x.is_quantized() ? multiplied(of_x, made[kRowwise]) : Multiplied{rows, {}, 0};
  const int64_t kind = of_weight.decodes() ? kScaledValues : of_weight.kind;
  const at::Tensor y = rows_product({a.data, a.scale, a.kind}, {weight, weight_scale, kind}, tables, at, out_dtype);
  watch(*call, kFprop, a.data, a.scale, a.kind, weight, weight_scale, kind);
  count(plan, kSlots * kDirections + kFprop, at.groups);
  std::vector<at::Tensor> result = {y, tables};
  if (keeps) append(result, call->plan->readings[kInput][kColumnwise], made[kColumnwise]);
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
  const auto call = call_of_groups(plan, true, step, ids, guard, factors, grad_factors, {}, grad_histories);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard device(dy.device());
  const TokenTables at = tables_of(tables, groups, dy);
  const Tokens tokens = {at.sources, at.offsets, at.tiles, groups};
  const at::Tensor rows = matrix(dy);
  const Reading(&r)[kSlots][kDirections] = call->plan->readings;
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
      multiply_depth(dw, {a.data, a.scale, a.kind}, {b.data, b.scale, b.kind}, at.padded, groups, false, nullptr, 0);
      watch(*call, kWgrad, a.data, a.scale, a.kind, b.data, b.scale, b.kind);
    }
    count(plan, kSlots * kDirections + kWgrad, groups);
  }
  made[kColumnwise] = {};
  if (weight.has_value()) {
    const Encoded& d = made[kRowwise];
    const Reading &of_dy = r[kGradOutput][kRowwise], &of_weight = r[kWeight][kColumnwise];
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

// A plan's number. fields: side, run, kind, same, factor of the input, weight and gradient, rowwise and columnwise of each;
// then what the backward saves, and what is watched of each product.
int64_t linear_plan(at::IntArrayRef fields, at::ArrayRef<double> eps, c10::string_view key) {
  constexpr size_t kReadings = kSlots * kDirections;
  constexpr size_t kFields = kReadings * kReadingFields + 1 + kProducts;
  TORCH_CHECK_VALUE(fields.size() == kFields && eps.size() == kReadings, "a linear plan has ",
                    kFields, " fields and ", kReadings, " eps; got ", fields.size(), " and ",
                    eps.size());
  Plan plan;
  for (size_t i = 0; i < kReadings; ++i) {
    const int64_t* f = fields.data() + i * kReadingFields;
    plan.readings[i / kDirections][i % kDirections] = {f[0], unpack_encoding(f[0], eps[i], "side"), f[1], f[2], f[3] != 0, f[4]};
  }
  plan.saves = static_cast<Saves>(fields[kReadings * kReadingFields]), plan.key = std::string(key);
  std::copy(fields.end() - kProducts, fields.end(), plan.watched);
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.plans.push_back(std::move(plan)), r.counts.push_back({});
  return static_cast<int64_t>(r.plans.size()) - 1;
}

// What ran since the last call, int64 [plans, 9]: quantizations of the input, the weight and the gradient (rowwise,
// columnwise each), products (fprop, dgrad, wgrad).
at::Tensor linear_counts() {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const at::Tensor counts = at::zeros({static_cast<int64_t>(r.counts.size()), kCounts}, at::kLong);
  int64_t* out = counts.mutable_data_ptr<int64_t>();
  for (auto& of_plan : r.counts) {
    out = std::copy(of_plan.begin(), of_plan.end(), out);
    of_plan.fill(0);
  }
  return counts;
}

}  // namespace

void register_linear(torch::Library& m) {
  m.def("linear_plan(int[] fields, float[] eps, str key) -> int", linear_plan);
  m.def("linear_counts() -> Tensor", linear_counts);
  m.def(
      "linear_weight(Tensor weight, int plan, bool row, bool col, bool through_bf16, Tensor[] factors, "
      "Tensor[] histories) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, linear_weight));
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
  m.def("random_key(Tensor step, Tensor ids, int slot, SymInt rows) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, random_key), compliant());
  // after: a gradient, behind which a graph reads the step.
  m.def("random_key.after(Tensor step, Tensor ids, int slot, SymInt rows, Tensor after) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& step, const at::Tensor& ids, int64_t slot, int64_t rows,
                                                   const at::Tensor&) { return random_key(step, ids, slot, rows); }),
        compliant());
  m.def("record_amax(Tensor(a!) amaxes, Tensor amax) -> ()", torch::dispatch(c10::DispatchKey::CUDA, record_amax), compliant());
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

}  // namespace fsdp_quant
