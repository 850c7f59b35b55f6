// SPDX-License-Identifier: Apache-2.0
// Host side of dense GEMMs: check, allocate, launch. Never reads device memory.
#include "api/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/operands.h"
#include "gemm/cublaslt.h"
#include "gemm/epilogue.h"
#include "gemm/sm90_gemm.h"
#include "gemm/product_error.h"

namespace fsdp_quant {

namespace {

struct Arguments {
  const at::Tensor &a, &b;
  const MaybeTensor &a_scale, &b_scale;
  int64_t a_kind, b_kind;
  const MaybeTensor &bias, &alpha;
  int64_t sm_count;
};

CodeKind code_kind_of(int64_t kind) { return {static_cast<Element>(kind & 7), static_cast<Scaling>(kind >> 3)}; }

void check_pair(const GemmProblem& p, const Arguments& given, int device) {
  const Operand &a = p.a, &b = p.b;
  const CodeKind left = code_kind_of(given.a_kind), right = code_kind_of(given.b_kind);
  const bool values = is_half(a.type) && a.type == b.type && a.scaling == b.scaling && a.scaling == Scaling::kNone;
  TORCH_CHECK_NOT_IMPLEMENTED(
      values || supports_pair(left, right), "a is ", given.a.scalar_type(), " of kind ", given.a_kind, " and b ",
      given.b.scalar_type(), " of kind ", given.b_kind, " (element | scaling << 3); nothing multiplies this pair");
  if (values) return;
  const int capability = capability_of(device);
  const Scaling most = std::max(a.scaling, b.scaling);
  const char* const wanted = has_byte_scales(most) ? "sm_100 or sm_120" : most <= Scaling::kRow ? "sm_89, 90, 100 or 120" : "sm_90";
  TORCH_CHECK_NOT_IMPLEMENTED(supports_scales(left, right, capability), "scaling ", static_cast<int>(most), " needs ", wanted,
                              "; the device is sm_", capability);
}

bool gemm_takes(int64_t a_kind, int64_t b_kind, int64_t major, int64_t minor) {
  for (const auto& [kind, name] : {std::pair(a_kind, "a"), std::pair(b_kind, "b")}) operand_of_kind(kind, name);
  const CodeKind a = code_kind_of(a_kind), b = code_kind_of(b_kind);
  return supports_pair(a, b) && supports_scales(a, b, static_cast<int>(10 * major + minor));
}

// Bias that cuBLASLt adds: it needs out's dtype, and supports none in an fp8 GEMM with float32 output.
void set_bias(GemmProblem& p, const at::Tensor& bias, const at::Tensor& a, at::ScalarType out_dtype) {
  const bool codes = !is_half(p.a.type);
  TORCH_CHECK_NOT_IMPLEMENTED(!codes || out_dtype != at::kFloat, "bias is ", bias.scalar_type(), "; to a ", out_dtype,
                              " product of codes cuBLASLt adds none, add it afterwards");
  TORCH_CHECK_NOT_IMPLEMENTED(bias.scalar_type() == out_dtype, "bias is ", bias.scalar_type(), "; to a ", out_dtype,
                              " product cuBLASLt adds a bias in ", out_dtype, ", add another afterwards");
  check_buffer(bias, "bias", a, out_dtype, p.n);
  p.bias = bias.const_data_ptr();
  p.bias_type = p.out_type;
}

GemmProblem problem_of(const Arguments& given, at::ScalarType out_dtype, int device) {
  GemmProblem p = {};
  p.a = operand_of(given.a, given.a_kind, "a"), p.b = operand_of(given.b, given.b_kind, "b");
  TORCH_CHECK_VALUE(given.a.device() == given.b.device(), "a is on ", given.a.device(), " and b on ", given.b.device());
  const auto k_of = [](const at::Tensor& x, const Operand& o) {
    return o.type == CUDA_R_4F_E2M1 ? 2 * x.size(1) : x.size(1);
  };
  p.m = given.a.size(0), p.n = given.b.size(0), p.k = k_of(given.a, p.a);
  TORCH_CHECK_VALUE(k_of(given.b, p.b) == p.k, "a is [", p.m, ", ", p.k, "] and b [", p.n, ", ", k_of(given.b, p.b),
                    "]; wanted the same K");
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(std::max({p.m, p.n, p.k}) <= kLargest, "M, N, K are ", p.m, ", ", p.n, ", ", p.k,
                    "; each must be below 2^31");
  set_scale(p.a, given.a_scale, given.a, p.m, p.k, "a_scale");
  set_scale(p.b, given.b_scale, given.b, p.n, p.k, "b_scale");
  check_pair(p, given, device);
  TORCH_CHECK_VALUE(is_half(p.a.type) || p.n % 16 == 0, "b has ", p.n, " rows (N); codes take multiples of 16");
  const bool takes_any_m = !has_fp32_blocks(p.a.scaling) || p.a.scaling == Scaling::k1x512;
  TORCH_CHECK_VALUE(takes_any_m || p.m % 4 == 0, "a has ", p.m,
                    " rows (M); 1x128 and 128x128 scales take multiples of 4");
  p.out_type = type_of(out_dtype, "out");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_half(p.a.type) || p.out_type == p.a.type || p.out_type == CUDA_R_32F, "out is ",
                              out_dtype, "; of ", given.a.scalar_type(), " operands cuBLASLt makes that and float32");
  if (given.bias.has_value()) set_bias(p, *given.bias, given.a, out_dtype);
  if (given.alpha.has_value()) {
    check_buffer(*given.alpha, "alpha", given.a, at::kFloat, 1);
    p.alpha = given.alpha->const_data_ptr<float>();
  }
  TORCH_CHECK_VALUE(given.sm_count >= 0 && given.sm_count < 1 << 16, "sm_count is ", given.sm_count,
                    "; wanted 0 (all) or a number of multiprocessors");
  p.sm_count = static_cast<int32_t>(given.sm_count);
  return p;
}

void multiply_by_cublaslt(const GemmProblem& p, const c10::cuda::CUDAStream& stream) {
  try {
    MatmulPlan& plan = matmul_plan_of(p, stream.device_index());
    // Allocate from the pool of the stream, or of the graph being captured: concurrent work never shares this memory.
    const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(plan.workspace());
    plan.launch(p, workspace.get(), stream);
  } catch (const Unsupported& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
  }
}

bool has_row_scales(const GemmProblem& p) { return std::max(p.a.scaling, p.b.scaling) == Scaling::kRow; }

// cuBLASLt has outer-vector scaling on sm_90 only. Tests set the variable to run the epilogue there.
bool needs_epilogue(int device) {
  return !architecture_of(capability_of(device)).fp32_scales || std::getenv("FSDP_QUANT_SCALED_EPILOGUE") != nullptr;
}

// Row scales by an epilogue of our own: fp32 sums of the codes, in `out` if that is theirs, are scaled and rounded once.
void multiply_then_scale(const GemmProblem& p, const at::Tensor& out, const c10::cuda::CUDAStream& stream) {
  GemmProblem codes = p;
  for (Operand* o : {&codes.a, &codes.b}) o->scale = nullptr, o->scaling = Scaling::kNone;
  codes.bias = nullptr, codes.alpha = nullptr, codes.accumulate = false, codes.out_type = CUDA_R_32F;
  at::Tensor sums;
  if (p.out_type != CUDA_R_32F || p.accumulate) {
    sums = new_empty(out, {p.m, p.n}, at::kFloat);
    codes.out = sums.mutable_data_ptr(), codes.out_ld = p.n;
  }
  multiply_by_cublaslt(codes, stream);
  check_launch(launch_scaled_epilogue(p, static_cast<const float*>(codes.out), codes.out_ld, stream), "gemm", "[", p.m, ", ",
               p.n, "]");
}

void multiply(GemmProblem& p, const at::Tensor& out, const Arguments& given) {
  if (out.numel() == 0) return;
  if (p.k == 0) {  // an empty sum
    if (!p.accumulate) out.zero_();
    if (given.bias.has_value()) out.add_(given.bias->view({p.n}));
    return;
  }
  p.out = out.mutable_data_ptr();
  p.out_ld = p.m > 1 ? out.stride(0) : p.n;
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  if (p.a.scaling == Scaling::k1x512) {  // sm_90 only, as the pair was checked; not in cuBLASLt
    const char* const reason = sm90::unsupported_reason(p);
    TORCH_CHECK_NOT_IMPLEMENTED(reason == nullptr, "operands have 1x512 scales, and ", reason);
    const sm90::Schedule schedule = sm90::schedule_of(p, processors_of(stream.device_index(), p.sm_count));
    return check_launch(sm90::launch(p, {}, schedule, stream), "gemm", "[", p.m, ", ", p.n, "] over K ", p.k);
  }
  if (has_row_scales(p) && needs_epilogue(stream.device_index())) return multiply_then_scale(p, out, stream);
  at::Tensor row_scale;
  if (has_row_scales(p) && p.a.scaling != p.b.scaling) {  // the other operand has one scale
    const bool is_a = p.a.scaling == Scaling::kTensor;
    // Copy the scale to get an aligned address.
    const at::Tensor scale = (is_a ? *given.a_scale : *given.b_scale).view({1});
    row_scale = scale.expand({is_a ? p.m : p.n}).clone(at::MemoryFormat::Contiguous);
    Operand& o = is_a ? p.a : p.b;
    o.scale = row_scale.const_data_ptr(), o.scaling = Scaling::kRow;
  }
  multiply_by_cublaslt(p, stream);
}

}  // namespace

