// SPDX-License-Identifier: Apache-2.0
// Quantize to two-level 4-bit formats in runs of 16: blocks of (1, 16) in either or both directions, and (16, 16) blocks
// that serve both. The general kernel computes the same; here a thread holds whole runs, so that a block's amax, its
// rotation and its 16 random bytes need no other thread, and one short loop encodes every run of both directions.
//
// Block: 256 threads, a tile of 128 x 128 bf16 values in shared memory. Warp w holds rows 16 w to 16 w + 15, which no
// other warp reads. Rowwise lane l takes the runs of 16 columns from 16 (l % 8) of the four rows from 4 (l / 8);
// columnwise it takes the runs of 16 rows of the four columns from 4 l. A direction that is an operand (ScaleLayout::kOperand) has
// e4m3 codes: bytes permuted out of a table of the 8 magnitudes under each scale.
//
// Of the copy rate, 8192 x 8192: rows and square blocks .71 and .74, where the general kernel was
// at .68 and .48 (H200). Operands: one permute per four codes, signs by a permute that repeats sign
// bits; rows with stochastic rounding and rotated columns, both directions, .59 where compact codes
// are at .49, square blocks .89 (H100). Long straight code starves on instruction fetch, hence one
// short loop.
#pragma once

#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

constexpr int kFp4Block = 16;
constexpr int kPitch = kTile * 2 + 16;  // bytes of a row of values: rows start four banks pointer_table
constexpr int kCodePitch = 72;          // bytes of a row of codes, which a warp transposes; of an operand twice as many

// What the directions of a launch are: all with the nearest scales; or some with exact ones; or also some operand.
enum class Fp4Mode { kNearest, kExact, kOperands };

template <Fp4Mode R>
__device__ __forceinline__ bool is_exact(const EncodingSpec& s) {
  return R != Fp4Mode::kNearest && s.exact();
}

template <Fp4Mode R>
struct Fp4Smem {
  static constexpr bool kOperands = R == Fp4Mode::kOperands;

  // Square blocks: a warp's part holds its codes once its values are encoded.
  alignas(16) uint8_t values[kTile * kPitch];
  uint4 codes[kTile * (kOperands ? 8 : 4)];  // see flush_transposed
  uint8_t scales[2][kTile][8];
  float factors[2][128];
  float target[2];                 // two_level_target
  uint2 magnitudes[kOperands ? 128 : 1];  // of every scale, the e4m3 codes of 0, .5, 1, 1.5, 2, 3, 4, 6 times it, over 8
};
constexpr int kFp4BlocksPerSm = 4;  // share a multiprocessor
static_assert(kFp4BlocksPerSm * (sizeof(Fp4Smem<Fp4Mode::kOperands>) + 1024) <= 228 * 1024, "too large for as many blocks");

// 16 values along the contraction, two a word.
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

// Random Hadamard transform of one run: see `rotate`.
template <class Values>
__device__ __forceinline__ Block16 rotated(const Values& value) {
  float y[kFp4Block];
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
  Block16 block;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(y[2 * k], 0.25f), __fmul_rn(y[2 * k + 1], 0.25f));
    block.w[k] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return block;
}

// Random bytes of runs that this thread's lines hold: 16 of line `line`, from contraction element `along`.
struct RandomBlocks {
  uint32_t k0, k1, step, stream, line, block;
  int offset;  // of the runs in those of the random stream; not 0 only where rows are counted from an odd one

  // Of lines k and k + 1.
  __device__ __forceinline__ void draw(uint4 (&random)[2], int k) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) random[n] = make_uint4(block, line + k + n, step, stream);
    philox4x32(random, k0, k1);
    if (offset == 0) return;
    uint4 next[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) next[n] = make_uint4(block + 1, line + k + n, step, stream);
    philox4x32(next, k0, k1);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t w[8] = {random[n].x, random[n].y, random[n].z, random[n].w, next[n].x, next[n].y, next[n].z, next[n].w};
#pragma unroll
      for (int step = 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i + step < 8; ++i) w[i] = offset & 4 * step ? w[i + step] : w[i];
      }
      const int bits = 8 * (offset & 3);
      random[n] = make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                             __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
    }
  }
};

