// Eight values of a row: 16 (or 32) bytes in memory, fp32 in registers; and the largest magnitude of what was written.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"

namespace fsdp_quant {

template <class T>
struct Pair;  // of 16-bit values
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  __device__ static float2 widen(type v) { return __bfloat1622float2(v); }
  __device__ static type round(float lo, float hi) { return __floats2bfloat162_rn(lo, hi); }
};
template <>
struct Pair<__half> {
  using type = __half2;
  __device__ static float2 widen(type v) { return __half22float2(v); }
  __device__ static type round(float lo, float hi) { return __floats2half2_rn(lo, hi); }
};

// Values of T as they lie in memory.
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
  // To nearest even.
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

// Largest magnitude so far, compared as integer bits, so that a NaN is largest; two a word of 16-bit values.
template <class T>
struct Largest {
  uint32_t bits = 0;

  __device__ __forceinline__ void take(const Eight<T>& e) {
#pragma unroll
    for (int k = 0; k < Eight<T>::kWords; ++k) {
      if constexpr (Eight<T>::kWide) {
        bits = max(bits, e.w[k] & 0x7FFFFFFFu);
      } else {
        bits = __vmaxu2(bits, e.w[k] & 0x7FFF7FFFu);
      }
    }
  }
  // As the bits of an fp32 magnitude.
  __device__ __forceinline__ uint32_t widened() const {
    if constexpr (Eight<T>::kWide) {
      return bits;
    } else {
      const uint32_t one = max(bits & 0xFFFFu, bits >> 16);
      return __float_as_uint(Pair<T>::widen(*reinterpret_cast<const typename Pair<T>::type*>(&one)).x);
    }
  }
};

// The block's largest magnitude into *amax, which starts at 0. Few atomics: most blocks find that it is large enough.
// All threads of the block; `smem` has a word a warp, and is not in use.
__device__ __forceinline__ void raise_amax(float* amax, uint32_t bits, uint32_t* smem) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = bits;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  bits = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < (blockDim.x + 31) / 32 ? smem[threadIdx.x] : 0u);
  if (bits > 0x7F800000u) bits = 0x7FC00000u;
  auto* word = reinterpret_cast<uint32_t*>(amax);
  if (threadIdx.x == 0 && bits > *reinterpret_cast<volatile uint32_t*>(word)) atomicMax(word, bits);
}

}  // namespace fsdp_quant