at::Tensor gemm(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, at::ScalarType out_dtype, const MaybeTensor& bias, const MaybeTensor& alpha, int64_t sm_count) {
  check_cuda(a, "a");
  const c10::cuda::CUDAGuard guard(a.device());
  const Arguments given = {a, b, a_scale, b_scale, a_kind, b_kind, bias, alpha, sm_count};
  GemmProblem p = problem_of(given, out_dtype, a.get_device());
  at::Tensor out = new_empty(a, {p.m, p.n}, out_dtype);
  multiply(p, out, given);
  return out;
}

void gemm_out(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
    const MaybeTensor& b_scale, int64_t a_kind, int64_t b_kind, bool accumulate, const MaybeTensor& bias,
    const MaybeTensor& alpha, int64_t sm_count) {
  check_cuda(a, "a");
  const c10::cuda::CUDAGuard guard(a.device());
  const Arguments given = {a, b, a_scale, b_scale, a_kind, b_kind, bias, alpha, sm_count};
  GemmProblem p = problem_of(given, out.scalar_type(), a.get_device());
  p.accumulate = accumulate;
  TORCH_CHECK_VALUE(out.device() == a.device() && out.dim() == 2 && out.size(0) == p.m && out.size(1) == p.n, "out is ",
                    out.sizes(), " on ", out.device(), "; wanted [", p.m, ", ", p.n, "] on ", a.device());
  TORCH_CHECK_VALUE((out.stride(1) == 1 || p.n <= 1) && (out.stride(0) >= p.n || p.m <= 1), "out has strides ",
                    out.strides(), "; wanted rows of ", p.n, " contiguous elements that do not overlap");
  const int64_t row_bytes = (p.m > 1 ? out.stride(0) : p.n) * out.element_size();
  const void* data = out.const_data_ptr();
  TORCH_CHECK_VALUE(is_half(p.a.type) || out.numel() == 0 || (row_bytes % 16 == 0 && is_aligned(data, 16)),
                    "out has rows ", row_bytes, " bytes apart, from address ", reinterpret_cast<uintptr_t>(data) % 16,
                    " modulo 16; rows of a product of codes are aligned to 16 bytes");
  multiply(p, out, given);
}

