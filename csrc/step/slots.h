// SPDX-License-Identifier: Apache-2.0
// Codes of a slot of a linear layer, and operands of its products.
#pragma once

#include <vector>

#include "api/gemm.h"
#include "api/layout.h"
#include "norm/norm.h"
#include "step/plan.h"

namespace fsdp_quant::step {

// The factors and histories of a slot's delayed directions.
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

// What scales the delayed directions, and where their amaxes go: of one tensor, or of several, whose factors and histories follow
// each other, those of the first direction first.
struct Delayed {
  at::TensorList factors[kDirections], records[kDirections];
};

at::Tensor random_key(const at::Tensor& step, const at::Tensor& ids, int64_t slot, int64_t rows);

Delayed delayed_of(const OperandSpec (&r)[kDirections], const EncodingSpec (&specs)[kDirections], const History& history, int64_t tensors = 1);

// Codes of x for these directions, where their EncodingSpec is present; amaxes of delayed directions go into their histories.
// amax: of x, where it is known.
Encodings encode_directions(
    const EncodingSpec (&specs)[kDirections], const at::Tensor& x, const Delayed& by, const MaybeTensor& key, bool round_to_bf16,
    const MaybeTensor& amax, const EncodeExtras& extras = {});

// Compact codes of values [rows, cols] (or of matrices of that) become those against the anchors of a reading.
void anchor(Encoded& codes, const OperandSpec& r, Direction d, int64_t rows, int64_t cols);

// A columnwise direction of codes that are decoded for a product of groups, whose operands are K-major.
EncodingSpec turned(EncodingSpec spec);

// The storages of x that are wanted. known: of x itself; beside: see encode, where nothing is encoded there are no sums.
Encodings quantize_slot(const LinearCall& call, Slot slot, at::Tensor x, bool row, bool col, Amaxes known, EncodeExtras extras = {});

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
Operand operand_of(const OperandSpec& r, Direction d, const Encoded& e, const Operand* other = nullptr);

// Adds what the product of these operands lost to its anchors to the guard, where it is watched.
void watch(
    const LinearCall& call, int product, const at::Tensor& a, const MaybeTensor& a_scale, int64_t a_kind, const at::Tensor& b,
    const MaybeTensor& b_scale, int64_t b_kind);

void watch(const LinearCall& call, int product, const Operand& a, const Operand& b);

at::Tensor multiply(const Operand& a, const Operand& b, at::ScalarType dtype, const MaybeTensor& bias);

// Codes as one list: data, scale and tensor amax of each direction that is there.
void append(std::vector<at::Tensor>& list, const OperandSpec& r, const Encoded& e);

Encoded take(const std::vector<at::Tensor>& list, size_t& at, const OperandSpec& r);

at::Tensor matrix(const at::Tensor& x);

}  // namespace fsdp_quant::step
