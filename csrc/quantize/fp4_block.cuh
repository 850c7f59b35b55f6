// SPDX-License-Identifier: Apache-2.0
// A whole block of 16 bf16 values in the registers of one thread: rotation, random bytes, 4-bit codes, operands.
#pragma once

#include "device/philox.cuh"
#include "device/register_tile.cuh"

namespace fsdp_quant {

constexpr int kFp4Block = 16;

// 16 values along the contraction, two per word.
struct Block16 {
  uint32_t w[8];

  __device__ float operator[](int e) const { return BF16::value(w, e); }
  __device__ float amax() const {
    auto pair = [&](int k) { return __habs2(*reinterpret_cast<const __nv_bfloat162*>(w + k)); };
    __nv_bfloat162 m = pair(0);
#pragma unroll
    for (int k = 1; k < 8; ++k) m = __hmax2_nan(m, pair(k));
    return __bfloat162float(__hmax_nan(m.x, m.y));
  }
};

// Random Hadamard transform of one block, times 4: see `rotate`.
template <class Values>
__device__ __forceinline__ void butterflies(const Values& value, float (&y)[kFp4Block]) {
#pragma unroll
  for (int e = 0; e < kFp4Block; ++e) y[e] = kRotationSigns >> e & 1 ? -value(e) : value(e);
#pragma unroll
  for (int stride = 1; stride < kFp4Block; stride *= 2) {
#pragma unroll
    for (int e = 0; e < kFp4Block; ++e) {
      if (e & stride) continue;
      const float a = y[e], b = y[e + stride];
      y[e] = __fadd_rn(a, b), y[e + stride] = __fsub_rn(a, b);
    }
  }
}

// The transform, rounded.
template <class Values>
__device__ __forceinline__ Block16 rotated(const Values& value) {
  float y[kFp4Block];
  butterflies(value, y);
  Block16 block;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(y[2 * k], 0.25f), __fmul_rn(y[2 * k + 1], 0.25f));
    block.w[k] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return block;
}

// Random bytes of the blocks of this thread's lines.
struct RandomBlocks {
  uint32_t k0, k1, step, stream, line, block;
  int offset;  // of the blocks in the random stream; nonzero only for shards that start at an unaligned row

  // Draw for block n of line k, at offset 0.
  __device__ __forceinline__ uint4 draw_one(uint32_t k, uint32_t n) const {
    uint4 random[1] = {make_uint4(block + n, line + k, step, stream)};
    philox4x32(random, k0, k1);
    return random[0];
  }
  // Draw for line k.
  __device__ __forceinline__ uint4 draw(uint32_t k) const {
    uint4 random = draw_one(k, 0);
    if (__builtin_expect(offset != 0, false)) {
      const uint4 next = draw_one(k, 1);
      uint32_t w[8] = {random.x, random.y, random.z, random.w, next.x, next.y, next.z, next.w};
#pragma unroll
      for (int step = 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i + step < 8; ++i) w[i] = offset & 4 * step ? w[i + step] : w[i];
      }
      const int bits = 8 * (offset & 3);
      random = make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                          __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
    }
    return random;
  }
};

__device__ __forceinline__ RandomBlocks random_blocks(const int64_t* memory, bool columnwise, int32_t row, int32_t col) {
  const RandomKey key(memory);
  const int64_t global = key.row0 + row, global_col = key.col0 + col, along = columnwise ? global : global_col;
  return {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32),
          static_cast<uint32_t>(key.step), stream_of(key, columnwise), static_cast<uint32_t>(columnwise ? global_col : global),
          static_cast<uint32_t>(along >> 4), static_cast<int>(along & 15)};
}