namespace {

// Whether the step on the devices may be probed, as far as the host knows. Of the process, as steps are.
std::atomic<bool> may_be_probed = true;

CountedOperand counted_operand(
    const at::Tensor& x, const MaybeTensor& scale, int64_t kind, int64_t counted, const char* name) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kByte && x.stride(-1) == 1 && (x.dim() == 2 || x.dim() == 3), name, " is ",
                    x.scalar_type(), " ", x.sizes(), " of strides ", x.strides(), "; wanted codes [outer, k]");
  TORCH_CHECK_VALUE(counted >= 0 && counted <= kMostCounted, name, " is counted as ", counted, "; wanted 0 to ", kMostCounted,
                    " (counted_as, ops/reference.py)");
  const int64_t outer = x.numel() / x.size(-1), k = x.size(-1);
  const Operand o = operand_of_kind(kind, name);
  TORCH_CHECK_VALUE(is_fp8(o.type), name, " is of kind ", kind, "; wanted codes of 8 bits");
  CountedOperand c = {};
  c.data = x.const_data_ptr<uint8_t>(), c.outer = outer, c.ld = x.stride(-2);
  c.plane_lines = x.size(-2), c.plane = x.dim() == 3 ? x.stride(0) : 0;
  c.vectors = is_aligned(c.data, 4) && c.ld % 4 == 0 && c.plane % 4 == 0;
  c.e5m2 = o.type == CUDA_R_8F_E5M2, c.counted = counted != 0, c.of_blocks = counted >= kLeastOfBlocks;
  if (c.of_blocks) c.exact = kExactBlocks[counted - kLeastOfBlocks];
  TORCH_CHECK_VALUE(o.scaling <= Scaling::kRow || has_fp32_blocks(o.scaling), name, " is of kind ", kind,
                    "; wanted scales of a tensor, of lines, of runs or of tiles");
  if (o.scaling <= Scaling::kRow) return c;
  c.tiles = o.scaling == Scaling::k128x128;
  const int64_t numel = c.tiles ? outer / c.plane_lines * scale_numel(o.scaling, c.plane_lines, k) : scale_numel(o.scaling, outer, k);
  TORCH_CHECK_VALUE(scale.has_value() && scale->scalar_type() == at::kFloat && scale->numel() == numel, name,
                    ": wanted ", numel, " scales");
  c.scale = scale->const_data_ptr<float>(), c.scale_ld = scale_ld(o.scaling, outer, k);
  c.run_log2 = o.scaling == Scaling::k1x512 ? 9 : 7;
  return c;
}

}  // namespace

