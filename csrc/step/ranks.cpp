// SPDX-License-Identifier: Apache-2.0
#include "step/ranks.h"

#include <optional>
#include <utility>
#include <vector>

#include <torch/version.h>

#include "api/operands.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13  // their names before
#define all_gather_single_coalesced allgather_into_tensor_coalesced
#define reduce_scatter_single _reduce_scatter_base
#endif

namespace fsdp_quant::step {

Encodings encode_rows(const LinearCall& call, Slot slot, const at::Tensor& x, bool row, bool col) {
  EncodingSpec specs[kDirections] = {};
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!wants(*call.plan, slot, d, row, col)) continue;
    const OperandSpec& r = call.plan->operand_specs[slot][d];
    const bool is_known = r.is_anchored() || (r.spec.scale_layout == ScaleLayout::kHopper && r.spec.outer == 1 && r.kind != 0);
    TORCH_CHECK_NOT_IMPLEMENTED(is_known && !r.spec.two_level() && !r.spec.stochastic,
                                "ranks exchange codes of blocks of lines, rounded to nearest");
    specs[d] = r.spec, specs[d].transposed = false, specs[d].scale_layout = ScaleLayout::kCompact;
    count(call.handle, slot * kDirections + d);
  }
  return encode_directions(specs, x, {}, std::nullopt, false, std::nullopt);
}

Gather::Gather(const LinearCall& call, Slot slot, Direction d, const Encoded& local)
    : r_(call.plan->operand_specs[slot][d]), d_(d) {
  const Ranks& ranks = call.ranks;
  const auto of_all = [&](const at::Tensor& t) {
    return new_empty(t, {t.size(0) * ranks.count(), t.size(1)}, t.scalar_type());
  };
  codes_.data = of_all(local.data), codes_.scale = of_all(local.scale);
  const auto bytes = [](const at::Tensor& t) { return t.view({-1}).view(at::kByte); };
  std::vector<at::Tensor> received = {bytes(codes_.data), bytes(codes_.scale)};
  std::vector<at::Tensor> sent = {bytes(local.data), bytes(local.scale)};
  work_ = ranks.group->all_gather_single_coalesced(received, sent);
  count(call.handle, gathered_bytes_of(slot, d), received[0].numel() + received[1].numel());
}

Encoded Gather::take(int64_t rows, int64_t cols) {
  work_->wait();
  if (r_.is_anchored()) {
    OperandSpec compact = r_;
    compact.packed = compact_encoding(r_.packed);
    anchor(codes_, compact, d_, rows, cols);
  } else if (d_ == kColumnwise) {  // scales [blocks, lines] of a multiple of 4 lines, as `kHopper` wants them
    codes_.data = transpose_codes(codes_.data, rows, cols, 8);
  } else {
    codes_.scale = codes_.scale.t().contiguous();
  }
  return std::move(codes_);
}

Sum::Sum(const Ranks& ranks, at::Tensor y, bool scatters, const MaybeTensor& out) : y_(std::move(y)) {
  if (scatters) {
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

at::Tensor scattered_product(const LinearCall& call, const LinearOperand& a, const LinearOperand& b, at::ScalarType dtype) {
  const Ranks& ranks = call.ranks;
  const int64_t lines = a.data.size(0), chunk = lines / ranks.count(), rows = chunk / ranks.pieces, cols = b.data.size(0);
  const bool by_line = a.scale->numel() == lines;
  const at::Tensor scales = by_line ? *a.scale : a.scale->view({-1, round_up(lines, 4)});  // kHopper: [blocks, lines]
  const at::Tensor result = new_empty(a.data, {chunk, cols}, dtype);
  std::vector<Sum> sums;
  for (int64_t start = 0; start < chunk; start += rows) {
    const at::Tensor y = new_empty(a.data, {ranks.count() * rows, cols}, dtype);
    for (int64_t rank = 0; rank < ranks.count(); ++rank) {
      const int64_t first = rank * chunk + start;
      LinearOperand part = a;
      part.data = a.data.narrow(0, first, rows);
      part.scale = scales.narrow(by_line ? 0 : 1, first, rows).contiguous();
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