__device__ __forceinline__ RandomBlocks random_blocks(const int64_t* memory, bool columnwise, int32_t row, int32_t col) {
  const RandomKey key(memory);
  const int64_t global = key.row0 + row, global_col = key.col0 + col, along = columnwise ? global : global_col;
  return {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32),
          static_cast<uint32_t>(key.step), stream_of(key, columnwise), static_cast<uint32_t>(columnwise ? global_col : global),
          static_cast<uint32_t>(along >> 4), static_cast<int>(along & 15)};
}

// 8 codes of a run's half: nibbles of a word. Regular: no NaN and, rounded stochastically, not above 6 + 1/256.
template <bool Stochastic, bool Regular>
__device__ __forceinline__ uint32_t half_codes(
    const uint32_t (&w)[8], int half, float enc, uint32_t random0, uint32_t random1) {
  if constexpr (ptx::kHardwareCasts && !Stochastic) {
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(BF16::value(w, 8 * half + e), enc);
    return ptx::cvt_e2m1x8(v);
  }
  const uint32_t threshold = 0xFB008001u + ptx::thread_z();  // 0, but in a register: a permutation takes one immediate
  const uint32_t codes = e2m1_nibbles<Stochastic, !Regular>(
      [&](int e) { return __fmul_rn(fabsf(BF16::value(w, 8 * half + e)), enc); },
      [&](int e) { return __byte_perm(e < 4 ? random0 : random1, threshold, 0x7054 | (e & 3) << 8); });
  const uint32_t signs = Regular || enc == enc ? 0x88888888u : 0;  // the +6 of a NaN block has none
  const uint32_t* s = w + 4 * half;
  return codes | (bytes_of(s[0], s[1], s[2], s[3], 1) >> 4 & signs & 0x0F0F0F0Fu) |
         (bytes_of(s[0], s[1], s[2], s[3], 3) & signs & 0xF0F0F0F0u);
}

template <bool Stochastic, bool Regular>
__device__ __forceinline__ uint2 block_codes(const Block16& r, float enc, const uint4& random) {
  return {half_codes<Stochastic, Regular>(r.w, 0, enc, random.x, random.y),
          half_codes<Stochastic, Regular>(r.w, 1, enc, random.z, random.w)};
}

__device__ __forceinline__ uint2 magnitudes_of(uint32_t scale) {
  const float s = scale == 0x7F ? quiet_nan() : e4m3_value(scale) * 0.125f;
  return {ptx::cvt_e4m3x2(0.5f * s, 0.0f * s) | ptx::cvt_e4m3x2(1.5f * s, s) << 16,
          ptx::cvt_e4m3x2(3.0f * s, 2.0f * s) | ptx::cvt_e4m3x2(6.0f * s, 4.0f * s) << 16};
}

// A byte for each nibble of `codes`. A selector whose fourth bit is set repeats the sign of the byte that it selects.
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

// The bytes of 16 in whatever order a row of 16 may be stored in.
__device__ __forceinline__ void store_block(uint8_t* at, const uint4& v, bool vector, int32_t bytes) {
  if (vector) {
    *reinterpret_cast<uint4*>(at) = v;
  } else {
    store_bytes(at, v.x, v.y, bytes);
    store_bytes(at + 8, v.z, v.w, bytes - 8);
  }
}

