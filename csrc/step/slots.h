// SPDX-License-Identifier: Apache-2.0
// Quantize the slots of a linear layer (input, weight, gradient) and build GEMM operands.
#pragma once

#include <vector>

#include "api/gemm.h"
#include "api/layout.h"
#include "norm/norm.h"
#include "step/plan.h"

namespace fsdp_quant::step {

// Factors and histories of a slot with delayed scaling.
struct History {
  const std::vector<at::Tensor>&factors, &amaxes;
};

// Of the input or the gradient.
inline History history_of(const LinearCall& call, Slot slot) {
  return slot == kInput ? History{call.factors, call.histories} : History{call.grad_factors, call.grad_histories};
}

// Known amaxes of a tensor: whole [1], per row, per column over kAmaxRun rows [runs, cols].
struct Amaxes {
  MaybeTensor whole, rows, runs;

  static Amaxes of(const at::Tensor& all, int64_t rows, int64_t cols) {  // as AmaxLayout
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const AmaxLayout layout = {rows, cols};
    const auto part = [&](int64_t at, int64_t size) { return all.narrow(-1, at, size); };
    return {part(0, 1), part(layout.at_rows(), rows), part(layout.at_runs(), layout.runs() * cols)};
  }

  // by: that scale the directions of a tensor of which no scale spans lines alone.
  static Amaxes of(const ScalingAmaxes& by) { return {by[kRowwise].has_value() ? by[kRowwise] : by[kColumnwise]}; }

  // all: amaxes of x [rows, cols] as AmaxLayout, or only the whole's.
  static Amaxes given(const MaybeTensor& all, const at::Tensor& x) {
    if (!all.has_value()) return {};
    const int64_t cols = x.size(-1), rows = x.numel() / cols;
    const bool is_whole = all->numel() == 1;
    check_buffer(*all, "amaxes", x, at::kFloat, is_whole ? 1 : AmaxLayout{rows, cols}.size());
    return is_whole ? Amaxes{all->view({1})} : of(*all, rows, cols);
  }
};

// Delayed-scaling factors and histories: of one tensor, or of several in order, rowwise first.
struct Delayed {
  at::TensorList factors[kDirections], records[kDirections];
};

at::Tensor random_key(const at::Tensor& step, const at::Tensor& ids, int64_t slot, int64_t rows);

Delayed delayed_of(const OperandSpec (&r)[kDirections], const EncodingSpec (&specs)[kDirections], const History& history,
                   int64_t tensors = 1);

// Quantize x in the present directions and record amaxes of delayed scaling.
Encodings encode_directions(const EncodingSpec (&specs)[kDirections], const at::Tensor& x, const Delayed& by,
                            const MaybeTensor& key, bool round_to_bf16, const ScalingAmaxes& amaxes,
                            const EncodeExtras& extras = {});

// Anchor compact codes of values [rows, cols] (or stacked matrices) as `r` says.
void anchor(Encoded& codes, const OperandSpec& r, Direction d, int64_t rows, int64_t cols);

// K-major columnwise spec, for codes that are decoded for a grouped GEMM.
EncodingSpec k_major_spec(EncodingSpec spec);

// Quantize x in the wanted directions. known: of x itself; extras: see encode (no column sums if nothing is encoded).
Encodings quantize_slot(const LinearCall& call, Slot slot, at::Tensor x, bool row, bool col, Amaxes known,
                        EncodeExtras extras = {});

// An operand and its factor of the result. alpha: product of both operands' factors, if computed already.
struct LinearOperand : GemmOperand {
  Factor factor = {};
  at::Tensor alpha;
};

// e: compact codes if the spec decodes them, else in the GEMM's layout. other: the first operand, to compute alpha with its
// factor.
LinearOperand operand_of(const OperandSpec& r, Direction d, const Encoded& e, const LinearOperand* other = nullptr);

// Add this GEMM's error due to shared exponents to the guard, if watched.
void record_error(const LinearCall& call, int gemm, const GemmOperand& a, const GemmOperand& b, int64_t every = kProbedSteps,
                  const int32_t* k_end = nullptr);

at::Tensor multiply(const LinearOperand& a, const LinearOperand& b, at::ScalarType dtype, const MaybeTensor& bias);

// Write a product of codes to `out`, or add it.
void product_into(const at::Tensor& out, const LinearOperand& a, const LinearOperand& b, bool adds);

// Append data, scale and tensor amax of each present direction to a list.
void append(std::vector<at::Tensor>& list, const OperandSpec& r, const Encoded& e);

Encoded next_encoded(const std::vector<at::Tensor>& list, size_t& at, const OperandSpec& r);

at::Tensor matrix(const at::Tensor& x);

}  // namespace fsdp_quant::step
