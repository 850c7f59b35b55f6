// SPDX-License-Identifier: Apache-2.0
// Host side of multi-tensor Adam.
#include <algorithm>
#include <limits>

#include <torch/library.h>

#include "api/launch.h"
#include "api/optim.h"

namespace fsdp_quant {

namespace {

const float* optional_scalar(const MaybeTensor& t, const char* name, const at::Tensor& like) {
  if (!t.has_value()) return nullptr;
  check_buffer(*t, name, like, at::kFloat, 1);
  return t->const_data_ptr<float>();
}

}  // namespace

AdamTensors::AdamTensors(
    at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::IntArrayRef row,
    const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf)
    : master(master), grad(grad), first(first), second(second), row(row), rows(scalars.numel() / kAdamScalars) {
  const size_t n = master.size();
  TORCH_CHECK_VALUE(n > 0 && grad.size() == n && first.size() == n && second.size() == n && row.size() == n, "got ", n,
                    " masters, ", grad.size(), " gradients, ", first.size(), " and ", second.size(), " moments and ",
                    row.size(), " rows; wanted one of each for every master");
  master_dtype = master[0].scalar_type(), grad_dtype = grad[0].scalar_type(), moments_dtype = first[0].scalar_type();
  TORCH_CHECK_VALUE(grad_dtype == at::kFloat || grad_dtype == at::kBFloat16, "gradients are float32 or bfloat16, got ",
                    grad_dtype);
  TORCH_CHECK_VALUE(moments_dtype == at::kFloat || moments_dtype == at::kBFloat16 || moments_dtype == at::kByte,
                    "moments are float32, bfloat16 or codes, got ", moments_dtype);
  check_cuda(master[0], "master");
  check_buffer(scalars, "scalars", master[0], at::kFloat, rows * kAdamScalars);
  step = {scalars.const_data_ptr<float>(), optional_scalar(grad_scale, "grad_scale", master[0]),
          optional_scalar(found_inf, "found_inf", master[0])};
}

AdamTensor AdamTensors::at(size_t i) const {
  const int64_t numel = grad[i].numel();
  const bool is_remainder = master_dtype == at::kByte;
  check_buffer(master[i], "master", master[0], is_remainder ? at::kByte : at::kFloat, numel * (is_remainder ? 2 : 1));
  TORCH_CHECK_VALUE(!is_remainder || is_aligned(master[i].const_data_ptr(), 2), "remainder ", i, " begins at an odd byte");
  check_buffer(grad[i], "grad", master[0], grad_dtype, numel);
  check_buffer(first[i], "first", master[0], moments_dtype, numel);
  check_buffer(second[i], "second", master[0], moments_dtype, numel);
  TORCH_CHECK_VALUE(row[i] >= 0 && row[i] < rows, "tensor ", i, " reads row ", row[i], " of ", rows, " rows of scalars");
  AdamTensor t = {};
  t.master = master[i].mutable_data_ptr();
  t.grad = grad[i].const_data_ptr();
  t.first = first[i].mutable_data_ptr(), t.second = second[i].mutable_data_ptr();
  t.numel = numel, t.row = static_cast<int32_t>(row[i]);
  const int64_t moment = 4 * static_cast<int64_t>(first[i].element_size());
  t.vectors = is_aligned(t.master, is_remainder ? 8 : 16) && is_aligned(t.grad, grad_dtype == at::kFloat ? 16 : 8) &&
              is_aligned(t.first, moment) && is_aligned(t.second, moment);
  return t;
}

namespace {

// Step in place; see optim/adam.cu. rounded: empty, bf16 parameters equal to the rounded masters, or those that remainder
// masters extend. first_scale, second_scale: of 8-bit moments, else empty.
void adam(
    at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::TensorList rounded,
    at::TensorList first_scale, at::TensorList second_scale, at::IntArrayRef row, const at::Tensor& scalars,
    const MaybeTensor& grad_scale, const MaybeTensor& found_inf) {
  const AdamTensors tensors(master, grad, first, second, row, scalars, grad_scale, found_inf);
  TORCH_CHECK_VALUE(rounded.empty() || rounded.size() == master.size(), "got ", rounded.size(),
                    " rounded parameters; wanted one for each of ", master.size(), " masters, or none");
  const bool is_remainder = tensors.master_dtype == at::kByte, codes = tensors.moments_dtype == at::kByte;
  TORCH_CHECK_VALUE(!is_remainder || !rounded.empty(), "masters are remainders, and no parameter is given that has the rest");
  const size_t scales = codes ? master.size() : 0;
  TORCH_CHECK_VALUE(first_scale.size() == scales && second_scale.size() == scales, "got ", first_scale.size(), " and ",
                    second_scale.size(), " scales of moments of ", tensors.moments_dtype, "; wanted ", scales, " of each");
  const AdamMaster master_dtype = is_remainder ? kRemainder : rounded.empty() ? kAlone : kRounded;
  const bool bf16_grad = tensors.grad_dtype == at::kBFloat16;
  const c10::cuda::CUDAGuard guard(master[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  MultiTensorLaunch<AdamLaunch> launch("adam", [&](const AdamLaunch& table) {
    return codes ? launch_adam_codes(table, bf16_grad, master_dtype, stream)
                 : launch_adam(table, bf16_grad, tensors.moments_dtype == at::kBFloat16, master_dtype, stream);
  });
  launch.table().step = tensors.step;
  for (size_t i = 0; i < master.size(); ++i) {
    AdamTensor t = tensors.at(i);
    if (!rounded.empty()) {
      check_buffer(rounded[i], "rounded", master[0], at::kBFloat16, t.numel);
      t.rounded = rounded[i].mutable_data_ptr();
      t.vectors = t.vectors && is_aligned(t.rounded, 8);
    }
    int64_t tiles = ceil_div(t.numel, kAdamTile);
    if (codes && t.numel > 0) {
      const int64_t rows = first[i].size(0), cols = t.numel / rows, blocks = rows * ceil_div(cols, kMomentBlock);
      TORCH_CHECK_VALUE(cols <= std::numeric_limits<int32_t>::max() - kMomentBlock, "tensor ", i, " has rows of ", cols,
                        " elements; too many");
      check_buffer(first_scale[i], "first_scale", master[0], at::kFloat, blocks);
      check_buffer(second_scale[i], "second_scale", master[0], at::kFloat, blocks);
      t.first_scale = first_scale[i].mutable_data_ptr<float>(), t.second_scale = second_scale[i].mutable_data_ptr<float>();
      t.cols = static_cast<int32_t>(cols), t.vectors = t.vectors && cols % 4 == 0;
      tiles = ceil_div(blocks, kMomentBlocksOfTile);
    }
    TORCH_CHECK_VALUE(tiles < std::numeric_limits<int32_t>::max() / 2, "tensor ", i, " has ", t.numel,
                      " elements; too many");
    if (t.numel > 0) launch.add(t, tiles);
  }
  launch.flush();
}

// Advance step counters on the device and return their scalars [steps, 8] fp32.
at::Tensor adam_count(
    at::TensorList step, const MaybeTensor& found_inf, const MaybeTensor& lr, double learning_rate, double beta1,
    double beta2, double eps, double decay, bool decoupled) {
  TORCH_CHECK_VALUE(!step.empty(), "there is no step to count");
  check_cuda(step[0], "step");
  const c10::cuda::CUDAGuard guard(step[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const int64_t n = step.size();
  const at::Tensor scalars = new_empty(step[0], {n, kAdamScalars}, at::kFloat);
  AdamCount count;
  count.found_inf = optional_scalar(found_inf, "found_inf", step[0]), count.lr = optional_scalar(lr, "lr", step[0]);
  count.learning_rate = learning_rate, count.beta1 = beta1, count.beta2 = beta2, count.eps = eps, count.decay = decay;
  count.decoupled = decoupled;
  for (int64_t begin = 0; begin < n; begin += kAdamSteps) {
    count.count = static_cast<int32_t>(std::min<int64_t>(n - begin, kAdamSteps));
    count.scalars = scalars.mutable_data_ptr<float>() + begin * kAdamScalars;
    for (int32_t i = 0; i < count.count; ++i) {
      check_buffer(step[begin + i], "step", step[0], at::kFloat, 1);
      count.steps[i] = step[begin + i].mutable_data_ptr<float>();
    }
    check_launch(launch_adam_count(count, stream), "adam_count");
  }
  return scalars;
}

}  // namespace

void register_optim(torch::Library& m) {
  m.def(
      "adam(Tensor(a!)[] master, Tensor[] grad, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] rounded, "
      "Tensor(e!)[] first_scale, Tensor(f!)[] second_scale, int[] row, Tensor scalars, Tensor? grad_scale, "
      "Tensor? found_inf) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, adam), compliant());
  m.def(
      "adam_count(Tensor(a!)[] step, Tensor? found_inf, Tensor? lr, float learning_rate, float beta1, float beta2, "
      "float eps, float decay, bool decoupled) -> Tensor",
      torch::dispatch(c10::DispatchKey::CUDA, adam_count), compliant());
}

}  // namespace fsdp_quant
