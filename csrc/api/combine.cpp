// SPDX-License-Identifier: Apache-2.0
// Host side of combine and its backward: check, allocate, launch.
#include <limits>
#include <tuple>

#include <torch/library.h>

#include "api/checks.h"
#include "layout/combine.h"

namespace fsdp_quant {

namespace {

void check_values(const at::Tensor& t, const char* name, const at::Tensor& like, int64_t rows, int64_t cols) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) == rows && t.size(1) == cols && is_aligned(t.const_data_ptr(), 16), name,
                    " has shape ", t.sizes(), " at ", t.const_data_ptr(), "; wanted [", rows, ", ", cols, "] at a multiple of 16 bytes");
  check_buffer(t, name, like, at::kBFloat16, rows * cols);
}

// values: [rows, cols] of all tokens' copies, or [tokens, cols].
CombineArgs combine_args(const at::Tensor& values, const char* name, bool of_tokens, const at::Tensor& back, const MaybeTensor& weights) {
  check_cuda(values, name);
  TORCH_CHECK_VALUE(back.dim() == 2 && back.numel() > 0 && back.numel() <= std::numeric_limits<int32_t>::max(), "back has shape ",
                    back.sizes(), "; wanted [tokens, copies], at least one and below 2^31");
  TORCH_CHECK_VALUE(values.dim() == 2 && values.size(1) > 0 && values.size(1) % 8 == 0 && values.size(1) < 1 << 24, name,
                    " has shape ", values.sizes(), "; wanted [rows, columns], columns in eights and below 2^24");
  check_buffer(back, "back", values, at::kLong, back.numel());
  check_values(values, name, values, of_tokens ? back.size(0) : back.numel(), values.size(1));
  CombineArgs a = {};
  a.back = back.const_data_ptr<int64_t>();
  a.tokens = static_cast<int32_t>(back.size(0)), a.copies = static_cast<int32_t>(back.size(1));
  a.cols = static_cast<int32_t>(values.size(1));
  a.wide = !weights.has_value() || weights->scalar_type() == at::kFloat;
  if (!weights.has_value()) return a;
  check_buffer(*weights, "weights", values, a.wide ? at::kFloat : at::kBFloat16, back.numel());
  a.weights = weights->const_data_ptr();
  return a;
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& back, const MaybeTensor& weights) {
  CombineArgs args = combine_args(rows, "rows", false, back, weights);
  const c10::cuda::CUDAGuard guard(rows.device());
  const at::Tensor out = new_empty(rows, {args.tokens, args.cols}, at::kBFloat16);
  args.rows = rows.const_data_ptr(), args.out = out.mutable_data_ptr();
  check_launch(launch_combine(args, c10::cuda::getCurrentCUDAStream()), "combine", rows.sizes());
  return out;
}

// Returns drows [tokens * copies, cols], and dweights as `weights`, else fp32 (empty without rows).
std::tuple<at::Tensor, at::Tensor> combine_backward(
    const at::Tensor& dout, const MaybeTensor& rows, const at::Tensor& back, const MaybeTensor& weights) {
  CombineArgs args = combine_args(dout, "dout", true, back, weights);
  if (rows.has_value()) check_values(*rows, "rows", dout, back.numel(), args.cols), args.rows = rows->const_data_ptr();
  const c10::cuda::CUDAGuard guard(dout.device());
  const at::Tensor drows = new_empty(dout, {back.numel(), args.cols}, at::kBFloat16);
  const at::Tensor dweights =
      new_empty(dout, rows.has_value() ? back.sizes() : at::IntArrayRef{0}, args.wide ? at::kFloat : at::kBFloat16);
  args.dout = dout.const_data_ptr(), args.out = drows.mutable_data_ptr();
  args.dweights = rows.has_value() ? dweights.mutable_data_ptr() : nullptr;
  check_launch(launch_combine_backward(args, c10::cuda::getCurrentCUDAStream()), "combine_backward", drows.sizes());
  return {drows, dweights};
}

}  // namespace

void register_combine(torch::Library& m) {
  m.def("combine(Tensor rows, Tensor back, Tensor? weights) -> Tensor", torch::dispatch(c10::DispatchKey::CUDA, combine),
        compliant());
  m.def("combine_backward(Tensor dout, Tensor? rows, Tensor back, Tensor? weights) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, combine_backward), compliant());
}

}  // namespace fsdp_quant
