// SPDX-License-Identifier: Apache-2.0
// FP8 conversions in integer arithmetic, bit-exact with the instructions that GPUs before sm_89 lack. Also for host code.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FSDP_QUANT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FSDP_QUANT_HOST_DEVICE inline
#endif

namespace fsdp_quant {

FSDP_QUANT_HOST_DEVICE uint32_t float_bits(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

FSDP_QUANT_HOST_DEVICE float float_of(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

// cvt.rn.satfinite; NaN gives 0x7F. Mantissa: 3 (e4m3) or 2 (e5m2).
template <int Mantissa>
FSDP_QUANT_HOST_DEVICE uint32_t fp8_code(float v) {
  constexpr int kBias = Mantissa == 3 ? 7 : 15, kShift = 23 - Mantissa;
  constexpr uint32_t kLargest = Mantissa == 3 ? 0x7E : 0x7B, kSmallestNormal = (128 - kBias) << 23;
  // Floats from this value on have the spacing of the element's subnormals.
  constexpr uint32_t kStep = (127 + 23 + 1 - kBias - Mantissa) << 23;
  const uint32_t bits = float_bits(v), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  uint32_t code;
  if (magnitude < kSmallestNormal) {
    code = float_bits(float_of(magnitude) + float_of(kStep)) - kStep;
  } else {
    const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);  // to even
    code = ((magnitude + half) >> kShift) - ((127 - kBias) << Mantissa);
    code = code < kLargest ? code : kLargest;
  }
  return code | (bits >> 24 & 0x80);
}

// cvt.rn.f16x2 of a code; NaN gives 0x7FFF.
template <int Mantissa>
FSDP_QUANT_HOST_DEVICE uint32_t half_of_fp8(uint32_t code) {
  const uint32_t magnitude = code & 0x7F, sign = (code & 0x80) << 8;
  if (magnitude > (Mantissa == 3 ? 0x7Eu : 0x7Cu)) return 0x7FFF;
  if (Mantissa == 2) return sign | magnitude << 8;
  if (magnitude == 0) return sign;
  const float exact = float_of(magnitude << 20) * float_of(247u << 23);  // subnormals too
  return sign | ((float_bits(exact) >> 13) - ((127 - 15) << 10));
}

}  // namespace fsdp_quant
