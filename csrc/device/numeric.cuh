// SPDX-License-Identifier: Apache-2.0
// Scales and elements, bit-exact with fsdp_quant/ops/reference.py. Products that feed an addition use intrinsics, so that the
// compiler cannot contract them to FMAs.
//
// Integer minima and byte permutes issue at half the rate of fp32 adds: a saturating multiply-add instead of a minimum, and a
// threshold instead of its complement, gained 10 %. A byte permute has one immediate: keep the other operand in a register.
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

// enc of the fp32 scales: max /rn amax; 1 where amax is 0 or not finite; FLT_MAX at most.
__device__ __forceinline__ float encode_factor(float amax, float max, float eps, bool pow2) {
  if (amax < eps) amax = eps;
  float enc = 1.0f;
  if (amax != 0.0f && is_finite(amax)) enc = fminf(__fdiv_rn(max, amax), kFltMax);
  return pow2 ? __uint_as_float(bits_of(enc) & 0x7F800000u) : enc;
}

// Biased exponent of a block, rounded up or by the OCP floor rule: amax 0 -> 0x00, inf -> 0xFE, NaN -> 0xFF.
__device__ __forceinline__ uint32_t e8m0_code(float amax, const EncodingSpec& spec) {
  if (spec.scale == ScaleKind::kE8M0Floor) {  // the exponent of the maximum, less that of the largest element
    const uint32_t bits = bits_of(amax);
    if (bits >= 0x7F800000u) return bits == 0x7F800000u ? 0xFEu : 0xFFu;
    const int code = static_cast<int>(bits >> 23) - static_cast<int>((bits_of(spec.max) >> 23) - 127);
    return code > 0 ? code : 0;
  }
  if constexpr (ptx::kHardwareCasts) return ptx::cvt_ue8m0(__fmul_rn(amax, spec.inverse_max));
  // Adding the mantissa mask carries into the exponent unless the mantissa is 0; inf and NaN come out one too large.
  const uint32_t v = bits_of(__fmul_rn(amax, spec.inverse_max));
  const uint32_t up = ((v + 0x7FFFFFu) >> 23) - (v >= 0x7F800000u);
  return v > 0x400000u ? up : 0;
}

// S of a two-level format: tensor_max /rn tensor amax; 1 if that is 0 or not finite; at most FLT_MAX.
__device__ __forceinline__ float tensor_encode_factor(float tensor_amax, float tensor_max) {
  return encode_factor(tensor_amax, tensor_max, 0.0f, false);
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  return __low2float(ptx::cvt_f16x2_e4m3x2(code));
}

// D: NaN if the tensor amax is not finite.
__device__ __forceinline__ float tensor_decode_scale(float tensor_amax, float tensor_max) {
  return is_finite(tensor_amax) ? __fdiv_rn(1.0f, tensor_encode_factor(tensor_amax, tensor_max)) : quiet_nan();
}

// Encode factor of a block and its stored scale (fp32 bits, or a code).
struct BlockScale {
  float enc;
  uint32_t stored;
};

__device__ __forceinline__ BlockScale e8m0_scale(float amax, const EncodingSpec& spec) {
  const uint32_t code = e8m0_code(amax, spec);
  return {power_of_two(code == 255 ? 255 : 254 - code), code};
}

// e8m0_scale for finite amaxes, rounded up: the code is at most 253.
__device__ __forceinline__ BlockScale e8m0_scale_of_finite(float amax, const EncodingSpec& spec) {
  const uint32_t v = bits_of(__fmul_rn(amax, spec.inverse_max)), code = v > 0x400000u ? (v + 0x7FFFFFu) >> 23 : 0;
  return {__uint_as_float((254u - code) << 23), code};
}

__device__ __forceinline__ BlockScale fp32_scale(float amax, const EncodingSpec& spec) {
  const bool pow2 = spec.scale == ScaleKind::kFp32Pow2;
  const float enc = encode_factor(amax, spec.max, spec.eps, pow2);
  return {enc, bits_of(is_finite(amax) ? __fdiv_rn(1.0f, enc) : quiet_nan())};
}

