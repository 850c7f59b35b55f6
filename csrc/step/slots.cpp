// SPDX-License-Identifier: Apache-2.0
#include "step/slots.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "api/norm.h"
#include "layout/scalars.h"

namespace fsdp_quant::step {

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

namespace {

// Raise the newest amax of a history in place, if finite.
void record_amax(const at::Tensor& amaxes, const at::Tensor& amax) {
  check_cuda(amaxes, "amaxes");
  check_buffer(amaxes, "amaxes", amaxes, at::kFloat, amaxes.numel());
  check_buffer(amax, "amax", amaxes, at::kFloat, 1);
  const c10::cuda::CUDAGuard guard(amaxes.device());
  check_launch(launch_record_amax(amaxes.mutable_data_ptr<float>(), amax.const_data_ptr<float>(),
                                  c10::cuda::getCurrentCUDAStream()), "record_amax");
}

}  // namespace

Delayed delayed_of(const OperandSpec (&r)[kDirections], const EncodingSpec (&specs)[kDirections], const History& history,
                   int64_t tensors) {
  Delayed by;
  for (int d = 0; d < kDirections; ++d) {
    const int64_t i = r[d].factor;
    if (!specs[d].present() || i < 0) continue;
    const auto of_direction = [&](const std::vector<at::Tensor>& list) {
      return at::TensorList(list).slice(i * tensors, tensors);
    };
    TORCH_CHECK_VALUE((i + 1) * tensors <= static_cast<int64_t>(history.factors.size()), "the plan scales by history ", i, " of ",
                      tensors, " tensors; got ", history.factors.size());
    by.factors[d] = of_direction(history.factors);
    const bool recorded =
        d == 1 && !by.records[0].empty() && r[0].factor == i;  // directions that share storage share a history
    if ((i + 1) * tensors <= static_cast<int64_t>(history.amaxes.size()) && !recorded)
      by.records[d] = of_direction(history.amaxes);
  }
  return by;
}

namespace {

template <class T>
PointerTable<T> pointer_table(at::TensorList tensors, const char* name, int64_t numel) {
  PointerTable<T> table = {};
  TORCH_CHECK_VALUE(tensors.size() <= std::size(table.at), "there are ", tensors.size(), " groups; wanted at most ",
                    std::size(table.at));
  table.count = static_cast<int32_t>(tensors.size());
  for (size_t e = 0; e < tensors.size(); ++e) {
    check_buffer(tensors[e], name, tensors[0], c10::CppTypeToScalarType<T>::value, numel);
    table.at[e] = tensors[e].const_data_ptr<T>();
  }
  return table;
}

// Factors of groups, copied to one buffer.
at::Tensor collect_factors(at::TensorList factors) {
  const PointerTable<float> scalars = pointer_table<float>(factors, "enc", 1);
  at::Tensor enc = new_empty(factors[0], {scalars.count}, at::kFloat);
  check_launch(launch_collect(scalars, enc.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()), "grouped_step");
  return enc;
}

// Random keys of token groups, [groups, 5].
at::Tensor random_keys(const LinearCall& call, Slot slot, const TokenTables& tokens) {
  check_buffer(call.step, "step", call.step, at::kLong, 5);
  TORCH_CHECK_VALUE(static_cast<int64_t>(call.group_ids.size()) == tokens.groups, "got the ids of ", call.group_ids.size(),
                    " groups; wanted ", tokens.groups);
  PointerTable<int64_t> ids = pointer_table<int64_t>(call.group_ids, "ids", kSlots);
  for (int32_t e = 0; e < ids.count; ++e) ids.at[e] += slot;
  at::Tensor keys = new_empty(call.step, {tokens.groups, 5}, at::kLong);
  check_launch(launch_random_keys(call.step.const_data_ptr<int64_t>(), ids, tokens.offsets, keys.mutable_data_ptr<int64_t>(),
                                  c10::cuda::getCurrentCUDAStream()), "grouped_step");
  return keys;
}

// The values that no quantize kernel computes.
at::Tensor gated_values(const at::Tensor& x, const GatedInput& gated) {
  const int64_t kind = static_cast<int64_t>(gated.kind);
  const auto weighted = [&](const at::Tensor& h) { return h.mul(gated.weights.unsqueeze(1)).to(h.scalar_type()); };
  if (!gated.gradient) return weighted(std::get<0>(activation(x, gated.up, kind)));
  const at::Tensor dx = new_empty(x, x.sizes(), x.scalar_type());
  const auto [g, u] = operands_of(x, std::nullopt, true);
  const auto [dg, du] = operands_of(dx, std::nullopt, true);
  const at::Tensor h = std::get<0>(activation(g, u, kind));
  at::Tensor(gated.dots[0]).copy_(h.to(at::kFloat).mul_(gated.up).sum(1));
  backward_into(dg, *du, std::nullopt, weighted(gated.up), g, u, kind, true);
  return dx;
}

}  // namespace

Encodings encode_directions(const EncodingSpec (&specs)[kDirections], const at::Tensor& x, const Delayed& by,
                            const MaybeTensor& key, bool round_to_bf16, const ScalingAmaxes& amaxes,
                            const EncodeExtras& extras) {
  const MaybeTensor none;
  MaybeTensor enc[kDirections];
  for (int d = 0; d < kDirections; ++d) {
    if (by.factors[d].empty()) continue;
    const bool is_shared = d == 1 && by.factors[0].data() == by.factors[1].data();
    enc[d] = is_shared ? enc[0] : extras.tokens != nullptr ? collect_factors(by.factors[d]) : by.factors[d][0];
  }
  const auto known_of = [&](int d) -> GivenAmaxes {
    if (extras.tokens != nullptr || by.records[d].empty()) return {amaxes[d], none, enc[d], key, nullptr, by.records[d]};
    return {amaxes[d], none, enc[d], key, &by.records[d][0]};
  };
  const GivenAmaxes known[2] = {known_of(0), known_of(1)};
  return encode(x, specs[0], specs[1], known, 0, round_to_bf16, false, nullptr, extras);
}

void anchor(Encoded& codes, const OperandSpec& r, Direction d, int64_t rows, int64_t cols) {
  const bool columnwise = d == kColumnwise;
  const EncodingSizes<int64_t> sizes =
      encoding_sizes<int64_t>(r.spec, columnwise, rows, cols, 0);  // rotation pads rows or columns
  const MaybeTensor amax = codes.tensor_amax.defined() ? MaybeTensor(codes.tensor_amax) : std::nullopt;
  std::tie(codes.data, codes.scale) =
      anchor_codes(codes.data, codes.scale, amax, r.packed, columnwise, columnwise, r.run == kOfTensor, sizes.cols,
                   r.run == kOfTensor ? 0 : r.run);
}

EncodingSpec k_major_spec(EncodingSpec spec) {
  spec.transposed = true;
  if (!spec.operand()) spec.scale_layout = ScaleLayout::kHopper;
  return spec;
}

Encodings quantize_slot(const LinearCall& call, Slot slot, at::Tensor x, bool row, bool col, Amaxes known,
                        EncodeExtras extras) {
  const TokenTables* const tokens = extras.tokens;
  const OperandSpec(&r)[kDirections] = call.plan->operand_specs[slot];
  EncodingSpec plain[kDirections] = {};
  int64_t anchors[kDirections] = {};
  MaybeTensor key;
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!wants(*call.plan, slot, d, row, col)) continue;
    count(call.handle, slot * kDirections + d);
    if (r[d].anchors_values(tokens != nullptr)) {
      anchors[d] = r[d].packed;
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(tokens == nullptr || !r[d].is_anchored(), "codes of groups of tokens are not anchored");
      plain[d] = tokens != nullptr && d == kColumnwise && r[d].decodes() ? k_major_spec(r[d].spec) : r[d].spec;
      if (r[d].is_anchored()) plain[d].transposed = false;
      if (r[d].spec.stochastic && !key.has_value())
        key = tokens != nullptr ? random_keys(call, slot, *tokens) : random_key(call.step, call.ids, slot, x.size(0));
    }
  }
  const Delayed by = delayed_of(r, plain, history_of(call, slot), tokens != nullptr ? tokens->groups : 1);
  const bool is_anchored = anchors[0] != 0 || anchors[1] != 0;
  const auto enc_of = [&](int d) { return by.factors[d].empty() ? MaybeTensor() : MaybeTensor(by.factors[d][0]); };
  const MaybeTensor encs[kDirections] = {enc_of(0), enc_of(1)};  // of ungrouped tensors
  if (extras.gated != nullptr && tokens != nullptr) {
    const auto spec_of = [&](int d) { return anchors[d] != 0 ? r[d].spec : plain[d]; };
    const bool is_whole = (anchors[0] != 0) == (anchors[1] != 0) && by.factors[0].empty() && by.factors[1].empty();
    const int64_t runs[kDirections] = {is_anchored ? r[0].run : 0, is_anchored ? r[1].run : 0};
    if (!is_whole || !can_gate_tokens(x, spec_of(0), spec_of(1), runs[0], runs[1], *extras.gated, *tokens))
      x = gated_values(x, *extras.gated), extras.gated = nullptr;
  } else if (extras.gated != nullptr && (is_anchored || !can_encode_gated(x, plain[0], plain[1], encs, *extras.gated))) {
    const auto [h, amaxes] = activation(x, extras.gated->up, static_cast<int64_t>(extras.gated->kind));
    x = h, known = Amaxes::of(amaxes, x.size(0), x.size(1)), extras.gated = nullptr;
  }
  Encodings encoded;
  if (plain[0].present() || plain[1].present()) {
    const auto amax_of = [&](int d) { return tokens == nullptr && plain[d].whole_tensor() ? known.whole : std::nullopt; };
    encoded = encode_directions(plain, x, by, key, false, {amax_of(0), amax_of(1)}, extras);
    extras.column_sums = nullptr;
    for (const Direction d : {kRowwise, kColumnwise})
      if (plain[d].present() && r[d].is_anchored()) anchor(encoded[d], r[d], d, x.size(0), x.size(1));
  }
  const auto encode_anchors = [&](int64_t row, int64_t col) {
    if (row == 0 && col == 0) return;
    const MaybeTensor none;
    extras.tokens = col != 0 ? tokens : nullptr;
    auto tensors = encode_anchored(col != 0 ? x : ordered_rows(x, tokens), row, col, row != 0 ? r[0].run : 0, col != 0 ? r[1].run : 0,
                                   row != 0 && r[0].run == 0 ? known.rows : none,
                                   col != 0 && r[1].run == kAmaxRun ? known.runs : none, false, extras);
    auto next = tensors.begin();
    const int64_t wanted[kDirections] = {row, col};
    for (int d = 0; d < kDirections; ++d)
      if (wanted[d] != 0) encoded[d].data = std::move(*next++), encoded[d].scale = std::move(*next++);
    extras.column_sums = nullptr;
  };
  const bool apart = anchors[1] != 0 && r[1].run == kOfTile && r[0].run != kTile;  // lines of rows need statistics
  if (apart) encode_anchors(anchors[0], 0);
  encode_anchors(apart ? 0 : anchors[0], anchors[1]);
  return encoded;
}

