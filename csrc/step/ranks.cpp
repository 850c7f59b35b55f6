// SPDX-License-Identifier: Apache-2.0
#include "step/ranks.h"

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <torch/version.h>

#include "api/operands.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13  // their names before
#define all_gather_single_coalesced allgather_into_tensor_coalesced
#define reduce_scatter_single _reduce_scatter_base
#endif

namespace fsdp_quant::step {

ScalingAmaxes share_amaxes(const LinearCall& call, Slot slot, const at::Tensor& x, bool row, bool col, bool round_to_bf16) {
  const OperandSpec(&specs)[kDirections] = call.plan->operand_specs[slot];
  const bool shares = share_codes(specs), wanted[kDirections] = {row || (col && shares), col && !shares};
  ScalingAmaxes result;
  if (!call.ranks.group) return result;
  int64_t packed[kDirections] = {};  // 0: no amaxes of all ranks
  for (const Direction d : {kRowwise, kColumnwise})
    if (wanted[d] && call.ranks.spans(slot, d, specs[d].spec)) packed[d] = compact_encoding(specs[d].packed);
  if (packed[kRowwise] == 0 && packed[kColumnwise] == 0) return result;
  std::vector<at::Tensor> amaxes = statistics(x, packed[kRowwise], packed[kColumnwise], 0, round_to_bf16);
  for (at::Tensor& amax : amaxes) amax = amax.view({-1});
  const at::Tensor joined = amaxes.size() == 1 ? amaxes[0] : at::cat(amaxes);
  std::vector<at::Tensor> bits = {joined.view(at::kInt)};  // the bits of NaN are the largest: MAX keeps it
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  call.ranks.group->allreduce(bits, options)->wait();
  count(call.handle, amaxes_of(slot));
  int64_t offset = 0;
  auto amax = amaxes.begin();
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (packed[d] == 0) continue;
    result[d] = joined.narrow(0, offset, amax->numel());
    offset += (amax++)->numel();
  }
  if (shares) result[kColumnwise] = result[kRowwise];
  return result;
}

Direction sent_direction(const LinearCall& call, Slot slot, Direction d) {
  return share_codes(call.plan->operand_specs[slot]) ? kRowwise : d;
}

Encodings encode_rows(const LinearCall& call, Slot slot, const at::Tensor& x, bool row, bool col, const ScalingAmaxes& amaxes) {
  EncodingSpec specs[kDirections] = {};
  const bool needs[kDirections] = {row, col};
  for (const Direction d : {kRowwise, kColumnwise}) {
    const Direction sent = sent_direction(call, slot, d);
    const OperandSpec& operand = call.plan->operand_specs[slot][sent];
    const EncodingSpec& spec = operand.spec;
    if (!needs[d] || !operand.is_quantized() || specs[sent].present()) continue;
    const bool is_hopper = spec.scale_layout == ScaleLayout::kHopper && operand.kind != 0;
    const bool is_laid_out = operand.is_anchored() || (is_hopper && (spec.outer == 1 || spec.whole_tensor()));  // by `take`
    TORCH_CHECK_NOT_IMPLEMENTED(is_laid_out && !spec.two_level() && !spec.stochastic,
                                "ranks exchange codes of blocks of lines, or of tensors, rounded to nearest");
    specs[sent] = spec, specs[sent].transposed = false, specs[sent].scale_layout = ScaleLayout::kCompact;
    count(call.handle, slot * kDirections + sent);
  }
  const Delayed delayed = delayed_of(call.plan->operand_specs[slot], specs, history_of(call, slot));
  return encode_directions(specs, x, delayed, std::nullopt, false, amaxes);
}

namespace {

// Rows [to, from, chunk] of rows [from, to, chunk]: gathered rows are in the order of ranks, then of `outer`.
at::Tensor reordered(const at::Tensor& rows, int64_t from, int64_t to) {
  if (from == 1 || to == 1 || rows.size(0) == 1) return rows;
  return rows.view({from, to, -1, rows.size(1)}).transpose(0, 1).reshape({-1, rows.size(1)});
}

}  // namespace