// Encode half a block as the nibbles of a word. Regular: no NaN and, with stochastic rounding, at most 6 + 1/256.
template <bool Stochastic, bool Regular>
__device__ __forceinline__ uint32_t half_codes(
    const uint32_t (&w)[8], int half, float enc, uint32_t random0, uint32_t random1) {
  if constexpr (ptx::kHardwareCasts && !Stochastic) {
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(BF16::value(w, 8 * half + e), enc);
    return ptx::cvt_e2m1x8(v);
  }
  const uint32_t threshold = 0xFB008001u + ptx::thread_z();  // adds 0 from a register: a permute takes one immediate
  const uint32_t codes = e2m1_nibbles<Stochastic, !Regular>(
      [&](int e) { return __fmul_rn(fabsf(BF16::value(w, 8 * half + e)), enc); },
      [&](int e) { return __byte_perm(e < 4 ? random0 : random1, threshold, 0x7054 | (e & 3) << 8); });
  const uint32_t signs = Regular || enc == enc ? 0x88888888u : 0;  // NaN blocks have +6
  const uint32_t* s = w + 4 * half;
  return codes | (bytes_of(s[0], s[1], s[2], s[3], 1) >> 4 & signs & 0x0F0F0F0Fu) |
         (bytes_of(s[0], s[1], s[2], s[3], 3) & signs & 0xF0F0F0F0u);
}

template <bool Stochastic, bool Regular>
__device__ __forceinline__ uint2 block_codes(const Block16& r, float enc, const uint4& random) {
  return {half_codes<Stochastic, Regular>(r.w, 0, enc, random.x, random.y),
          half_codes<Stochastic, Regular>(r.w, 1, enc, random.z, random.w)};
}

// Nearest codes of half a block with NaNs: 6 for each; if the scale is NaN, +6 for all.
__device__ __forceinline__ uint32_t with_nan(const uint32_t (&w)[8], int half, float enc, uint32_t codes) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float a = __fmul_rn(BF16::value(w, 8 * half + e), enc);
    codes |= a == a ? 0 : 7u << (4 * e);
  }
  return enc == enc ? codes : 0x77777777u;
}

__device__ __forceinline__ uint2 magnitudes_of(uint32_t scale) {
  const float s = scale == 0x7F ? quiet_nan() : e4m3_value(scale) * 0.125f;
  return {ptx::cvt_e4m3x2(0.5f * s, 0.0f * s) | ptx::cvt_e4m3x2(1.5f * s, s) << 16,
          ptx::cvt_e4m3x2(3.0f * s, 2.0f * s) | ptx::cvt_e4m3x2(6.0f * s, 4.0f * s) << 16};
}

// Look up a byte per nibble of `codes`. A selector with its fourth bit set replicates the sign of the selected byte.
__device__ __forceinline__ uint4 bytes_of_block(uint2 codes, uint2 magnitudes) {
  uint32_t w[4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t c = h ? codes.y : codes.x, low_signs = c << 4, which = c & 0x77777777u;
    w[2 * h] = __byte_perm(magnitudes.x, magnitudes.y, which) | (ptx::prmt(c, low_signs, 0x9D8C) & 0x80808080u);
    w[2 * h + 1] = __byte_perm(magnitudes.x, magnitudes.y, which >> 16) | (ptx::prmt(c, low_signs, 0xBFAE) & 0x80808080u);
  }
  return {w[0], w[1], w[2], w[3]};
}

// Store 16 bytes, aligned or not.
__device__ __forceinline__ void store_block(uint8_t* at, const uint4& v, bool vector, int32_t bytes) {
  if (vector) {
    *reinterpret_cast<uint4*>(at) = v;
  } else {
    store_bytes(at, v.x, v.y, bytes);
    store_bytes(at + 8, v.z, v.w, bytes - 8);
  }
}

// Mask of the first `left` elements of a block.
__device__ __forceinline__ uint2 mask_of(int32_t left) {
  const uint64_t mask = left >= kFp4Block ? ~0ull : left > 0 ? (1ull << (4 * left)) - 1 : 0;
  return {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
}

// Encode a block; elements outside the mask are zero.
__device__ __forceinline__ uint2 codes_of(
    const Block16& r, float amax, float enc, bool stochastic, const uint4& random, uint2 mask) {
  // Above 6 if the scale was rounded down, or the tensor amax is from another tensor.
  const float largest = __fmul_rn(amax, enc);
  uint2 codes;
  if (stochastic) {
    codes = __builtin_expect(largest <= 6.0f + 1.0f / 256, true) ? block_codes<true, true>(r, enc, random)
                                                                 : block_codes<true, false>(r, enc, random);
  } else {
    codes = block_codes<false, true>(r, enc, random);
    if (__builtin_expect(largest != largest, false))
      codes = {with_nan(r.w, 0, enc, codes.x), with_nan(r.w, 1, enc, codes.y)};
  }
  return {codes.x & mask.x, codes.y & mask.y};
}

}  // namespace fsdp_quant
