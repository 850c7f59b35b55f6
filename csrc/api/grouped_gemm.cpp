// SPDX-License-Identifier: Apache-2.0
// Host side of grouped GEMMs. Never reads device memory.
#include "api/grouped_gemm.h"

#include <algorithm>
#include <limits>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/operands.h"
#include "gemm/sm90_gemm.h"
#include "layout/token_groups.h"

namespace fsdp_quant {

namespace {

using sm90::GroupedDim;
using sm90::Grouping;

Operand grouped_operand_of(const at::Tensor& x, int64_t kind, const char* name) {
  const Operand o = operand_of(x, kind, name);
  TORCH_CHECK_NOT_IMPLEMENTED(is_fp8(o.type) || o.type == CUDA_R_16BF, name, " is ", x.scalar_type(), " of kind ", kind,
                              " (element | scaling << 3); wanted codes in e4m3 or e5m2, or bfloat16");
  return o;
}

// b [groups, N, K]: the first matrix; sets the distance to the next, in elements.
Operand stacked_operand_of(const at::Tensor& x, int64_t kind, const char* name, int64_t* plane) {
  check_cuda(x, name);
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(0) > 0, name, " has shape ", x.sizes(), "; wanted [1 or more, N, K]");
  const Operand o = grouped_operand_of(x.select(0, 0), kind, name);
  *plane = x.size(0) > 1 ? x.stride(0) : o.ld * x.size(1);
  TORCH_CHECK_VALUE(*plane * x.element_size() % 16 == 0 && *plane >= x.size(2), name, " has shape ", x.sizes(), " and strides ", x.strides(),
                    "; wanted matrices that are multiples of 16 bytes apart");
  return o;
}

void check_sizes(const GemmProblem& p, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.device() == b.device(), "a is on ", a.device(), " and b on ", b.device());
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(std::max({p.m, p.n, p.k}) <= kLargest, "M, N, K are ", p.m, ", ", p.n, ", ", p.k,
                    "; each must be below 2^31");
  TORCH_CHECK_VALUE(p.n % 8 == 0, "b has ", p.n, " rows (N); these products take multiples of 8");
}

void set_out(GemmProblem& p, const at::Tensor& out, const at::Tensor& a, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(out.device() == a.device() && out.sizes() == sizes, "out is ", out.sizes(), " on ", out.device(),
                    "; wanted ", sizes, " on ", a.device());
  p.out_type = type_of(out.scalar_type(), "out");
  const int64_t dims = out.dim(), rows = out.size(dims - 2), cols = out.size(dims - 1);
  p.out_ld = rows > 1 ? out.stride(dims - 2) : cols;
  TORCH_CHECK_VALUE((out.stride(dims - 1) == 1 || cols <= 1) && p.out_ld >= cols, "out has strides ", out.strides(),
                    "; wanted rows of ", cols, " contiguous elements that do not overlap");
  const void* data = out.const_data_ptr();
  TORCH_CHECK_VALUE(out.numel() == 0 || (p.out_ld * out.element_size() % 16 == 0 && is_aligned(data, 16)),
                    "out has rows ", p.out_ld * out.element_size(), " bytes apart, from address ",
                    reinterpret_cast<uintptr_t>(data) % 16, " modulo 16; rows of a product of codes are aligned to 16 bytes");
  p.out = out.mutable_data_ptr();
}

void launch(GemmProblem& p, const Grouping& grouping, int64_t sm_count, const at::Tensor& a, const at::Tensor& b,
            const char* name) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const int capability = capability_of(stream.device_index());
  TORCH_CHECK_NOT_IMPLEMENTED(capability == 90, name, " needs sm_90; the device is sm_", capability);
  const auto kind = [](const Operand& o) { return static_cast<int>(o.scaling); };
  const char* const reason = sm90::unsupported_reason(p, grouping);
  TORCH_CHECK_NOT_IMPLEMENTED(reason == nullptr, name, " of a ", a.sizes(), " with scaling ", kind(p.a), " and b ", b.sizes(),
                              " with scaling ", kind(p.b), ": ", reason);
  TORCH_CHECK_VALUE(sm_count >= 0 && sm_count < 1 << 16, "sm_count is ", sm_count,
                    "; wanted 0 (all) or a number of multiprocessors");
  const int32_t processors = processors_of(stream.device_index(), sm_count);
  check_launch(sm90::launch(p, grouping, sm90::schedule_of(p, processors, grouping), stream), name, "a ", a.sizes(),
               " and b ", b.sizes());
}

int32_t* flag_of(const MaybeTensor& flag, const at::Tensor& like) {
  if (!flag.has_value()) return nullptr;
  check_buffer(*flag, "flag", like, at::kInt, 1);
  return flag->mutable_data_ptr<int32_t>();
}

const int32_t* offsets_of(const at::Tensor& offsets, int64_t groups, const at::Tensor& like) {
  check_buffer(offsets, "offsets", like, at::kInt, groups + 1);
  return offsets.const_data_ptr<int32_t>();
}

