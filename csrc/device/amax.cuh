// SPDX-License-Identifier: Apache-2.0
// Magnitudes compared as integer bits: positive floats order like their bits, and NaN is largest.
#pragma once

#include <cstdint>

namespace fsdp_quant {

// A word with one fp32 value or two 16-bit values.
template <bool Wide>
struct MagnitudeWord {
  __device__ __forceinline__ static uint32_t magnitude(uint32_t word) { return word & (Wide ? 0x7FFFFFFFu : 0x7FFF7FFFu); }
  __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (Wide) return max(a, b);
    return __vmaxu2(a, b);
  }
};

// fp32 bits with one canonical NaN, as stored in amax buffers.
__device__ __forceinline__ uint32_t canonical(uint32_t bits) { return bits > 0x7F800000u ? 0x7FC00000u : bits; }

// Raise *amax (initially 0) to v.
__device__ __forceinline__ void atomic_max(float* amax, float v) {
  atomicMax(reinterpret_cast<uint32_t*>(amax), canonical(__float_as_uint(v)));
}

// Reduce over the block and call take(bits) in the first thread. `smem`: one free word per warp.
template <class Take>
__device__ __forceinline__ void block_max(uint32_t bits, uint32_t* smem, Take take) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  const uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x;
  if ((thread & 31) == 0) smem[thread >> 5] = bits;
  __syncthreads();
  if (thread >= 32) return;
  bits = __reduce_max_sync(0xFFFFFFFFu, thread < (blockDim.x * blockDim.y + 31) / 32 ? smem[thread] : 0u);
  if (thread == 0) take(bits);
}

// Raise *amax (initially 0) to the block's maximum; most blocks need no atomic. bits: canonical. All threads call it.
__device__ __forceinline__ void raise_amax(float* amax, uint32_t bits, uint32_t* smem) {
  block_max(bits, smem, [&](uint32_t most) {
    auto* const word = reinterpret_cast<uint32_t*>(amax);
    if (most > *reinterpret_cast<volatile uint32_t*>(word)) atomicMax(word, most);
  });
}

}  // namespace fsdp_quant
