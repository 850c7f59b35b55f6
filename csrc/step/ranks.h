// SPDX-License-Identifier: Apache-2.0
// What ranks that share a linear layer exchange: amaxes, rows of codes, and sums. Mirrors linear/transport.py, in its order of
// collectives: a rank may run that program while another runs this one.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "step/slots.h"

namespace fsdp_quant::step {

// Amaxes of x [rows, cols] by which the wanted directions of a slot are scaled, as far as scales follow from values of all
// ranks, after one MAX all-reduce.
ScalingAmaxes share_amaxes(const LinearCall& call, Slot slot, const at::Tensor& x, bool row, bool col,
                           bool round_to_bf16 = false);

// Direction of the codes that ranks send of a direction of a slot.
Direction sent_direction(const LinearCall& call, Slot slot, Direction d);

// Compact codes of x [rows, cols] in the directions that are sent of those wanted. amaxes: from `share_amaxes`.
Encodings encode_rows(const LinearCall& call, Slot slot, const at::Tensor& x, bool row, bool col, const ScalingAmaxes& amaxes);

// All ranks' rows of codes, in the order of the whole tensor, on their way.
class Gather {
 public:
  // local: from `encode_rows`. d: which pass reads them first.
  Gather(const LinearCall& call, Slot slot, Direction d, const Encoded& local);

  // Wait, and return the operand of values [rows, cols] of all ranks.
  Encoded take(Direction d, int64_t rows, int64_t cols);

 private:
  const Ranks& ranks_;
  const OperandSpec (&r_)[kDirections];
  Encoded codes_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// A sum over the ranks on its way: all of y, in place, or of its rows those of this rank. out: where to.
class Sum {
 public:
  Sum(const Ranks& ranks, at::Tensor y, bool scatters, const MaybeTensor& out = std::nullopt);

  at::Tensor take();

 private:
  at::Tensor y_, sum_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// What ranks exchange for layers that read one cut x, some of which may run the Python program: `SharedInput.exchange` of
// linear/shared_input.py.
std::vector<at::Tensor> exchange(const LinearCall& call, bool is_behind, const std::vector<at::Tensor>& tensors);

// This rank's rows of the sum over the ranks of a b^T, of which one piece of a rank's rows is scattered while the next is
// multiplied; see `scattered_product` of linear/transport.py. a: codes of lines, with scales of their own.
at::Tensor scattered_product(const LinearCall& call, const LinearOperand& a, const LinearOperand& b, at::ScalarType dtype);

}  // namespace fsdp_quant::step