Gather::Gather(const LinearCall& call, Slot slot, Direction d, const Encoded& local)
    : ranks_(call.ranks), r_(call.plan->operand_specs[slot]), codes_(local) {
  const Ranks& ranks = call.ranks;
  const auto bytes = [](const at::Tensor& t) { return t.view({-1}).view(at::kByte); };
  std::vector<at::Tensor> received, sent;
  for (at::Tensor* t : {&codes_.data, &codes_.scale}) {
    if (t == &codes_.scale && ranks.spans(slot, d, r_[d].spec)) continue;  // scales of shared amaxes are equal
    sent.push_back(bytes(*t));
    *t = new_empty(*t, {t->size(0) * ranks.count(), t->size(1)}, t->scalar_type());
    received.push_back(bytes(*t));
    count(call.handle, gathered_bytes_of(slot, d), received.back().numel());
  }
  work_ = ranks.group->all_gather_single_coalesced(received, sent);
}

Encoded Gather::take(Direction d, int64_t rows, int64_t cols) {
  const OperandSpec& r = r_[d];
  if (work_) {
    work_->wait(), work_.reset();
    for (at::Tensor* t : {&codes_.data, &codes_.scale}) *t = reordered(*t, ranks_.count(), ranks_.outer);
  }
  Encoded codes = codes_;
  if (r.is_anchored()) {
    OperandSpec compact = r;
    compact.packed = compact_encoding(r.packed);
    anchor(codes, compact, d, rows, cols);
    return codes;
  }
  // scales [blocks, lines] of a multiple of 4 lines, as `kHopper` wants them; or one for each line, or tensor
  if (d == kColumnwise) codes.data = transpose_codes(codes.data, rows, cols, 8);
  codes.scale = r.spec.whole() ? codes.scale.view({-1}) : d == kColumnwise ? codes.scale : codes.scale.t().contiguous();
  return codes;
}

Sum::Sum(const Ranks& ranks, at::Tensor y, bool scatters, const MaybeTensor& out) : y_(std::move(y)) {
  if (scatters) {
    y_ = reordered(y_, ranks.outer, ranks.count());
    sum_ = out.has_value() ? *out : new_empty(y_, {y_.size(0) / ranks.count(), y_.size(1)}, y_.scalar_type());
    work_ = ranks.group->reduce_scatter_single(sum_, y_);
  } else {
    sum_ = y_;
    std::vector<at::Tensor> all = {sum_};
    work_ = ranks.group->allreduce(all);
  }
}

at::Tensor Sum::take() {
  work_->wait();
  return std::move(sum_);
}

std::vector<at::Tensor> exchange(const LinearCall& call, bool is_behind, const std::vector<at::Tensor>& tensors) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fsdp_quant::shared_input", "")
                             .typed<std::vector<at::Tensor>(int64_t, bool, at::TensorList)>();
  return op.call(call.ranks.reader, is_behind, tensors);
}

at::Tensor scattered_product(const LinearCall& call, const LinearOperand& a, const LinearOperand& b, at::ScalarType dtype) {
  const Ranks& ranks = call.ranks;
  const int64_t lines = a.data.size(0), chunk = lines / ranks.count(), rows = chunk / ranks.pieces, cols = b.data.size(0);
  const bool is_whole = a.scale->numel() == 1, by_line = a.scale->numel() == lines;
  const at::Tensor scales = is_whole || by_line ? *a.scale : a.scale->view({-1, round_up(lines, 4)});  // [blocks, lines]
  const at::Tensor result = new_empty(a.data, {chunk, cols}, dtype);
  std::vector<Sum> sums;
  for (int64_t start = 0; start < chunk; start += rows) {
    const at::Tensor y = new_empty(a.data, {ranks.count() * rows, cols}, dtype);
    for (int64_t rank = 0; rank < ranks.count(); ++rank) {
      const int64_t first = rank * chunk + start;
      LinearOperand part = a;
      part.data = a.data.narrow(0, first, rows);
      if (!is_whole) part.scale = scales.narrow(by_line ? 0 : 1, first, rows).contiguous();
      product_into(y.narrow(0, rank * rows, rows), part, b, false);
      record_error(call, kFprop, part, b);
      count(call.handle, kSlots * kDirections + kFprop);
    }
    sums.emplace_back(ranks, y, true, result.narrow(0, start, rows));
  }
  for (Sum& sum : sums) sum.take();
  return result;
}

}  // namespace fsdp_quant::step