LinearOperand operand_of(const OperandSpec& r, Direction d, const Encoded& e, const LinearOperand* other) {
  if (!r.is_quantized()) return {{d == kColumnwise ? e.data.t() : e.data}};
  const auto pointer = [](const at::Tensor& t) { return t.const_data_ptr<float>(); };
  const bool outside = r.decodes() && r.spec.whole();  // the whole-tensor scale multiplies the GEMM
  LinearOperand o;
  if (outside) o.factor = {pointer(e.scale), 0.0f};
  if (e.tensor_amax.defined() && r.has_tensor_amax()) o.factor = {pointer(e.tensor_amax), r.spec.tensor_max};
  if (!r.decodes()) {
    o.data = e.data, o.scale = e.scale, o.kind = r.kind;
    return o;
  }
  Alpha alpha = {{other != nullptr ? other->factor : Factor{}, o.factor}, nullptr};
  if (other != nullptr && (alpha.factors[0].value != nullptr || alpha.factors[1].value != nullptr)) {
    o.alpha = new_empty(e.data, {1}, at::kFloat);
    alpha.out = o.alpha.mutable_data_ptr<float>();
  }
  const int64_t cols = codes_of(r.spec, e.data.size(1));
  const MaybeTensor none;
  o.data = decode(e.data, outside ? none : MaybeTensor(e.scale), none, r.packed, d == kColumnwise, cols, 0, at::kBFloat16,
                  &alpha);
  if (d == kColumnwise) o.data = o.data.t();
  return o;
}

