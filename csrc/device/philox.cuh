// SPDX-License-Identifier: Apache-2.0
// Random bits keyed by the global element index; fsdp_quant/ops/rng.py defines them.
#pragma once

#include <cstdint>

namespace fsdp_quant {

// A random key and the global position of the tensor's first element; col0 is a multiple of 16.
struct RandomKey {
  int64_t seed, step, tensor_id, micro_batch, row0, col0;

  // memory: int64 [5]; the last is row0 + (col0 << 40).
  __device__ __forceinline__ explicit RandomKey(const int64_t* memory)
      : seed(memory[0]), step(memory[1]), tensor_id(memory[2]), micro_batch(memory[3]),
        row0(memory[4] & ((int64_t{1} << 40) - 1)), col0(memory[4] >> 40) {}
};

// Hash of (tensor id, direction, micro-batch), 32 bits.
__device__ __forceinline__ uint32_t stream_of(const RandomKey& key, bool columnwise) {
  uint32_t h = static_cast<uint32_t>(key.tensor_id) ^
               (static_cast<uint32_t>(key.micro_batch) * 0x9E3779B1u + (columnwise ? 0x85EBCA77u : 0u));
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// Ten rounds of Philox4x32 on N counters under one key. Source: Salmon et al., SC 2011.
template <int N>
__device__ __forceinline__ void philox4x32(uint4 (&c)[N], uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[n].x;
      const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[n].z;
      c[n] = make_uint4(static_cast<uint32_t>(p1 >> 32) ^ c[n].y ^ k0, static_cast<uint32_t>(p1),
                        static_cast<uint32_t>(p0 >> 32) ^ c[n].w ^ k1, static_cast<uint32_t>(p0));
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace fsdp_quant
