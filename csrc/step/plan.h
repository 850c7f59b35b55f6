// SPDX-License-Identifier: Apache-2.0
// A linear layer's plan as its passes read it, and its counters.
#pragma once

#include <array>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/custom_class.h>

#include "api/checks.h"
#include "api/quantize.h"
#include "step/saved.h"

namespace fsdp_quant::step {

enum Slot { kInput, kWeight, kGradOutput, kSlots };
enum Direction { kRowwise, kColumnwise, kDirections };
// What the backward saves of the input.
enum class Saves : int64_t { kCodes = 0, kInput = 1 };

constexpr int64_t kOfBlocks = -1;

// Encoding of one direction of a slot, and how its GEMM reads it.
struct OperandSpec {
  int64_t packed;  // encoding; 0: not quantized
  EncodingSpec spec;
  int64_t run;     // of its anchors, 0: whole contraction; kOfTensor; kOfTile; kOfBlocks: no anchors
  int64_t kind;    // of the operand (`gemm`); 0: 16-bit values, for which codes are decoded
  bool same;       // columnwise: uses the rowwise codes
  int64_t factor;  // index of its history in the slot; -1: no delayed scaling

  bool is_quantized() const { return packed != 0; }
  bool is_anchored() const { return run != kOfBlocks; }
  // A kernel quantizes values with line or run anchors directly, and token groups with tile anchors; otherwise compact codes
  // are anchored afterwards.
  bool anchors_values(bool in_groups) const {
    return (run >= 0 || (in_groups && run == kOfTile)) && spec.bits() == 8 && spec.outer == 1 && !spec.stochastic;
  }
  bool decodes() const { return is_quantized() && kind == 0; }
  // Stored besides data and scale.
  bool has_tensor_amax() const { return spec.two_level() && !spec.operand() && run != kOfTensor; }
};

constexpr int kSpecFields = 5;
constexpr int64_t kScaledValues = 1 << 3;  // kind of 16-bit values with a tensor scale
enum { kFprop, kDgrad, kWgrad, kGemms };
// Counters: quantizations, GEMMs, bytes of codes that ranks gathered of the input and of the gradient, all-reduces of amaxes of
// activations and of weights.
constexpr int gathered_bytes_of(Slot slot, Direction d) {
  return kSlots * kDirections + kGemms + (slot == kInput ? 0 : kDirections) + d;
}
constexpr int amaxes_of(Slot slot) { return gathered_bytes_of(kGradOutput, kColumnwise) + (slot == kWeight ? 2 : 1); }
constexpr int kCounts = amaxes_of(kWeight) + 1;

struct LinearPlan {
  OperandSpec operand_specs[kSlots][kDirections];
  Saves saves;
  int64_t counted[kGemms];  // operands that `product_error` counts
  std::string key;  // Python's key of the plan
};

const LinearPlan& plan_of(int64_t handle);

// This process has a plan of this number, with this key.
bool is_plan(int64_t handle, const std::string& key);

void count(int64_t handle, int what, int64_t times = 1);

// How ranks share a layer (linear/cut.py, `TensorParallel`). Without a group, none do.
struct Ranks {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  bool column = false;        // each holds rows of the weight; else columns
  int64_t cut = -1;           // the dim of x (column) or y (else) that is cut; -1: none
  bool sums = false;          // without a cut: dx (column) or y (else) is summed here
  bool spans_weight = false;  // scales of a whole tensor are those of the whole weight
  int64_t pieces = 0;         // in which y is scattered
  int64_t reader = 0;         // of a cut x that other layers read too (`exchange`); 0: this layer alone gathers it, scatters dx
  int64_t outer = 1;          // of rows [outer, chunk] of a rank, and [outer, ranks, chunk] of all; 1 without a cut

  bool is_cut() const { return cut >= 0; }
  bool gathers(Slot slot) const { return is_cut() && reader == 0 && slot == (column ? kInput : kGradOutput); }
  // A scale follows from values of all ranks.
  bool spans(Slot slot, Direction d, const EncodingSpec& spec) const {
    if (!group || !spec.present()) return false;
    if (slot == kWeight) return spans_weight && spec.whole_tensor();
    if (gathers(slot) && d == kColumnwise) return spec.whole();  // over rows
    return spec.whole_tensor() && (gathers(slot) || slot == (column ? kGradOutput : kInput));
  }
  int64_t count() const { return group->getSize(); }
};

// What autograd is given for a weight whose gradient is added elsewhere: nothing, a tensor that nothing wrote, or zeros.
enum class Placeholder : int64_t { kNone, kEmpty, kZeros };

// Amaxes of a tensor by which each direction is scaled, as far as they are known.
using ScalingAmaxes = std::array<MaybeTensor, kDirections>;

// State of one call of a layer, hidden from autograd.
struct LinearCall : torch::CustomClassHolder {
  int64_t handle;
  const LinearPlan* plan;
  bool saves;
  at::Tensor step, ids;
  std::vector<at::Tensor> group_ids;  // of token groups, which have their own random keys
  MaybeTensor guard;
  std::vector<at::Tensor> factors, grad_factors, histories, grad_histories;
  std::vector<at::Tensor> columnwise;  // weight operand
  MaybeTensor grad_amaxes;             // written by the previous autograd node: amaxes of dy
  Saved saved_input;                   // of the input
  Ranks ranks;
  ScalingAmaxes input_amaxes = {};     // that ranks share
  bool dgrad = false;                  // the forward left what dgrad reads
  MaybeTensor main_grad;               // fp32, to which the backward adds dw
  Placeholder placeholder = Placeholder::kNone;
};

c10::intrusive_ptr<LinearCall> call_of(
    int64_t plan, bool save, const at::Tensor& step, const at::Tensor& ids, const MaybeTensor& guard,
    at::TensorList factors, at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories);

// The rowwise codes are those of both directions, a transpose apart.
bool share_codes(const OperandSpec (&r)[kDirections]);

bool wants(const LinearPlan& plan, Slot slot, Direction d, bool row, bool col);

}  // namespace fsdp_quant::step