// Codes of the first `left` elements of a run.
__device__ __forceinline__ uint2 mask_of(int32_t left) {
  const uint64_t mask = left >= kFp4Block ? ~0ull : left > 0 ? (1ull << (4 * left)) - 1 : 0;
  return {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
}

// Codes of a run: those in the mask, the others zero.
__device__ __forceinline__ uint2 codes_of(
    const Block16& r, float amax, float enc, bool stochastic, const uint4& random, uint2 mask) {
  // Beyond 6 where the scale was rounded down, or the tensor's amax was another's.
  const float largest = __fmul_rn(amax, enc);
  uint2 codes;
  if (stochastic) {
    codes = largest <= 6.0f + 1.0f / 256 ? block_codes<true, true>(r, enc, random) : block_codes<true, false>(r, enc, random);
  } else {
    codes = largest == largest ? block_codes<false, true>(r, enc, random) : block_codes<false, false>(r, enc, random);
  }
  return {codes.x & mask.x, codes.y & mask.y};
}

// Rows of this warp, from shared memory. Square: blocks are (16, 16), and the codes go to shared memory too, for `col`; a direction
// without data is not stored.
template <bool Square, Fp4Mode R>
__device__ __forceinline__ void encode_rows(
    const EncodingSpec& s, const EncodingBuffers& b, const EncodingSpec& col_side, const Tile& tile, Fp4Smem<R>& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane & 7, local = warp * kFp4Block + (lane >> 3) * 4;
  const int32_t row = tile.row0 + local, col = tile.col0 + group * kFp4Block;
  const bool operand = R == Fp4Mode::kOperands && s.operand();
  const int32_t row_bytes = operand ? b.length : (b.length + 1) >> 1;
  const bool vector = b.vector_store && (row_bytes & 7) == 0 && row + 4 <= b.lines && col + kFp4Block <= b.length;
  const uint2 mask = mask_of(b.length - col);
  uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + (operand ? col : col >> 1);
  const uint8_t* values = smem.values + local * kPitch + group * kFp4Block * 2;
  auto load = [&](int k) {
    Block16 block;
    *reinterpret_cast<uint4*>(block.w) = *reinterpret_cast<const uint4*>(values + k * kPitch);
    *reinterpret_cast<uint4*>(block.w + 4) = *reinterpret_cast<const uint4*>(values + k * kPitch + 16);
    return block;
  };
  auto put = [&](int k, uint2 codes, uint32_t scale) {
    if (Square && b.data == nullptr) return;
    if (operand) {
      if (row + k < b.lines)
        store_block(address + k * row_bytes, bytes_of_block(codes, smem.magnitudes[scale]), vector, row_bytes - col);
    } else if (vector) {
      *reinterpret_cast<uint2*>(address + k * row_bytes) = codes;
    } else if (row + k < b.lines) {
      store_bytes(address + k * row_bytes, codes.x, codes.y, min(row_bytes - (col >> 1), 8));
    }
  };

  if constexpr (Square) {
    Block16 block[4];
    uint32_t m = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      block[k] = load(k);
      m = max(m, bits_of(block[k].amax()));
    }
    m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 8));
    m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 16));
    const float amax = __uint_as_float(m);
    const BlockScale scale = two_level_scale(amax, smem.target[0], false, is_exact<R>(s), smem.factors[0]);
    uint2 codes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      codes[k] = codes_of(block[k], amax, scale.enc, false, uint4{}, mask);
      if (row + k >= b.lines) codes[k] = {};
      put(k, codes[k], scale.stored);
      smem.scales[0][local + k][group] = smem.scales[1][group * kFp4Block + (lane >> 3) * 4 + k][warp] =
          static_cast<uint8_t>(scale.stored);
    }
    __syncwarp();  // the warp's values are all in registers
    uint8_t* own = smem.values + warp * kFp4Block * kPitch;
    if (R == Fp4Mode::kOperands && col_side.operand()) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        *reinterpret_cast<uint4*>(own + ((lane >> 3) * 4 + k) * 2 * kCodePitch + group * 16) =
            bytes_of_block(codes[k], smem.magnitudes[scale.stored]);
      __syncwarp();
      const Position at;
      uint2 v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        v[k] = *reinterpret_cast<const uint2*>(own + (at.half * 8 + k) * 2 * kCodePitch + at.chunk * 8);
      return stage_transposed<false>(v, smem.codes, at);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      *reinterpret_cast<uint2*>(own + ((lane >> 3) * 4 + k) * kCodePitch + group * 8) = codes[k];
    __syncwarp();
    const Position at;
    uint2 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      v[k].x = *reinterpret_cast<const uint32_t*>(own + (at.half * 8 + k) * kCodePitch + at.chunk * 4);
    stage_transposed<true>(v, smem.codes, at);
  } else {
    RandomBlocks source = {};
    if (s.stochastic) source = random_blocks(b.key, false, row - tile.start, col);
#pragma unroll 1
    for (int k = 0; k < 4; k += 2) {
      uint4 random[2] = {};
      if (s.stochastic) source.draw(random, k);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Block16 block = load(k + n);
        if (s.rotated) block = rotated([&](int e) { return block[e]; });
        const float amax = block.amax();
        const BlockScale scale = two_level_scale(amax, smem.target[0], s.stochastic, is_exact<R>(s), smem.factors[0]);
        smem.scales[0][local + k + n][group] = static_cast<uint8_t>(scale.stored);
        put(k + n, codes_of(block, amax, scale.enc, s.stochastic, random[n], mask), scale.stored);
      }
    }
  }
}

