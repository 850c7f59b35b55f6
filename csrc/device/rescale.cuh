// SPDX-License-Identifier: Apache-2.0
// Multiply codes by a power of two <= 1 in the same element, or smaller elements by a power of two or scale into e4m3.
#pragma once

#include "device/ptx.cuh"
#include "quantize/quantize.h"

namespace fsdp_quant {

// fp16 bits of 2^d, d from 15 to -24: subnormal below -14.
__device__ __forceinline__ uint32_t half_power(int32_t d) { return d >= -14 ? (15 + d) << 10 : 1u << (24 + d); }

// fp16 factors round nothing that the cast would not flush to zero. An element has at most 4 significant bits, so its product
// is exact down to 2^-21; smaller products are far below half the least e4m3 (2^-10) and e5m2 (2^-17). 448 * 2^-24 and 57344
// * 2^-40 are below that too; the latter factor needs two multiplications. The same holds for smaller elements with e4m3's
// factors.
template <Element E>
struct CodeFactor {
  static constexpr int32_t kLeast = E == Element::kE5M2 ? -40 : -24;
  uint32_t first, second;
  CodeFactor() = default;
  __device__ explicit CodeFactor(int32_t d) {
    d = max(d, kLeast);
    first = half_power(E == Element::kE5M2 ? d / 2 : d), second = half_power(d - d / 2);
  }
  // Combine the factors of two neighbours.
  __device__ CodeFactor(const CodeFactor& lo, const CodeFactor& hi)
      : first(lo.first | hi.first << 16), second(lo.second | hi.second << 16) {}
};

// Factors of two-level codes: scale / 8. Products have at most 6 significant bits (kE4M3Exact: 4) and are at
// least 2^-13: exact in fp16.
template <>
struct CodeFactor<Element::kE2M1> {
  uint32_t first;
  CodeFactor() = default;
  __device__ explicit CodeFactor(int32_t scale) {
    const __half s = __low2half(ptx::cvt_f16x2_e4m3x2(static_cast<uint32_t>(scale))) * __float2half(0.125f);
    first = __half_as_ushort(s);
  }
  __device__ CodeFactor(const CodeFactor& lo, const CodeFactor& hi) : first(lo.first | hi.first << 16) {}
};

template <Element E>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t codes, const CodeFactor<E>& factor) {
  if constexpr (E == Element::kE5M2) {
    const __half2 once = __hmul2(ptx::cvt_f16x2_e5m2x2(codes), *reinterpret_cast<const __half2*>(&factor.first));
    return ptx::cvt_e5m2x2_f16x2(__hmul2(once, *reinterpret_cast<const __half2*>(&factor.second)));
  } else {
    const __half2 v = ptx::cvt_f16x2_e4m3x2(codes);
    return ptx::cvt_e4m3x2_f16x2(__hmul2(v, *reinterpret_cast<const __half2*>(&factor.first)));
  }
}

}  // namespace fsdp_quant
