// SPDX-License-Identifier: Apache-2.0
// Eight values of a row, 16 (32) bytes in memory and fp32 in registers, and their maxima.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/amax.cuh"
#include "device/ptx.cuh"

namespace fsdp_quant {

template <class T>
struct Pair;  // of 16-bit values
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  __device__ static float2 widen(type v) {  // one instruction each; __bfloat1622float2 needs two for the upper
    const uint32_t w = *reinterpret_cast<const uint32_t*>(&v);
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
  }
  __device__ static type round(float lo, float hi) { return __floats2bfloat162_rn(lo, hi); }
};
template <>
struct Pair<__half> {
  using type = __half2;
  __device__ static float2 widen(type v) { return __half22float2(v); }
  __device__ static type round(float lo, float hi) { return __floats2half2_rn(lo, hi); }
};

// Values of T in memory format.
template <class T>
struct Eight {
  static constexpr bool kWide = std::is_same_v<T, float>;
  static constexpr int kWords = kWide ? 8 : 4;
  uint32_t w[kWords];

  __device__ __forceinline__ static Eight load(const T* from) {
    Eight e;
#pragma unroll
    for (int k = 0; k < kWords; k += 4) {
      const uint4 v = ptx::ld_streaming(reinterpret_cast<const uint32_t*>(from) + k);
      e.w[k] = v.x, e.w[k + 1] = v.y, e.w[k + 2] = v.z, e.w[k + 3] = v.w;
    }
    return e;
  }
  __device__ __forceinline__ static Eight cached(const T* from) {
    Eight e;
#pragma unroll
    for (int k = 0; k < kWords; k += 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(from) + k));
      e.w[k] = v.x, e.w[k + 1] = v.y, e.w[k + 2] = v.z, e.w[k + 3] = v.w;
    }
    return e;
  }
  // Set 16 bytes of them.
  __device__ __forceinline__ void set(int part, const uint4& v) {
    w[4 * part] = v.x, w[4 * part + 1] = v.y, w[4 * part + 2] = v.z, w[4 * part + 3] = v.w;
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int k = 0; k < kWords; k += 4)
      *reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(to) + k) = make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]);
  }
  __device__ __forceinline__ void widen(float (&v)[8]) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if constexpr (kWide) {
        v[k] = __uint_as_float(w[k]);
      } else {
        const float2 two = Pair<T>::widen(*reinterpret_cast<const typename Pair<T>::type*>(&w[k]));
        v[2 * k] = two.x, v[2 * k + 1] = two.y;
      }
    }
  }
  // Round to nearest even.
  __device__ __forceinline__ static Eight round(const float (&v)[8]) {
    Eight e;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if constexpr (kWide) {
        e.w[k] = __float_as_uint(v[k]);
      } else {
        const auto two = Pair<T>::round(v[2 * k], v[2 * k + 1]);
        e.w[k] = *reinterpret_cast<const uint32_t*>(&two);
      }
    }
    return e;
  }
};

// Maxima over eights of values, per word.
template <class T>
struct Magnitudes : MagnitudeWord<Eight<T>::kWide> {
  static constexpr bool kWide = Eight<T>::kWide;
  static constexpr int kWords = Eight<T>::kWords;
  uint32_t w[kWords] = {};

  using MagnitudeWord<kWide>::larger, MagnitudeWord<kWide>::magnitude;

  // Magnitude of one value as canonical fp32 bits.
  __device__ __forceinline__ static uint32_t widened(uint32_t one) {
    uint32_t bits = one;
    if constexpr (!kWide)
      bits = __float_as_uint(Pair<T>::widen(*reinterpret_cast<const typename Pair<T>::type*>(&one)).x);
    return canonical(bits);
  }
  // Maximum of the magnitudes in a word.
  __device__ __forceinline__ static uint32_t widened_word(uint32_t word) {
    return widened(kWide ? word : max(word & 0xFFFFu, word >> 16));
  }
  // Maximum of these eight, not widened.
  __device__ __forceinline__ static uint32_t largest(const Eight<T>& e) {
    uint32_t m = magnitude(e.w[0]);
#pragma unroll
    for (int k = 1; k < kWords; ++k) m = larger(m, magnitude(e.w[k]));
    return kWide ? m : max(m & 0xFFFFu, m >> 16);
  }

  __device__ __forceinline__ void take(const Eight<T>& e) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) w[k] = larger(w[k], magnitude(e.w[k]));
  }
  // Maximum of all values seen.
  __device__ __forceinline__ uint32_t largest() const {
    Eight<T> all;
#pragma unroll
    for (int k = 0; k < kWords; ++k) all.w[k] = w[k];
    return widened(largest(all));
  }
  // Raise kWide ? 1 : 2 floats in memory (initially 0) to the maxima in a word.
  __device__ __forceinline__ static void raise(uint32_t word, float* to) {
    auto* const bits = reinterpret_cast<uint32_t*>(to);
    atomicMax(bits, widened(kWide ? word : word & 0xFFFFu));
    if constexpr (!kWide) atomicMax(bits + 1, widened(word >> 16));
  }
};

}  // namespace fsdp_quant