// Fp4Mode down the columns of this warp's rows, from shared memory.
template <Fp4Mode R>
__device__ __forceinline__ void encode_columns(
    const EncodingSpec& s, const EncodingBuffers& b, const Tile& tile, int32_t cols, Fp4Smem<R>& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int32_t row = tile.row0 + warp * kFp4Block, col = tile.col0 + lane * 4;
  RandomBlocks source = {};
  if (s.stochastic) source = random_blocks(b.key, true, row - tile.start, col);
  const uint8_t* values = smem.values + warp * kFp4Block * kPitch + lane * 8;
  const int32_t row_bytes = (cols + 1) >> 1;
  const uint2 mask = mask_of(b.length - row);
#pragma unroll 1
  for (int j = 0; j < 4; j += 2) {
    uint32_t w[kFp4Block];
#pragma unroll
    for (int i = 0; i < kFp4Block; ++i) w[i] = *reinterpret_cast<const uint32_t*>(values + i * kPitch + j * 2);
    uint4 random[2] = {};
    if (s.stochastic) source.draw(random, j);
    uint2 codes[2];
    uint32_t stored[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Block16 block;
      if (s.rotated) {
        block = rotated([&](int e) { return __uint_as_float(n ? w[e] & 0xFFFF0000u : w[e] << 16); });
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) block.w[k] = __byte_perm(w[2 * k], w[2 * k + 1], n ? 0x7632 : 0x5410);
      }
      const float amax = block.amax();
      const BlockScale scale = two_level_scale(amax, smem.target[1], s.stochastic, is_exact<R>(s), smem.factors[1]);
      stored[n] = scale.stored;
      smem.scales[1][lane * 4 + j + n][warp] = static_cast<uint8_t>(scale.stored);
      codes[n] = codes_of(block, amax, scale.enc, s.stochastic, random[n], mask);
    }
    const int group = lane >> 1;
    if (R == Fp4Mode::kOperands && s.operand()) {  // a column is 16 chunks of 8, permuted by `group`: see flush_transposed
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 v = bytes_of_block(codes[n], smem.magnitudes[stored[n]]);
        smem.codes[(lane * 4 + j + n) * 8 + (warp ^ (group >> 1))] = group & 1 ? make_uint4(v.z, v.w, v.x, v.y) : v;
      }
    } else if (s.transposed) {  // a column is 16 words of which `group`, of 8 columns, permutes the order: see flush_transposed
#pragma unroll
      for (int n = 0; n < 2; ++n)
        reinterpret_cast<uint2*>(smem.codes)[(lane * 4 + j + n) * 8 + (warp ^ (group >> 1))] =
            group & 1 ? make_uint2(codes[n].y, codes[n].x) : codes[n];
    } else if (col + j < cols) {  // the two columns share their bytes
      uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + ((col + j) >> 1);
#pragma unroll
      for (int i = 0; i < kFp4Block; ++i, address += row_bytes) {
        auto nibble = [&](int n) { return (i < 8 ? codes[n].x : codes[n].y) >> (4 * (i & 7)) & 0xFu; };
        if (row + i < b.length) *address = static_cast<uint8_t>(nibble(0) | nibble(1) << 4);
      }
    }
  }
}

// The warp's 16 rows of the tile to shared memory, asynchronously; elements beyond the tensor, or row `rows`, are zero.
template <bool Tokens, class Smem>
__device__ __forceinline__ void load_values(
    const TensorArgs& t, Input input, const Tile& tile, int32_t rows, Smem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int32_t row = tile.row0 + warp * kFp4Block, col = tile.col0;
  if (input == Input::kBF16 && t.vector_load && row + kFp4Block <= rows && col + kTile <= t.cols) {
    const int half = lane >> 4, chunk = lane & 15;
    const int64_t first = static_cast<int64_t>(row + half) * t.row_stride + col + chunk * 8;
    const char* from = static_cast<const char*>(t.x) + first * 2;
    uint8_t* to = smem.values + (warp * kFp4Block + half) * kPitch + chunk * 16;
#pragma unroll
    for (int i = 0; i < kFp4Block; i += 2) ptx::copy_async_16(to + i * kPitch, from + i * t.row_stride * 2);
  } else {
    RegisterTile<BF16> p;
    const Position at;
    if constexpr (Tokens) {
      load_rows<LoadBF16, true>(p, t, tile.row0 + at.row(), col + at.col(), rows);
    } else {
      load_register_tile<LoadBF16>(p, t, input, tile.row0 + at.row(), col + at.col());
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint8_t* to = smem.values + (at.row() + i) * kPitch + at.col() * 2;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(p.w[i]);
    }
  }
}