void set_groups(Grouping& grouping, int64_t groups, const int32_t* offsets, int32_t* flag) {
  TORCH_CHECK_VALUE(groups >= 1 && groups <= sm90::kMostGroups, "there are ", groups, " groups; wanted 1 to ",
                    sm90::kMostGroups);
  grouping.groups = static_cast<int32_t>(groups), grouping.offsets = offsets, grouping.flag = flag;
}

}  // namespace

at::Tensor token_groups(const at::Tensor& ends, int64_t tokens, const MaybeTensor& wrong, int64_t tag) {
  return token_groups(ends, tokens, (tokens + 127 * std::min(ends.numel(), tokens)) / 128, wrong, tag);
}

at::Tensor token_groups(const at::Tensor& ends, int64_t tokens, int64_t tiles, const MaybeTensor& wrong, int64_t tag) {
  check_cuda(ends, "ends");
  const at::ScalarType dtype = ends.scalar_type();
  const int64_t groups = ends.numel();
  TORCH_CHECK_VALUE(ends.dim() == 1 && ends.is_contiguous() && (dtype == at::kInt || dtype == at::kLong), "ends is ", dtype,
                    " ", ends.sizes(), "; wanted contiguous int32 or int64 [groups]");
  TORCH_CHECK_VALUE(groups >= 1 && groups <= kMostTokenGroups, "there are ", groups, " groups; wanted 1 to ", kMostTokenGroups);
  TORCH_CHECK_VALUE(tokens > 0 && tokens < std::numeric_limits<int32_t>::max() - 128 * (groups + 1), "there are ", tokens,
                    " tokens; wanted 1 or more, below 2^31 with those that fill groups up to multiples of 128");
  TORCH_CHECK_VALUE(tag >= 0 && tag <= std::numeric_limits<int32_t>::max(), "tag is ", tag, "; wanted 0 to 2^31 - 1");
  const c10::cuda::CUDAGuard guard(ends.device());
  const at::Tensor buffer = new_empty(ends, {4 * tiles + 2 * (groups + 1)}, at::kInt);
  TokenGroups g = {};
  g.ends = ends.const_data_ptr(), g.wide = dtype == at::kLong;
  g.groups = static_cast<int32_t>(groups), g.tokens = static_cast<int32_t>(tokens), g.tiles = static_cast<int32_t>(tiles);
  g.sources = buffer.mutable_data_ptr<int32_t>(), g.offsets = g.sources + 4 * tiles, g.padded = g.offsets + groups + 1;
  if (wrong.has_value()) {
    TORCH_CHECK_VALUE(wrong->scalar_type() == at::kLong && wrong->numel() == 1 && (wrong->is_cuda() || wrong->is_pinned()),
                      "wrong is ", wrong->scalar_type(), " ", wrong->sizes(), " on ", wrong->device(),
                      "; wanted int64 [1] on the device, or pinned");
    g.wrong = wrong->mutable_data_ptr<int64_t>(), g.tag = static_cast<int32_t>(tag);
  }
  check_launch(launch_token_groups(g, c10::cuda::getCurrentCUDAStream()), "token_groups");
  return buffer;
}

TokenTables tables_of(const at::Tensor& buffer, int64_t groups, const at::Tensor& like) {
  check_buffer(buffer, "groups", like, at::kInt, buffer.numel());
  const int64_t of_tiles = buffer.numel() - 2 * (groups + 1);
  TORCH_CHECK_VALUE(groups > 0 && of_tiles > 0 && of_tiles % 4 == 0, "groups has ", buffer.numel(), " elements; wanted 4 a tile and 2 * (",
                    groups, " + 1)");
  const int32_t* const sources = buffer.const_data_ptr<int32_t>();
  return {sources, sources + of_tiles, sources + of_tiles + groups + 1, of_tiles / 4, groups};
}

void m_grouped_gemm(
    const at::Tensor& out, const GemmOperand& left, const GemmOperand& right, const MaybeTensor& bias, const int32_t* offsets,
    int32_t* flag, int64_t sm_count) {
  const at::Tensor &a = left.data, &b = right.data;
  check_cuda(a, "a");
  const c10::cuda::CUDAGuard guard(a.device());
  GemmProblem p = {};
  Grouping grouping;
  grouping.dim = GroupedDim::kM;
  p.a = grouped_operand_of(a, left.kind, "a"), p.b = stacked_operand_of(b, right.kind, "b", &grouping.b_plane);
  p.m = a.size(0), p.n = b.size(1), p.k = a.size(1);
  TORCH_CHECK_VALUE(b.size(2) == p.k && p.k > 0, "a is ", a.sizes(), " and b ", b.sizes(),
                    "; wanted [rows, K] and [groups, N, K], of one K that is not 0");
  check_sizes(p, a, b);
  set_groups(grouping, b.size(0), offsets, flag);
  // Scales along K cover all rows, since groups may begin at any row.
  grouping.a_scale_each =
      set_scale(p.a, left.scale, a, p.m, p.k, "a_scale", p.a.scaling == Scaling::kTensor ? grouping.groups : 1);
  grouping.b_scale_each = set_scale(p.b, right.scale, b, p.n, p.k, "b_scale", grouping.groups);
  TORCH_CHECK_VALUE(!has_fp32_blocks(p.b.scaling) || grouping.groups == 1 || grouping.b_scale_each,
                    "b_scale has the scales of one group; wanted ", grouping.groups, " times as many");
  if (bias.has_value()) {
    p.bias_type = type_of(bias->scalar_type(), "bias"), p.bias = bias->const_data_ptr();
    check_buffer(*bias, "bias", a, bias->scalar_type(), grouping.groups * p.n);
  }
  set_out(p, out, a, {p.m, p.n});
  if (out.numel() == 0) return;
  launch(p, grouping, sm_count, a, b, "grouped_gemm");
}