// fp32_scale for powers of two and amaxes that pass `has_easy_power`. The subtraction of the bits borrows from the exponent
// exactly if amax has the larger mantissa, where the quotient's exponent is one less.
__device__ __forceinline__ BlockScale easy_power(float amax, const EncodingSpec& spec) {
  const int exponent = (static_cast<int>(bits_of(spec.max) - bits_of(amax)) >> 23) + 127;
  return {__uint_as_float(exponent << 23), static_cast<uint32_t>(254 - exponent) << 23};
}

__device__ __forceinline__ bool has_easy_power(float least, float largest, const EncodingSpec& spec) {
  return least >= 1e-30f && least >= spec.eps && largest <= 1e30f;  // false for NaN
}

// Encode factor of a two-level scale code: 1 /rn fl(code * fl(1 / S)). There are 128 per tensor.
__device__ __forceinline__ float two_level_factor(uint32_t code, float inverse) {
  const float enc = __fdiv_rn(1.0f, __fmul_rn(e4m3_value(code), inverse));
  return enc > kFltMax ? kFltMax : enc;
}
__device__ __forceinline__ float two_level_factor(uint32_t code, float tensor_amax, const EncodingSpec& spec) {
  return two_level_factor(code, __fdiv_rn(1.0f, tensor_encode_factor(tensor_amax, spec.tensor_max)));
}

// Factor from a block's amax to the target of its scale: fl(S * fl(1 / 6)).
__device__ __forceinline__ float two_level_target(float tensor_amax, const EncodingSpec& spec) {
  return __fmul_rn(tensor_encode_factor(tensor_amax, spec.tensor_max), 1.0f / 6.0f);
}

// Round a target to 1, 1.25 or 1.5 times a power of two: significands from 1.15, 1.4 and 1.8 round to the next; round_up:
// never below.
__device__ __forceinline__ float exact_target(float target, bool round_up) {
  const uint32_t bits = bits_of(target), significand = bits & 0x7FFFFFu;
  const uint32_t reached = (significand >= (round_up ? 0x000001u : bits_of(1.15f) & 0x7FFFFFu)) +
                           (significand >= (round_up ? 0x200001u : bits_of(1.4f) & 0x7FFFFFu)) +
                           (significand >= (round_up ? 0x400001u : bits_of(1.8f) & 0x7FFFFFu));
  return __uint_as_float((bits & 0x7F800000u) + (reached == 3 ? 0x800000u : reached << 21));
}

// The scale code of a target, a block's amax times two_level_target.
__device__ __forceinline__ uint32_t two_level_code(float target, bool round_up, bool exact) {
  const float most = fminf(target, exact ? 384.0f : 448.0f);
  uint32_t code = ptx::cvt_e4m3x2(0.0f, exact ? exact_target(most, round_up) : most) & 0xFF;
  if (round_up) code += e4m3_value(code) < most;
  return target != target ? 0x7F : code;
}

// A second-level scale of a tensor. target: two_level_target; factors: two_level_factor of every code.
struct OfTensor {
  float target;
  const float (&factors)[128];
  __device__ __forceinline__ float enc(uint32_t code) const { return factors[code]; }
};

// A second-level scale of a line. target: two_level_target; inverse: 1 / S.
struct OfLine {
  float target, inverse;
  __device__ __forceinline__ OfLine(float target, float inverse) : target(target), inverse(inverse) {}
  __device__ __forceinline__ OfLine(float amax, const EncodingSpec& spec) {
    const float factor = tensor_encode_factor(amax, spec.tensor_max);
    target = __fmul_rn(factor, 1.0f / 6.0f), inverse = __fdiv_rn(1.0f, factor);
  }
  __device__ __forceinline__ float enc(uint32_t code) const { return two_level_factor(code, inverse); }
};