// The scale of an operand: one thread of the first tile that it serves.
__device__ __forceinline__ void store_operand_scale(const EncodingSpec& s, const EncodingBuffers& b, const Tile& tile, int32_t row0) {
  if (s.present() && s.operand() && b.scale != nullptr && tile.row0 == row0 && tile.col0 == 0 && threadIdx.x == 0)
    *static_cast<float*>(b.scale) = __fmul_rn(8.0f, tensor_decode_scale(__ldcg(b.tensor_amax), s.tensor_max));
}

// Square: one (16, 16) block serves both directions. Tokens: rows of tiles, and their groups, are as `sources` of the launch says.
template <bool Square, bool Tokens, Fp4Mode R>
__global__ void __launch_bounds__(kThreads, kFp4BlocksPerSm) quantize_fp4_kernel(const __grid_constant__ Launch<1> launch) {
  extern __shared__ uint4 shared[];
  constexpr bool kOperands = R == Fp4Mode::kOperands;
  auto& smem = *reinterpret_cast<Fp4Smem<R>*>(shared);
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const TensorArgs& t = launch.tensors[0];
  const int32_t n = launch.reversed ? launch.tiles - 1 - static_cast<int32_t>(blockIdx.x) : blockIdx.x;
  Tile tile = tile_of(t, n), row_tile = tile;
  using Buffers = std::conditional_t<Tokens, EncodingBuffers, const EncodingBuffers&>;
  Buffers row_buffers = t.buffers[0], col_buffers = t.buffers[1];
  if constexpr (Tokens) {
    const int4 source = reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows, group, its first
    if (source.y == 0) return;
    row_tile.row0 = source.x, tile.start = source.w, row_tile.start = source.x - (tile.row0 - source.w);
    row_buffers.lines = source.x + source.y;
    row_buffers.compact.lines = (row_buffers.lines + (Square ? kFp4Block - 1 : 0)) / (Square ? kFp4Block : 1);
    select_group<false>(row_buffers, row, source.z), select_group<true>(col_buffers, col, source.z);
  }
  load_values<Tokens>(t, launch.input, row_tile, Tokens ? row_buffers.lines : t.rows, smem);
  fill_factors(launch.spec, row_buffers, col_buffers, smem.factors);
  if (threadIdx.x < 2 && launch.spec[threadIdx.x].present()) {
    const float* const amax = threadIdx.x ? col_buffers.tensor_amax : row_buffers.tensor_amax;
    smem.target[threadIdx.x] = two_level_target(__ldcg(amax), launch.spec[threadIdx.x]);
  }
  if (kOperands && threadIdx.x < 128) smem.magnitudes[threadIdx.x] = magnitudes_of(threadIdx.x);
  __syncthreads();
  ptx::copy_async_wait();
  __syncwarp();
  if (Square || row.present()) encode_rows<Square>(row, row_buffers, col, row_tile, smem);
  if (!Square && col.present()) encode_columns(col, col_buffers, tile, t.cols, smem);
  __syncthreads();
  if constexpr (kOperands) {
    store_operand_scale(row, row_buffers, row_tile, row_tile.start), store_operand_scale(col, col_buffers, tile, tile.start);
  }
  using P = std::conditional_t<Square, Path<Work::kSharedCodes, 4>, Path<Work::kPlain, 4, kFp4Block>>;
  if ((Square || row.present()) && !(kOperands && row.operand())) flush_scales<false, P>(row, row_buffers, row_tile, smem.scales[0]);
  if ((Square || col.present()) && !(kOperands && col.operand())) flush_scales<true, P>(col, col_buffers, tile, smem.scales[1]);
  const EncodingBuffers& turned = t.buffers[1];
  if (kOperands && col.present() && col.operand()) {
    if (turned.data != nullptr)
      flush_transposed<false>(turned.data, turned.vector_store, tile.row0, tile.col0, turned.length, t.cols, smem.codes);
  } else if (Square || (col.present() && col.transposed)) {
    flush_transposed<true>(turned.data, turned.vector_store, tile.row0, tile.col0, turned.length, t.cols, smem.codes);
  }
}

}  // namespace fsdp_quant
