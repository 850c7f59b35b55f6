// SPDX-License-Identifier: Apache-2.0
// A linear layer's plan as its passes read it, and what is counted of it.
#pragma once

#include <array>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "api/checks.h"
#include "api/quantize.h"
#include "step/saved.h"

namespace fsdp_quant::step {

enum Slot { kInput, kWeight, kGradOutput, kSlots };
enum Direction { kRowwise, kColumnwise, kDirections };
// What the backward keeps of the input.
enum class Saves : int64_t { kCodes = 0, kInput = 1 };

constexpr int64_t kOfBlocks = -1;

// How one direction of a slot is quantized, and how its product reads it.
struct OperandSpec {
  int64_t packed;  // direction (api/quantize.h); 0: the values themselves
  EncodingSpec spec;
  int64_t run;     // of its anchors, 0 the whole contraction; kOfTensor, kOfBlocks: none, but scales of blocks
  int64_t kind;    // of the operand (`gemm`); 0: 16-bit values, to which codes are decoded
  bool same;       // columnwise: the rowwise codes
  int64_t factor;  // index of its history among the slot's; -1: no delayed scaling

  bool is_quantized() const { return packed != 0; }
  bool is_anchored() const { return run != kOfBlocks; }
  // A kernel makes values into codes against anchors of lines or runs; else compact codes are, after they were made.
  bool anchors_values() const { return run >= 0 && spec.bits() == 8 && spec.outer == 1 && !spec.stochastic; }
  bool decodes() const { return is_quantized() && kind == 0; }
  bool has_tensor_amax() const { return spec.two_level() && !spec.operand(); }  // beside data and scale
};

constexpr int kSpecFields = 5;
constexpr int64_t kScaledValues = 1 << 3;  // kind of 16-bit values with one scale a tensor
enum { kFprop, kDgrad, kWgrad, kGemms };
constexpr int kCounts = kSlots * kDirections + kGemms;  // quantizations, products

struct LinearPlan {
  OperandSpec operand_specs[kSlots][kDirections];
  Saves saves;
  int64_t watched[kGemms];  // which operands `product_error` counts
  std::string key;  // of the plan, for Python
};

const LinearPlan& plan_of(int64_t handle);

void count(int64_t handle, int what, int64_t times = 1);

// Everything of a call that autograd does not see.
struct LinearCall : torch::CustomClassHolder {
  int64_t handle;
  const LinearPlan* plan;
  bool saves;
  at::Tensor step, ids;
  std::vector<at::Tensor> group_ids;  // of groups of tokens, whose random keys are their own
  MaybeTensor guard;
  std::vector<at::Tensor> factors, grad_factors, histories, grad_histories;
  std::vector<at::Tensor> columnwise;  // operand of the weight
  MaybeTensor grad_amaxes;             // memory in which the node before leaves those of dy
  Saved kept;                          // of the input
};

c10::intrusive_ptr<LinearCall> call_of(
    int64_t plan, bool save, const at::Tensor& step, const at::Tensor& ids, const MaybeTensor& guard,
    at::TensorList factors, at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories);

bool wants(const LinearPlan& plan, Slot slot, Direction d, bool row, bool col);

}  // namespace fsdp_quant::step
