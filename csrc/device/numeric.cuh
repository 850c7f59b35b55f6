// Scales and elements, bit-exact with fsdp_quant/ops/reference.py. No fast-math: products that feed an addition are
// written with intrinsics, so that no compiler fuses them.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "quantize/quantize.h"

namespace fsdp_quant {

constexpr float kFltMax = 3.402823466e+38f;

__device__ __forceinline__ uint32_t bits_of(float v) { return __float_as_uint(v); }
__device__ __forceinline__ bool is_finite(float v) { return (bits_of(v) & 0x7F800000u) != 0x7F800000u; }
__device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7FC00000u); }

// 2^(exponent - 127) for biased exponents 0 (the subnormal 2^-127) to 254; 255 is NaN.
__device__ __forceinline__ float power_of_two(uint32_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7FC00000u : exponent << 23;
  return __uint_as_float(bits);
}

// enc of the fp32 scales: max /rn amax; 1 where amax is 0 or not finite; FLT_MAX at most. Rounded down to a power of two
// it needs no division: the exponents' difference, less one where amax has the larger mantissa.
__device__ __forceinline__ float encode_factor(float amax, float max, float eps, bool pow2) {
  if (amax < eps) amax = eps;
  const uint32_t bits = bits_of(amax), top = bits_of(max);
  if (pow2 && bits >= 0x00800000u && bits < 0x7F800000u) {
    const int exponent = 127 + static_cast<int>(top >> 23) - static_cast<int>(bits >> 23) -
                         ((bits & 0x7FFFFFu) > (top & 0x7FFFFFu));
    if (exponent > 0 && exponent < 255) return __uint_as_float(exponent << 23);
  }
  float enc = 1.0f;
  if (amax != 0.0f && is_finite(amax)) enc = fminf(__fdiv_rn(max, amax), kFltMax);
  return pow2 ? __uint_as_float(bits_of(enc) & 0x7F800000u) : enc;
}

// 1 /rn enc of a power of two, or of any factor.
__device__ __forceinline__ float reciprocal(float enc, bool pow2) {
  const uint32_t exponent = bits_of(enc) >> 23;
  return pow2 && exponent > 0 && exponent < 254 ? __uint_as_float((254 - exponent) << 23) : __fdiv_rn(1.0f, enc);
}

// Biased exponent of a block: amax 0 -> 0x00, inf -> 0xFE, NaN -> 0xFF; rounded up, or by the OCP floor rule.
__device__ __forceinline__ uint32_t e8m0_code(float amax, const Side& side) {
  const uint32_t bits = bits_of(amax);
  if (bits >= 0x7F800000u) return bits == 0x7F800000u ? 0xFEu : 0xFFu;
  if (side.scale == ScaleKind::kE8M0Floor) {  // the exponent of the maximum, less that of the largest element
    const int code = static_cast<int>(bits >> 23) - static_cast<int>((bits_of(side.max) >> 23) - 127);
    return code > 0 ? code : 0;
  }
  const uint32_t v = bits_of(__fmul_rn(amax, side.inverse_max));
  const uint32_t exponent = v >> 23, mantissa = v & 0x7FFFFFu;
  return exponent + (exponent == 0 ? mantissa > 0x400000u : mantissa != 0);
}

// S of a two-level format: 2688 /rn tensor amax; 1 where it is 0 or not finite; FLT_MAX at most.
__device__ __forceinline__ float tensor_encode_factor(float tensor_amax) {
  return encode_factor(tensor_amax, 2688.0f, 0.0f, false);
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  return __low2float(ptx::cvt_f16x2_e4m3x2(code));
}

// D: NaN where the tensor's amax is not finite.
__device__ __forceinline__ float tensor_decode_scale(float tensor_amax) {
  return is_finite(tensor_amax) ? __fdiv_rn(1.0f, tensor_encode_factor(tensor_amax)) : quiet_nan();
}

// The encode factor of one block, and its stored scale (fp32 bits, or a code).
struct BlockScale {
  float enc;
  uint32_t stored;
};

__device__ __forceinline__ BlockScale e8m0_scale(float amax, const Side& side) {
  const uint32_t code = e8m0_code(amax, side);
  return {power_of_two(code == 255 ? 255 : 254 - code), code};
}

__device__ __forceinline__ BlockScale fp32_scale(float amax, const Side& side) {
  const bool pow2 = side.scale == ScaleKind::kFp32Pow2;
  const float enc = encode_factor(amax, side.max, side.eps, pow2);
  return {enc, bits_of(is_finite(amax) ? reciprocal(enc, pow2) : quiet_nan())};
}

// The tensor's part of a two-level scale: S * fl(1/6), and 1 /rn S.
struct TensorScale {
  float target, inverse;
};

__device__ __forceinline__ TensorScale tensor_scale(float tensor_amax) {
  const float factor = tensor_encode_factor(tensor_amax);
  return {__fmul_rn(factor, 1.0f / 6.0f), __fdiv_rn(1.0f, factor)};
}

__device__ __forceinline__ BlockScale two_level_scale(float amax, const TensorScale& tensor, bool round_up) {
  if (amax != amax) return {quiet_nan(), 0x7F};
  const float target = fminf(__fmul_rn(amax, tensor.target), 448.0f);
  uint32_t code = ptx::cvt_e4m3x2(0.0f, target) & 0xFF;
  if (round_up) code += e4m3_value(code) < target;
  const float enc = __fdiv_rn(1.0f, __fmul_rn(e4m3_value(code), tensor.inverse));
  return {enc > kFltMax ? kFltMax : enc, code};
}

// 4-bit code of a magnitude, saturating, ties to even, in the low bits of a word whose other bits are kE2M1Rest; NaN
// gives 6. Three rounded lines, whose minimum is the code: rint(2a), rint(a) + 2, rint(a / 2) + 4; adding 1.5 * 2^23
// rounds to an integer in the low bits.
constexpr uint32_t kE2M1Rest = 0x4B400000u;

__device__ __forceinline__ uint32_t e2m1_magnitude(float a) {
  constexpr float kMagic = 12582912.0f;
  const float low = fminf(__fmaf_rn(a, 2.0f, kMagic), __fadd_rn(a, kMagic + 2.0f));
  return bits_of(fminf(fminf(low, __fmaf_rn(a, 0.5f, kMagic + 4.0f)), kMagic + 7.0f));
}

// Code of v rounded to one of its two neighbours: up iff (random + 0.5) / 256 < fraction.
template <bool FourBit>
__device__ __forceinline__ uint32_t stochastic_code(float v, uint32_t random, const Side& side) {
  if (v != v) return FourBit ? 0x7u : 0x7Fu;
  const bool e5m2 = side.element == Element::kE5M2;
  const uint32_t mantissa = FourBit ? 1 : e5m2 ? 2 : 3;
  const uint32_t smallest = FourBit ? 127 : e5m2 ? 127 - 14 : 127 - 6;
  const float magnitude = fminf(fabsf(v), side.max);
  const uint32_t exponent = max(bits_of(magnitude) >> 23, smallest);
  const float ratio = __fmul_rn(magnitude, __uint_as_float((254 - exponent + mantissa) << 23));
  const uint32_t low = static_cast<uint32_t>(ratio);
  const bool up = static_cast<float>(random) + 0.5f < __fmul_rn(__fsub_rn(ratio, static_cast<float>(low)), 256.0f);
  const uint32_t code = low + up + ((exponent - smallest) << mantissa);
  return code | ((bits_of(v) >> 31) << (FourBit ? 3 : 7));
}

}  // namespace fsdp_quant
