// SPDX-License-Identifier: Apache-2.0
// Eight codes of a row, of 8, 6 or 4 bits.
#pragma once

#include "device/numeric.cuh"

namespace fsdp_quant {

constexpr int code_bits(Element e) { return e == Element::kE2M1 ? 4 : e >= Element::kE2M3 ? 6 : 8; }

// Bytes of a row of so many codes, one or more: `PACKINGS` of formats.py.
__host__ __device__ constexpr int32_t row_bytes(Element e, int32_t cols) {
  return code_bits(e) == 4 ? (cols - 1) / 2 + 1 : code_bits(e) == 6 ? ((cols - 1) / 4 + 1) * 3 : cols;
}

// 8 bytes of a row, those beyond its last `count` zero.
__device__ __forceinline__ uint2 load8(const uint8_t* p, int32_t count, bool vectors) {
  if (vectors && count >= 8) return __ldg(reinterpret_cast<const uint2*>(p));
  uint2 v = make_uint2(0, 0);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) (e < 4 ? v.x : v.y) |= static_cast<uint32_t>(__ldg(p + e)) << (8 * (e & 3));
  }
  return v;
}

// The codes from column `col`, a multiple of 8, those beyond the last of `bytes` zero. vectors: all 8 are there, and aligned: to
// as many bytes, but to 2 those of 6 bits.
template <Element E>
__device__ __forceinline__ uint2 load_codes(const uint8_t* row, int32_t col, int32_t bytes, bool vectors) {
  constexpr int kBytes = code_bits(E);  // of 8 codes
  const int32_t offset = (col >> 3) * kBytes;
  const uint8_t* p = row + offset;
  if (kBytes == 8 || !vectors) return load8(p, min(bytes - offset, kBytes), vectors);
  if constexpr (kBytes == 4) return make_uint2(__ldg(reinterpret_cast<const uint32_t*>(p)), 0);
  const auto* const halves = reinterpret_cast<const uint16_t*>(p);
  return make_uint2(__ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16, __ldg(halves + 2));
}

// Codes 2 k and 2 k + 1 as fp16; those of 6 bits over `kHalfScale`: their exponent and mantissa are those of fp16 numbers, but for
// the exponent's bias.
template <Element E>
constexpr float kHalfScale = E == Element::kE2M3 ? 0x1p14f : E == Element::kE3M2 ? 0x1p12f : 1.0f;

template <Element E>
__device__ __forceinline__ __half2 halves_of(uint2 v, int k) {
  if constexpr (code_bits(E) == 8) {
    const uint32_t codes = (k < 2 ? v.x : v.y) >> (16 * (k & 1)) & 0xFFFF;
    return E == Element::kE5M2 ? ptx::cvt_f16x2_e5m2x2(codes) : ptx::cvt_f16x2_e4m3x2(codes);
  } else if constexpr (code_bits(E) == 4) {
    const uint2 four = halves_of_e2m1x4(v.x >> (16 * (k >> 1)));
    return *reinterpret_cast<const __half2*>(k & 1 ? &four.y : &four.x);
  } else {
    constexpr int kShift = E == Element::kE3M2 ? 8 : 7;
    const uint32_t two = static_cast<uint32_t>((static_cast<uint64_t>(v.y) << 32 | v.x) >> (12 * k));
    const auto half = [](uint32_t code) { return (code & 0x20u) << 10 | (code & 0x1Fu) << kShift; };
    const uint32_t bits = half(two) | half(two >> 6) << 16;
    return *reinterpret_cast<const __half2*>(&bits);
  }
}

}  // namespace fsdp_quant
