// SPDX-License-Identifier: Apache-2.0
// Host side of norms and activations: check, allocate, launch. Never reads device memory.
#include "api/norm.h"

#include <array>
#include <limits>
#include <tuple>

#include <torch/library.h>

#include "norm/norm.h"

namespace fsdp_quant {

namespace {

Values values_of(const at::Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case at::kBFloat16:
      return Values::kBF16;
    case at::kHalf:
      return Values::kF16;
    case at::kFloat:
      return Values::kF32;
    default:
      TORCH_CHECK_VALUE(false, name, " is ", x.scalar_type(), "; wanted bfloat16, float16 or float32");
  }
}

// View t [.., cols] as [rows, cols], with `like`'s shape, dtype and device and 16-byte aligned rows. Results are never views,
// since users may write them in place.
at::Tensor rows_of(const at::Tensor& t, const char* name, const at::Tensor& like) {
  check_cuda(t, name);
  TORCH_CHECK_VALUE(t.dim() > 0 && t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() &&
                        t.device() == like.device(), name, " is ", t.scalar_type(), " ", t.sizes(), " on ", t.device(),
                    "; wanted ", like.scalar_type(), " ", like.sizes(), " on ", like.device());
  TORCH_CHECK_VALUE(t.numel() > 0 && t.size(-1) % 8 == 0, name, " has shape ", t.sizes(),
                    "; wanted at least one row, and columns in eights");
  const at::Tensor rows = t.dim() == 2 ? t : t.view({-1, t.size(-1)});
  TORCH_CHECK_VALUE(rows.stride(1) == 1 && is_aligned(t.const_data_ptr(), 16) &&
                        (rows.size(0) == 1 || rows.stride(0) * t.element_size() % 16 == 0), name, " has strides ",
                    t.strides(), "; wanted contiguous rows that begin at multiples of 16 bytes");
  return rows;
}

void check_line(const at::Tensor& t, const char* name, const at::Tensor& x) {
  check_buffer(t, name, x, x.scalar_type(), x.size(-1));
  TORCH_CHECK_VALUE(is_aligned(t.const_data_ptr(), 16), name, " does not begin at a multiple of 16 bytes");
}

at::Tensor new_amax(const at::Tensor& like, cudaStream_t stream) {
  at::Tensor amax = new_empty(like, {1}, at::kFloat);
  C10_CUDA_CHECK(cudaMemsetAsync(amax.mutable_data_ptr(), 0, sizeof(float), stream));
  return amax;
}

ActivationArgs activation_args(const at::Tensor& g, const MaybeTensor& u, const at::Tensor* dh) {
  const at::Tensor rows = rows_of(g, "g", g);
  constexpr int64_t kMost = 65535 * 128, kLargest = std::numeric_limits<int32_t>::max() - 1024;
  ActivationArgs a = {};
  a.rows = rows.size(0), a.cols = a.out_stride = rows.size(1);
  TORCH_CHECK_VALUE(a.rows <= kMost && a.cols <= kLargest, "g has shape ", g.sizes(), "; wanted at most [", kMost, ", ",
                    kLargest, "]");
  a.g = g.const_data_ptr(), a.g_stride = rows.stride(0);
  if (u.has_value()) a.u_stride = rows_of(*u, "u", g).stride(0), a.u = u->const_data_ptr();
  if (dh != nullptr) a.dh_stride = rows_of(*dh, "dh", g).stride(0), a.dh = dh->const_data_ptr();
  return a;
}

// Allocate the amaxes of results, [count, AmaxLayout]. given: the caller's buffer.
at::Tensor new_lines(const at::Tensor& g, const ActivationArgs& args, int64_t count, const MaybeTensor& given = std::nullopt) {
  const AmaxLayout layout = {args.rows, args.out_stride};
  if (given.has_value()) check_buffer(*given, "grad_amaxes", g, at::kFloat, count * layout.size());
  at::Tensor amaxes = given.has_value() ? *given : new_empty(g, {count, layout.size()}, at::kFloat);
  C10_CUDA_CHECK(cudaMemsetAsync(amaxes.mutable_data_ptr(), 0, amaxes.nbytes(), c10::cuda::getCurrentCUDAStream()));
  return amaxes;
}

void launch(const ActivationArgs& args, const at::Tensor& g, int64_t kind, bool backward) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= static_cast<int64_t>(Activation::kReluSquared), "there is no activation ", kind);
  check_launch(launch_activation(args, values_of(g, "g"), static_cast<Activation>(kind), backward,
                                 c10::cuda::getCurrentCUDAStream()), backward ? "activation_backward" : "activation", g.sizes());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> activation(const at::Tensor& g, const MaybeTensor& u, int64_t kind) {
  ActivationArgs args = activation_args(g, u, nullptr);
  const c10::cuda::CUDAGuard guard(g.device());
  const at::Tensor h = new_empty(g, g.sizes(), g.scalar_type());
  const at::Tensor amaxes = new_lines(g, args, 1);
  args.out = h.mutable_data_ptr(), args.amaxes = amaxes.mutable_data_ptr<float>();
  launch(args, g, kind, false);
  return {h, amaxes};
}