void record_error(
    const LinearCall& call, int gemm, const GemmOperand& a, const GemmOperand& b, int64_t every, const int32_t* k_end) {
  const int64_t counted = call.plan->counted[gemm];
  if (!call.guard.has_value() || counted == 0) return;
  product_error(a.data, b.data, a.scale, b.scale, a.kind, b.kind, counted, call.step, *call.guard, gemm, every, k_end);
}

namespace {

MaybeTensor alpha_of(const LinearOperand& a, const LinearOperand& b) {
  if (b.alpha.defined()) return b.alpha;
  if (a.factor.value == nullptr && b.factor.value == nullptr) return std::nullopt;
  const at::Tensor alpha = new_empty(a.data, {1}, at::kFloat);
  check_launch(launch_alpha(a.factor, b.factor, alpha.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()),
               "linear_step");
  return alpha;
}

}  // namespace

void product_into(const at::Tensor& out, const LinearOperand& a, const LinearOperand& b, bool adds) {
  TORCH_CHECK_NOT_IMPLEMENTED(a.kind != 0 && b.kind != 0, "only a product of codes is written to a tensor that exists");
  gemm_out(out, a.data, b.data, a.scale, b.scale, a.kind, b.kind, adds, std::nullopt, alpha_of(a, b), 0);
}