template <class Level>
__device__ __forceinline__ BlockScale two_level_scale(float amax, const Level& level, bool round_up, bool exact) {
  const uint32_t code = two_level_code(__fmul_rn(amax, level.target), round_up, exact);
  return {level.enc(code), code};
}

// Distance of a magnitude to its 4-bit number in units of 2^-20, at most 4. Adding and subtracting 1.5 * 2^23 steps rounds to
// a whole step: a half below 2, 1 below 4, 2 above.
__device__ __forceinline__ uint32_t e2m1_distance(float a) {
  const float inside = fminf(a, 6.0f);
  const float magic = __uint_as_float((bits_of(fmaxf(inside, 1.0f)) & 0x7F800000u) + 0x0B400000u);
  const float rounded = __fsub_rn(__fadd_rn(inside, magic), magic);
  const float distance = fminf(fabsf(__fsub_rn(a, rounded)), 4.0f);
  return bits_of(__fmaf_rn(distance, 1048576.0f, 8388608.0f)) - bits_of(8388608.0f);
}

// Two scales of a block, which make its amax 6 or 4, and sums over its elements (of parts, in any order) of what they lose:
// `four_over_six` of the reference.
struct TwoScales {
  BlockScale six, four;
  uint64_t of_six = 0, of_four = 0;

  template <class Level>
  __device__ __forceinline__ TwoScales(float amax, const Level& level, bool exact) {
    const float target = __fmul_rn(amax, level.target);
    six.stored = two_level_code(target, false, exact), four.stored = two_level_code(__fmul_rn(target, 1.5f), false, exact);
    six.enc = level.enc(six.stored), four.enc = level.enc(four.stored);
  }
  __device__ __forceinline__ void take(float value, bool squared) {
    const uint32_t a = e2m1_distance(fabsf(__fmul_rn(value, six.enc))), b = e2m1_distance(fabsf(__fmul_rn(value, four.enc)));
    of_six += static_cast<uint64_t>(a) * (squared ? a : 1u), of_four += static_cast<uint64_t>(b) * (squared ? b : 1u);
  }
  // Add the sums of the lane whose index differs in this bit.
  __device__ __forceinline__ void add_lane(int bit) {
    of_six += __shfl_xor_sync(0xFFFFFFFFu, of_six, bit), of_four += __shfl_xor_sync(0xFFFFFFFFu, of_four, bit);
  }
  __device__ __forceinline__ BlockScale better(float amax, bool squared) const {
    const auto error = [&](uint64_t sum, uint32_t code) {
      const double scale = e4m3_value(code);
      return __dmul_rn(__ull2double_rn(sum), squared ? scale * scale : scale);
    };
    const bool is_less = six.stored == 0 || error(of_four, four.stored) < error(of_six, six.stored);
    return is_finite(amax) && four.stored != 0 && is_less ? four : six;
  }
};

// 4-bit code of a magnitude, saturating, ties to even, in the low byte; NaN gives 6. The code is the minimum of rint(2a),
// rint(a) + 2 and rint(a / 2) + 4; adding 1.5 * 2^23 rounds to an integer in the low bits, and positive floats order like
// their bits. Without NaNs the third term saturates by itself, which saves an integer minimum.
template <bool TakesNaN>
__device__ __forceinline__ uint32_t e2m1_magnitude(float a) {
  constexpr float kMagic = 12582912.0f;
  const int first = __float_as_int(__fmaf_rn(a, 2.0f, kMagic)), second = __float_as_int(__fadd_rn(a, kMagic + 2.0f));
  if constexpr (TakesNaN) {
    const int third = __float_as_int(__fmaf_rn(a, 0.5f, kMagic + 4.0f));
    return static_cast<uint32_t>(min(__vimin3_s32(first, second, third), __float_as_int(kMagic + 7.0f)));
  }
  const int third = __float_as_int(__fadd_rn(__saturatef(__fmaf_rn(a, 0.5f, -2.0f)), kMagic + 6.0f));
  return static_cast<uint32_t>(__vimin3_s32(first, second, third));
}

