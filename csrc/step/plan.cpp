// SPDX-License-Identifier: Apache-2.0
#include "step/plan.h"

#include <deque>
#include <mutex>
#include <optional>

#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace fsdp_quant::step {

namespace {

// Plans and their counters; never shrinks.
struct Registry {
  std::mutex mutex;
  std::deque<LinearPlan> plans;
  std::deque<std::array<int64_t, kCounts>> counts;
};

Registry& registry() {
  static auto* const registry = new Registry;  // backward threads may outlive static destructors
  return *registry;
}

}  // namespace

const LinearPlan& plan_of(int64_t handle) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  TORCH_CHECK_VALUE(handle >= 0 && handle < static_cast<int64_t>(r.plans.size()), "there is no linear plan ", handle);
  return r.plans[handle];
}

bool is_plan(int64_t handle, const std::string& key) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  return handle >= 0 && handle < static_cast<int64_t>(r.plans.size()) && r.plans[handle].key == key;
}

void count(int64_t handle, int what, int64_t times) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.counts[handle][what] += times;
}

c10::intrusive_ptr<LinearCall> call_of(
    int64_t plan, bool save, const at::Tensor& step, const at::Tensor& ids, const MaybeTensor& guard,
    at::TensorList factors, at::TensorList grad_factors, at::TensorList histories, at::TensorList grad_histories) {
  auto call = c10::make_intrusive<LinearCall>();
  call->handle = plan, call->plan = &plan_of(plan), call->saves = save;
  call->step = step, call->ids = ids, call->guard = guard;
  call->factors = factors.vec(), call->grad_factors = grad_factors.vec();
  call->histories = histories.vec(), call->grad_histories = grad_histories.vec();
  return call;
}

bool share_codes(const OperandSpec (&r)[kDirections]) {
  const OperandSpec &row = r[kRowwise], &col = r[kColumnwise];
  const bool equal = compact_encoding(row.packed) == compact_encoding(col.packed) && row.spec.eps == col.spec.eps;
  return row.is_quantized() && equal && row.factor == col.factor && row.spec.outer == row.spec.contraction;
}

bool wants(const LinearPlan& plan, Slot slot, Direction d, bool row, bool col) {
  const OperandSpec(&r)[kDirections] = plan.operand_specs[slot];
  if (d == kColumnwise) return col && r[d].is_quantized() && !r[d].same;
  return r[d].is_quantized() && (row || (col && r[kColumnwise].same));
}

namespace {

// Register a plan and return its handle. fields: encoding, run, kind, same, factor of the input, weight and gradient, rowwise
// and columnwise each; then what the backward saves, and which operands of each GEMM are watched.
int64_t linear_plan(at::IntArrayRef fields, at::ArrayRef<double> eps, c10::string_view key) {
  constexpr size_t kSpecs = kSlots * kDirections;
  constexpr size_t kFields = kSpecs * kSpecFields + 1 + kGemms;
  TORCH_CHECK_VALUE(fields.size() == kFields && eps.size() == kSpecs, "a linear plan has ",
                    kFields, " fields and ", kSpecs, " eps; got ", fields.size(), " and ",
                    eps.size());
  LinearPlan plan;
  for (size_t i = 0; i < kSpecs; ++i) {
    const int64_t* f = fields.data() + i * kSpecFields;
    plan.operand_specs[i / kDirections][i % kDirections] = {
        f[0], unpack_encoding(f[0], eps[i], "side"), f[1], f[2], f[3] != 0, f[4]};
  }
  plan.saves = static_cast<Saves>(fields[kSpecs * kSpecFields]), plan.key = std::string(key);
  std::copy(fields.end() - kGemms, fields.end(), plan.counted);
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.plans.push_back(std::move(plan)), r.counts.push_back({});
  return static_cast<int64_t>(r.plans.size()) - 1;
}

// Counters since the last call, int64 [plans, 15]: quantizations of the input, weight and gradient (rowwise, columnwise),
// GEMMs (fprop, dgrad, wgrad), bytes of codes that ranks gathered of the input and of the gradient (rowwise, columnwise),
// all-reduces of amaxes of activations and of weights.
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

void register_plan(torch::Library& m) {
  m.def("linear_plan(int[] fields, float[] eps, str key) -> int", linear_plan);
  m.def("linear_counts() -> Tensor", linear_counts);
}

}  // namespace fsdp_quant::step
