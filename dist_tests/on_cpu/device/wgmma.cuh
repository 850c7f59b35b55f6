// SPDX-License-Identifier: Apache-2.0
// In place of csrc's: products read shared memory when they are issued, or when they are waited for.
#pragma once

#include "device/ptx.cuh"

namespace fsdp_quant::ptx {

inline uint64_t wgmma_descriptor(uint32_t address) { return address >> 4; }
inline void wgmma_fence() {}
inline void wgmma_commit() {
  auto& group = current->products;
  const bool at_once = on_cpu::dice() % 2;
  if (at_once)
    for (auto& product : group) product();
  else
    for (auto& product : group) current->in_flight.push_back(std::move(product));
  group.clear();
}
template <int kPending>
void wgmma_wait() {
  static_assert(kPending == 0);
  for (auto& product : current->in_flight) product();
  current->in_flight.clear();
}
template <int kCount>
void pin(float (&)[kCount]) {}

inline float fp8(uint8_t code, bool is_e5m2) {  // of numbers
  const int bits = is_e5m2 ? 2 : 3, bias = is_e5m2 ? 15 : 7, exponent = (code & 0x7F) >> bits, part = code & ((1 << bits) - 1);
  const float v = exponent ? std::ldexp(1.0f + std::ldexp(float(part), -bits), exponent - bias)
                           : std::ldexp(float(part), 1 - bias - bits);
  return code & 0x80 ? -v : v;
}

// d[64 x 128] (+)= a b^T of 32 bytes of K.
template <class Decode, class DecodeB>
void multiply_tiles(float (&d)[64], uint64_t a, uint64_t b, bool add, int of_k, Decode of_a, DecodeB of_b) {
  float* const out = d;
  const auto product = [=, block = current->block] {
    const int lane = current->thread % 32, warp = current->thread / 32 % 4;
    const auto at = [&](uint64_t from, int row, int byte) {
      return block->memory.data() + swizzled(static_cast<uint32_t>(from << 4) + 128 * row + byte);
    };
    const int size = 32 / of_k;
    for (int i = 0; i < 64; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), col = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      float sum = 0;
      for (int k = 0; k < of_k; ++k) sum += of_a(at(a, row, k * size)) * of_b(at(b, col, k * size));
      out[i] = add ? out[i] + sum : sum;
    }
  };
  current->products.push_back(product);
}

template <bool kE5M2A, bool kE5M2B>
void wgmma_m64n128k32(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  static const auto table = [] {
    std::vector<float> made(512);
    for (int i = 0; i < 512; ++i) made[i] = fp8(i, i >= 256);
    return made;
  }();
  multiply_tiles(d, a, b, add, 32, [](const uint8_t* p) { return table[*p + 256 * kE5M2A]; },
                 [](const uint8_t* p) { return table[*p + 256 * kE5M2B]; });
}
inline void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  const auto value = [](const uint8_t* p) { return float_of(*reinterpret_cast<const __nv_bfloat16*>(p)); };
  multiply_tiles(d, a, b, add, 16, value, value);
}

}  // namespace fsdp_quant::ptx
