// SPDX-License-Identifier: Apache-2.0
// One step of AdamW (coupled == 0) or Adam (keep == 1) on fp32 masters p:
//   g = g / grad_scale;  g = fma(p, coupled, g)
//   p = p * keep;  m = fma(first, g - m, m);  v = fma(g * second, g, v * beta2)
//   p = p + (m * minus_step_size) / (sqrt(v) / root_correction + eps)
// Every operation rounds once, to nearest, bit-exact with optim/fused_adam.py on a CPU. The update uses moments before they
// are rounded for storage. If a low-precision parameter is not its rounded master, something else wrote it, and the master is
// set to it.
//
// A remainder is the lower half of a master's bits as a signed integer; the parameter is the rest: to nearest, ties away from
// 0 (fsdp_quant/optim/compact.py).
#pragma once

#include "optim/adam.h"

#include <type_traits>

#include <cuda_bf16.h>

namespace fsdp_quant {

template <typename T>
struct alignas(sizeof(T) * 4) Four {
  T v[4];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

struct AdamScalars {
  float of[kAdamScalars];
  float grad_scale;
  bool scaled;

  __device__ __forceinline__ AdamScalars(const AdamStep& step, int32_t row) {
#pragma unroll
    for (int i = 0; i < kAdamScalars; ++i) of[i] = step.scalars[row * kAdamScalars + i];
    scaled = step.grad_scale != nullptr;
    grad_scale = scaled ? *step.grad_scale : 1.0f;
  }
};

__device__ __forceinline__ bool is_skipped(const AdamStep& step) {
  return step.found_inf != nullptr && *step.found_inf != 0.0f;
}

template <AdamMaster kMaster>
using StoredMaster = std::conditional_t<kMaster == kRemainder, int16_t, float>;

__device__ __forceinline__ float join(__nv_bfloat16 high, int16_t low) {
  return __uint_as_float((static_cast<uint32_t>(__bfloat16_as_ushort(high)) << 16) + static_cast<uint32_t>(int32_t{low}));
}

__device__ __forceinline__ void split(float p, __nv_bfloat16& high, int16_t& low) {
  const uint32_t bits = p == p ? __float_as_uint(p) : 0x7FC00000u;  // other NaN bits could carry into the sign
  low = static_cast<int16_t>(bits);
  high = __ushort_as_bfloat16(static_cast<uint16_t>((bits - static_cast<uint32_t>(int32_t{low})) >> 16));
}

template <typename Grad, typename Moment, AdamMaster kMaster>
__device__ __forceinline__ void adam_update(
    const AdamScalars& s, StoredMaster<kMaster>& stored, Grad grad, Moment& first, Moment& second,
    __nv_bfloat16& rounded) {
  float g = to_float(grad), m = to_float(first), v = to_float(second), p;
  if constexpr (kMaster == kRemainder) {
    p = join(rounded, stored);
  } else {
    p = stored;
  }
  if (kMaster == kRounded) {
    const float parameter = __bfloat162float(rounded);
    if (!(__bfloat162float(__float2bfloat16_rn(p)) == parameter)) p = parameter;
  }
  if (s.scaled) g = __fdiv_rn(g, s.grad_scale);
  if (s.of[kCoupled] != 0.0f) g = __fadd_rn(g, __fmul_rn(p, s.of[kCoupled]));
  p = __fmul_rn(p, s.of[kKeep]);
  const float change = __fsub_rn(g, m), weight = s.of[kFirst];
  m = weight < 0.5f ? __fadd_rn(m, __fmul_rn(change, weight))
                    : __fsub_rn(g, __fmul_rn(change, __fsub_rn(1.0f, weight)));
  v = __fadd_rn(__fmul_rn(v, s.of[kBeta2]), __fmul_rn(__fmul_rn(g, s.of[kSecond]), g));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.of[kRootCorrection]), s.of[kEps]);
  p = __fadd_rn(p, __fdiv_rn(__fmul_rn(m, s.of[kMinusStepSize]), denominator));
  round_to(first, m), round_to(second, v);
  if constexpr (kMaster == kRemainder) {
    split(p, rounded, stored);
  } else {
    stored = p;
    if (kMaster == kRounded) rounded = __float2bfloat16_rn(p);
  }
}

}  // namespace fsdp_quant