void product_error(
    const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale, const MaybeTensor& b_scale, int64_t a_kind,
    int64_t b_kind, int64_t counted, const at::Tensor& step, const at::Tensor& guard, int64_t product, int64_t every,
    const int32_t* k_end) {
  check_cuda(a, "a");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  check_buffer(step, "step", a, at::kLong, 5);
  check_buffer(guard, "guard", a, at::kFloat, 6);
  TORCH_CHECK_VALUE(product >= 0 && product < 3, "product is ", product, "; wanted 0 to 2");
  if (a.numel() == 0 || b.numel() == 0) return;
  const c10::cuda::CUDAGuard device(a.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  if (!may_be_probed && !is_capturing(stream)) return;  // the step of a replay is another one
  ProductError p = {};
  p.operand[0] = counted_operand(a, a_scale, a_kind, counted & 15, "a");
  p.operand[0].of_tokens = product < 2;  // fprop and dgrad: see PRODUCTS in linear/plan.py
  p.operand[1] = counted_operand(b, b_scale, b_kind, counted >> 4, "b");
  TORCH_CHECK_VALUE(a.size(-1) == b.size(-1), "a is ", a.sizes(), " and b ", b.sizes(), "; wanted the same K");
  p.k = a.size(-1), p.k_end = k_end, p.every = every, p.step = step.const_data_ptr<int64_t>() + 1;
  p.sums = guard.mutable_data_ptr<float>() + 2 * product;
  check_launch(launch_product_error(p, stream), "product_error");
}

void register_gemm(torch::Library& m) {
  m.def(
      "product_error(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, int a_kind, int b_kind, int counted, Tensor step, "
      "Tensor(a!) guard, int product) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
                                                 const MaybeTensor& b_scale, int64_t a_kind, int64_t b_kind, int64_t counted,
                                                 const at::Tensor& step, const at::Tensor& guard, int64_t product) {
        product_error(a, b, a_scale, b_scale, a_kind, b_kind, counted, step, guard, product);
      }), compliant());
  // `product_error`, then `gemm`: each call of an operator in a graph takes the host microseconds.
  m.def(
      "watched_gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, int a_kind, int b_kind, ScalarType out_dtype, "
      "int counted, Tensor step, Tensor(a!) guard, int product, Tensor? bias=None, Tensor? alpha=None) -> Tensor",
      torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& a, const at::Tensor& b, const MaybeTensor& a_scale,
                                                 const MaybeTensor& b_scale, int64_t a_kind, int64_t b_kind,
                                                 at::ScalarType out_dtype, int64_t counted, const at::Tensor& step,
                                                 const at::Tensor& guard, int64_t product, const MaybeTensor& bias,
                                                 const MaybeTensor& alpha) {
        product_error(a, b, a_scale, b_scale, a_kind, b_kind, counted, step, guard, product);
        return gemm(a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, bias, alpha);
      }), compliant());
  m.def("set_probed(bool probed) -> ()", [](bool probed) { may_be_probed = probed; });
  m.def("gemm_takes(int a_kind, int b_kind, int major, int minor) -> bool", gemm_takes);
  m.def(
      "gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, int a_kind, int b_kind, ScalarType out_dtype, "
      "Tensor? bias=None, Tensor? alpha=None, int sm_count=0) -> Tensor",
      torch::dispatch(c10::DispatchKey::CUDA, gemm), compliant());
  m.def(
      "gemm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, int a_kind, int b_kind, "
      "bool accumulate=False, Tensor? bias=None, Tensor? alpha=None, int sm_count=0) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, gemm_out), compliant());
}

}  // namespace fsdp_quant