void k_grouped_gemm(
    const at::Tensor& out, const GemmOperand& left, const GemmOperand& right, const int32_t* offsets, int64_t groups,
    bool accumulate, int32_t* flag, int64_t sm_count) {
  const at::Tensor &a = left.data, &b = right.data;
  check_cuda(a, "a");
  const c10::cuda::CUDAGuard guard(a.device());
  GemmProblem p = {};
  Grouping grouping;
  grouping.dim = GroupedDim::kK;
  p.a = grouped_operand_of(a, left.kind, "a"), p.b = grouped_operand_of(b, right.kind, "b");
  p.m = a.size(0), p.n = b.size(0), p.k = a.size(1), p.accumulate = accumulate;
  TORCH_CHECK_VALUE(b.size(1) == p.k, "a is ", a.sizes(), " and b ", b.sizes(), "; wanted the same K");
  check_sizes(p, a, b);
  set_groups(grouping, groups, offsets, flag);
  const auto sets = [&](const Operand& o) { return o.scaling <= Scaling::kRow ? grouping.groups : 1; };
  grouping.a_scale_each = set_scale(p.a, left.scale, a, p.m, p.k, "a_scale", sets(p.a));
  grouping.b_scale_each = set_scale(p.b, right.scale, b, p.n, p.k, "b_scale", sets(p.b));
  set_out(p, out, a, {grouping.groups, p.m, p.n});
  grouping.out_plane = grouping.groups > 1 ? out.stride(0) : p.out_ld * p.m;
  TORCH_CHECK_VALUE(grouping.groups == 1 || (grouping.out_plane * out.element_size() % 16 == 0 &&
                                          grouping.out_plane >= (p.m - 1) * p.out_ld + p.n),
                    "out has strides ", out.strides(), "; wanted groups that are multiples of 16 bytes apart and do not overlap");
  TORCH_CHECK_VALUE(!accumulate || p.out_type == CUDA_R_32F, "out is ", out.scalar_type(),
                    "; gradients accumulate in float32");
  if (out.numel() == 0) return;
  if (p.k == 0) {  // empty sums
    if (!accumulate) out.zero_();
    return;
  }
  launch(p, grouping, sm_count, a, b, "grouped_gemm_wgrad");
}

namespace {

void grouped_gemm(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
    const MaybeTensor& b_scale, const at::Tensor& offsets, int64_t a_kind, int64_t b_kind, const MaybeTensor& flag,
    int64_t sm_count, const MaybeTensor& bias) {
  TORCH_CHECK_VALUE(b.dim() == 3, "b has shape ", b.sizes(), "; wanted [groups, N, K]");
  m_grouped_gemm(out, {a, a_scale, a_kind}, {b, b_scale, b_kind}, bias, offsets_of(offsets, b.size(0), a), flag_of(flag, a),
                 sm_count);
}

void grouped_gemm_wgrad(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
    const MaybeTensor& b_scale, const at::Tensor& offsets, int64_t a_kind, int64_t b_kind, bool accumulate,
    const MaybeTensor& flag, int64_t sm_count) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() >= 2 && offsets.numel() <= sm90::kMostGroups + 1,
                    "offsets has shape ", offsets.sizes(), "; wanted [groups + 1], of 1 to ", sm90::kMostGroups, " groups");
  const int64_t groups = offsets.numel() - 1;
  k_grouped_gemm(out, {a, a_scale, a_kind}, {b, b_scale, b_kind}, offsets_of(offsets, groups, a), groups, accumulate,
                 flag_of(flag, a), sm_count);
}

}  // namespace

void register_grouped_gemm(torch::Library& m) {
  m.def("token_groups(Tensor ends, int tokens, Tensor(a!)? wrong=None, int tag=0) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& ends, int64_t tokens, const MaybeTensor& wrong, int64_t tag) {
          return token_groups(ends, tokens, wrong, tag);
        }));
  m.def(
      "grouped_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor offsets, int a_kind, "
      "int b_kind, Tensor(b!)? flag=None, int sm_count=0, Tensor? bias=None) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_gemm), compliant());
  m.def(
      "grouped_gemm_wgrad(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor offsets, "
      "int a_kind, int b_kind, bool accumulate=False, Tensor(b!)? flag=None, int sm_count=0) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, grouped_gemm_wgrad), compliant());
}

}  // namespace fsdp_quant