at::Tensor multiply(const LinearOperand& a, const LinearOperand& b, at::ScalarType dtype, const MaybeTensor& bias) {
  const MaybeTensor alpha = alpha_of(a, b);
  if (!alpha.has_value() && a.kind == 0 && b.kind == 0) return at::linear(a.data, b.data, bias);  // the same bytes as torch
  return gemm(a.data, b.data, a.scale, b.scale, a.kind, b.kind, dtype, bias, alpha);
}

void append(std::vector<at::Tensor>& list, const OperandSpec& r, const Encoded& e) {
  for (const at::Tensor* t : {&e.data, &e.scale, &e.tensor_amax})
    if (t->defined() && (t != &e.tensor_amax || r.has_tensor_amax())) list.push_back(*t);
}

Encoded next_encoded(const std::vector<at::Tensor>& list, size_t& at, const OperandSpec& r) {
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

void register_slots(torch::Library& m) {
  m.def("random_key(Tensor step, Tensor ids, int slot, SymInt rows) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, random_key), compliant());
  // after: a gradient that orders reading the step in graphs.
  m.def("random_key.after(Tensor step, Tensor ids, int slot, SymInt rows, Tensor after) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& step, const at::Tensor& ids, int64_t slot, int64_t rows,
                                                   const at::Tensor&) { return random_key(step, ids, slot, rows); }),
        compliant());
  m.def("record_amax(Tensor(a!) amaxes, Tensor amax) -> ()", torch::dispatch(c10::DispatchKey::CUDA, record_amax), compliant());
}

}  // namespace fsdp_quant::step