// fp16 values of four 4-bit codes, two per word: the high bytes come from a table of 8, then the sign is added.
__device__ __forceinline__ uint2 halves_of_e2m1x4(uint32_t four) {
  const uint32_t high = __byte_perm(0x3E3C3800u, 0x46444240u, four & 0x7777u);  // 0, .5, 1, 1.5, 2, 3, 4, 6
  return {__byte_perm(high, 0, 0x1404) | (four & 0x8) << 12 | (four & 0x80) << 24,
          __byte_perm(high, 0, 0x3424) | (four & 0x800) << 4 | (four & 0x8000) << 16};
}

// A magnitude in units of its binade's spacing, and the code of the binade's start minus those units.
struct InSteps {
  float ratio;
  uint32_t base;
};

// For 8- or 6-bit elements; v is not NaN.
template <int Bits>
__device__ __forceinline__ InSteps in_steps(float v, const EncodingSpec& spec) {
  const bool two = spec.element == (Bits == 8 ? Element::kE5M2 : Element::kE3M2);  // bits of the mantissa; else three
  const uint32_t mantissa = two ? 2 : 3, smallest = Bits == 8 ? (two ? 127 - 14 : 127 - 6) : (two ? 127 - 2 : 127);
  const float magnitude = fminf(fabsf(v), spec.max);
  const uint32_t exponent = max(bits_of(magnitude) >> 23, smallest);
  return {__fmul_rn(magnitude, __uint_as_float((254 - exponent + mantissa) << 23)), (exponent - smallest) << mantissa};
}

// Stochastic rounding to 8 or 6 bits: up iff (random + 0.5) / 256 < fraction.
template <int Bits>
__device__ __forceinline__ uint32_t stochastic_code(float v, uint32_t random, const EncodingSpec& spec) {
  if (v != v) return (1u << (Bits - 1)) - 1;  // NaN, or the largest number of elements without it
  const InSteps s = in_steps<Bits>(v, spec);
  const uint32_t low = static_cast<uint32_t>(s.ratio);
  const bool up = static_cast<float>(random) + 0.5f < __fmul_rn(__fsub_rn(s.ratio, static_cast<float>(low)), 256.0f);
  return (low + up + s.base) | ((bits_of(v) >> 31) << (Bits - 1));
}

// Round to nearest even, saturating, to 6 bits.
__device__ __forceinline__ uint32_t nearest_code6(float v, const EncodingSpec& spec) {
  if (v != v) return 0x1Fu;
  const InSteps s = in_steps<6>(v, spec);
  return (__float2uint_rn(s.ratio) + s.base) | ((bits_of(v) >> 31) << 5);
}

// stochastic_code of a 4-bit magnitude, in the high byte; NaN gives 6. From 1 up, the float bits from the 22nd are the code
// (plus 252) and the lower ones its fraction; below 1 the same holds for 1 + a, one binade down (rounded up: an inexact
// fraction is above its threshold). The larger of both is the code. After a shift by two, subtracting `threshold` =
// 0xFB008001 | random << 16 adds 256 - (random + 0.5), which carries iff the fraction exceeds the threshold, and 4 to the
// code (minus 252). Exceeds: a may be NaN, or exceed 6 by more than rounding (1/256, from where it may round up).
template <bool Exceeds>
__device__ __forceinline__ uint32_t stochastic_e2m1(float a, uint32_t threshold) {
  if (Exceeds) a = fminf(a, 6.0f);
  const int bits = __viaddmax_s32(__float_as_int(__fadd_ru(a, 1.0f)), -0x00800000, __float_as_int(a));
  return static_cast<uint32_t>(bits) * 4 - threshold;
}

}  // namespace fsdp_quant