std::pair<at::Tensor, MaybeTensor> operands_of(const at::Tensor& g, const MaybeTensor& u, bool packed) {
  if (!packed) return {g, u};
  TORCH_CHECK_VALUE(!u.has_value() && g.dim() > 0 && g.size(-1) % 2 == 0, "g is packed and has shape ", g.sizes(),
                    "; wanted gate and up as its halves, and no u");
  const int64_t cols = g.size(-1) / 2;
  return {g.narrow(-1, 0, cols), g.narrow(-1, cols, cols)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_into(
    const at::Tensor& of_g, const at::Tensor& of_u, const MaybeTensor& of_amaxes, const at::Tensor& dh, const at::Tensor& g,
    const MaybeTensor& u, int64_t kind, bool halves) {
  ActivationArgs args = activation_args(g, u, &dh);
  if (halves) args.out_stride = 2 * args.cols;
  const c10::cuda::CUDAGuard guard(g.device());
  const auto given_or_new = [&](const at::Tensor& given, at::IntArrayRef sizes) {
    return given.defined() ? given : new_empty(g, sizes, g.scalar_type());
  };
  const at::Tensor dg = given_or_new(of_g, g.sizes()),
                   du = given_or_new(of_u, u.has_value() ? g.sizes() : at::IntArrayRef{0});
  const at::Tensor amaxes = new_lines(g, args, u.has_value() && !halves ? 2 : 1, of_amaxes);
  args.out = dg.mutable_data_ptr(), args.du = du.mutable_data_ptr(), args.amaxes = amaxes.mutable_data_ptr<float>();
  launch(args, g, kind, true);
  return {dg, du, amaxes};
}

namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_backward(
    const at::Tensor& dh, const at::Tensor& g, const MaybeTensor& u, int64_t kind) {
  return backward_into({}, {}, std::nullopt, dh, g, u, kind);
}

NormArgs norm_args(const at::Tensor& x, const at::Tensor& weight, bool centred, bool zero_centered, bool rounds_first) {
  const at::Tensor rows = rows_of(x, "x", x);
  TORCH_CHECK_VALUE(x.is_contiguous() && rows.size(1) <= kLargestWidth && rows.size(0) <= std::numeric_limits<int32_t>::max(),
                    "x has shape ", x.sizes(), " and strides ", x.strides(), "; wanted it contiguous, with at most ",
                    kLargestWidth, " columns");
  check_line(weight, "weight", x);
  TORCH_CHECK_VALUE(!rounds_first || !(centred || zero_centered),
                    "rounds_first is of a root mean square norm whose gamma is its weight");
  NormArgs a = {};
  a.x = x.const_data_ptr(), a.weight = weight.const_data_ptr(), a.offset = zero_centered ? 1.0f : 0.0f;
  a.rounds_first = rounds_first;
  a.rows = static_cast<int32_t>(rows.size(0)), a.cols = static_cast<int32_t>(rows.size(1));
  return a;
}

// Returns y [.., cols], its amax [1], rstd [rows], mean [rows] (empty for RMSNorm).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm(
    const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, double eps, bool centred, bool zero_centered,
    bool rounds_first) {
  NormArgs args = norm_args(x, weight, centred, zero_centered, rounds_first);
  if (bias.has_value()) check_line(*bias, "bias", x), args.bias = bias->const_data_ptr();
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor y = new_empty(x, x.sizes(), x.scalar_type()), amax = new_amax(x, stream);
  const at::Tensor rstd = new_empty(x, {args.rows}, at::kFloat), mean = new_empty(x, {centred ? args.rows : 0}, at::kFloat);
  args.eps = static_cast<float>(eps);
  args.y = y.mutable_data_ptr(), args.amax = amax.mutable_data_ptr<float>(), args.rstd = rstd.mutable_data_ptr<float>();
  args.mean = centred ? mean.mutable_data_ptr<float>() : nullptr;
  check_launch(launch_norm(args, values_of(x, "x"), stream), "norm", x.sizes());
  return {y, amax, rstd, mean};
}

// Returns dx [.., cols] (plus `residual`, added after rounding), its amax [1], dweight [cols], dbias [cols] (empty unless
// has_bias).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& residual, const at::Tensor& rstd,
    const at::Tensor& mean, bool zero_centered, bool rounds_first, bool has_bias) {
  const bool centred = mean.numel() != 0;
  NormArgs args = norm_args(x, weight, centred, zero_centered, rounds_first);
  const auto check_like = [&](const at::Tensor& t, const char* name) {
    rows_of(t, name, x);
    TORCH_CHECK_VALUE(t.is_contiguous(), name, " has strides ", t.strides(), "; wanted it contiguous");
  };
  check_like(dy, "dy");
  if (residual.has_value()) check_like(*residual, "residual"), args.residual = residual->const_data_ptr();
  check_buffer(rstd, "rstd", x, at::kFloat, args.rows);
  if (centred) check_buffer(mean, "mean", x, at::kFloat, args.rows);
  TORCH_CHECK_VALUE(centred || !has_bias, "a root mean square norm has no bias");
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor dx = new_empty(x, x.sizes(), x.scalar_type()), amax = new_amax(x, stream);
  const at::Tensor dweight = new_empty(x, {args.cols}, x.scalar_type());
  const at::Tensor dbias = new_empty(x, {has_bias ? args.cols : 0}, x.scalar_type());
  const at::Tensor partial = new_empty(x, {1 + has_bias, kNormBlocks, args.cols}, at::kFloat);
  args.dy = dy.const_data_ptr(), args.dx = dx.mutable_data_ptr(), args.amax = amax.mutable_data_ptr<float>();
  args.rstd = const_cast<float*>(rstd.const_data_ptr<float>());
  args.mean = centred ? const_cast<float*>(mean.const_data_ptr<float>()) : nullptr;
  args.dweight = dweight.mutable_data_ptr(), args.dbias = has_bias ? dbias.mutable_data_ptr() : nullptr;
  args.partial = partial.mutable_data_ptr<float>();
  check_launch(launch_norm_backward(args, values_of(x, "x"), stream), "norm_backward", x.sizes());
  return {dx, amax, dweight, dbias};
}

}  // namespace

void register_norm(torch::Library& m) {
  m.def("activation(Tensor g, Tensor? u, int kind) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, activation), compliant());
  m.def("activation_backward(Tensor dh, Tensor g, Tensor? u, int kind) -> (Tensor, Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, activation_backward), compliant());
  m.def("norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred, bool zero_centered, "
        "bool rounds_first) -> (Tensor, Tensor, Tensor, Tensor)", torch::dispatch(c10::DispatchKey::CUDA, norm), compliant());
  m.def("norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor? residual, Tensor rstd, Tensor mean, bool zero_centered, "
        "bool rounds_first, bool has_bias) -> (Tensor, Tensor, Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, norm_backward), compliant());
}

}  // namespace fsdp_quant
