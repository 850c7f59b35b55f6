// SPDX-License-Identifier: Apache-2.0
// Quantize to two-level 4-bit formats: blocks of (1, 16) in either or both directions, or (16, 16) blocks that serve both.
// Same results as the general kernel; here a thread holds whole blocks of 16, so that amax, rotation and the 16 random bytes
// need no other thread, and a short loop encodes a direction.
//
// Block: 256 threads, a tile of 128 x 128 bf16 values in shared memory. Warp w owns rows 16 w to 16 w + 15. Rowwise, lane l
// processes 16 columns from 16 (l % 8) of the four rows from 4 (l / 8); columnwise, 16 rows of the four columns from 4 l.
// Operands (ScaleLayout::kOperand) are e4m3 codes, permuted from a table of the 8 magnitudes under each scale.
//
// Of the copy rate, 8192 x 8192: rows and square blocks .71 and .74, general kernel .68 and .48 (H200). Operands: one permute
// per four codes, signs by a permute that replicates sign bits; stochastic rows and rotated columns in both directions .59,
// compact codes .49, square blocks .89 (H100). Statistics of matrices in the launch that encodes them, some 500 to 1100 tiles
// ahead, so that memory is read once, took 1004 us for 884 (64 of 4096 x 2048, H200). Warps wait for instructions more than for
// anything else: loops compute a block at a time, rare cases are out of their way, and the tokens of a product (65,536 x 2048 and
// x 4096 in 64 groups) take 968 us; two blocks at a time 1044, one loop for both directions 1280. Skipped padding: 910 (H200).
#pragma once

#include "quantize/fp4_block.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

constexpr int kPitch = kTile * 2 + 16;  // bytes per row of values: rows start four banks apart
constexpr int kCodePitch = 72;          // bytes per row of codes that a warp transposes; operands: twice

// Scales of a launch: all nearest; some exact; also some operands; or also some `extended`.
enum class Fp4Mode { kNearest, kExact, kOperands, kExtended };

template <Fp4Mode R>
constexpr bool kTakesOperands = R >= Fp4Mode::kOperands;

template <Fp4Mode R>
__device__ __forceinline__ bool is_exact(const EncodingSpec& s) {
  return R != Fp4Mode::kNearest && s.exact();
}

template <Fp4Mode R>
struct Fp4Smem {
  static constexpr bool kOperands = kTakesOperands<R>;

  // Square blocks: a warp reuses its part for codes.
  alignas(16) uint8_t values[kTile * kPitch];
  uint4 codes[kTile * (kOperands ? 8 : 4)];  // see flush_transposed
  uint8_t scales[2][kTile][8];
  float factors[2][128];
  float target[2];                        // two_level_target
  float inverse[2][R == Fp4Mode::kExtended ? 128 : 1];  // by_line: OfLine, whose targets are the factors
  uint2 magnitudes[kOperands ? 128 : 1];  // per scale, the e4m3 codes of 0, .5, 1, 1.5, 2, 3, 4, 6 times the scale / 8
};
template <Fp4Mode R>
constexpr int kFp4BlocksPerSm = R == Fp4Mode::kExtended ? 3 : 4;  // four would spill
static_assert(kFp4BlocksPerSm<Fp4Mode::kOperands> * (sizeof(Fp4Smem<Fp4Mode::kOperands>) + 1024) <= 228 * 1024, "too large for as many blocks");

// The scale of the blocks of which this thread holds `block`, and the lanes that differ in these bits others. d: direction;
// line: in the tile.
template <Fp4Mode R, int Blocks>
__device__ __forceinline__ BlockScale scale_of(const Block16 (&block)[Blocks], float amax, const EncodingSpec& s, int d, int line,
                                               const Fp4Smem<R>& smem, int first_bit = 0, int second_bit = 0) {
  const auto with = [&](const auto& level) {
    if (R != Fp4Mode::kExtended || !s.chooses()) return two_level_scale(amax, level, s.stochastic, is_exact<R>(s));
    const bool squared = s.choice == ScaleChoice::kMse;
    TwoScales scales(amax, level, s.exact());
#pragma unroll
    for (int k = 0; k < Blocks; ++k) {
#pragma unroll
      for (int e = 0; e < kFp4Block; ++e) scales.take(block[k][e], squared);
    }
    if (first_bit != 0) scales.add_lane(first_bit), scales.add_lane(second_bit);
    return scales.better(amax, squared);
  };
  if (R == Fp4Mode::kExtended && s.by_line) return with(OfLine(smem.factors[d][line], smem.inverse[d][line]));
  return with(OfTensor{smem.target[d], smem.factors[d]});
}

// Fill what encodes second-level scales of the lines of a tile.
__device__ __forceinline__ void fill_lines(const EncodingSpec (&spec)[2], const EncodingBuffers& row, const EncodingBuffers& col,
                                           const Tile& tile, Fp4Smem<Fp4Mode::kExtended>& smem) {
  const int d = threadIdx.x / 128, i = threadIdx.x % 128;
  if (!spec[d].present() || !spec[d].by_line) return;
  const float* const amax = d ? col.tensor_amax : row.tensor_amax;
  const int32_t lines = d ? col.lines : row.lines;
  const OfLine level(__ldcg(amax + min((d ? tile.col0 : tile.row0) + i, lines - 1)), spec[d]);
  smem.factors[d][i] = level.target, smem.inverse[d][i] = level.inverse;
}

// Encode this warp's rows. Square: (16, 16) blocks, whose codes also go to shared memory for `col`; null data is not stored.
template <bool Square, Fp4Mode R>
__device__ __forceinline__ void encode_rows(
    const EncodingSpec& s, const EncodingBuffers& b, const EncodingSpec& col_side, const Tile& tile, Fp4Smem<R>& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane & 7, local = warp * kFp4Block + (lane >> 3) * 4;
  const int32_t row = tile.row0 + local, col = tile.col0 + group * kFp4Block;
  const bool operand = kTakesOperands<R> && s.operand();
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
    const BlockScale scale = scale_of<R>(block, amax, s, 0, 0, smem, 8, 16);
    uint2 codes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      codes[k] = codes_of(block[k], amax, scale.enc, false, uint4{}, mask);
      if (row + k >= b.lines) codes[k] = {};
      put(k, codes[k], scale.stored);
      smem.scales[0][local + k][group] = smem.scales[1][group * kFp4Block + (lane >> 3) * 4 + k][warp] =
          static_cast<uint8_t>(scale.stored);
    }
    __syncwarp();  // all values of the warp are in registers
    uint8_t* own = smem.values + warp * kFp4Block * kPitch;
    if (kTakesOperands<R> && col_side.operand()) {
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
    for (int k = 0; k < 4; ++k) {
      const uint4 random = s.stochastic ? source.draw(k) : uint4{};
      Block16 one[1] = {load(k)}, &block = one[0];
      if (s.rotated) block = rotated([&](int e) { return block[e]; });
      const float amax = block.amax();
      const BlockScale scale = scale_of<R>(one, amax, s, 0, local + k, smem);
      smem.scales[0][local + k][group] = static_cast<uint8_t>(scale.stored);
      put(k, codes_of(block, amax, scale.enc, s.stochastic, random, mask), scale.stored);
    }
  }
}

// Encode this warp's columns. is_padding: their rows are behind a group's tokens, so that they are blocks of zeros, all alike.
template <Fp4Mode R>
__device__ __forceinline__ void encode_columns(
    const EncodingSpec& s, const EncodingBuffers& b, const Tile& tile, int32_t cols, bool is_padding, Fp4Smem<R>& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int32_t row = tile.row0 + warp * kFp4Block, col = tile.col0 + lane * 4;
  RandomBlocks source = {};
  if (s.stochastic) source = random_blocks(b.key, true, row - tile.start, col);
  const uint8_t* values = smem.values + warp * kFp4Block * kPitch + lane * 8;
  const int32_t row_bytes = (cols + 1) >> 1;
  const uint2 mask = mask_of(b.length - row);
  uint2 codes = {}, last;
  uint32_t stored = 0;
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    last = codes;
    if (j == 0 || !is_padding) {
      uint32_t w[kFp4Block];
      Block16 one[1], &block = one[0];
#pragma unroll
      for (int i = 0; i < kFp4Block; ++i) w[i] = *reinterpret_cast<const uint16_t*>(values + i * kPitch + j * 2);
      if (s.rotated) {
        block = rotated([&](int e) { return __uint_as_float(w[e] << 16); });
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) block.w[k] = __byte_perm(w[2 * k], w[2 * k + 1], 0x5410);
      }
      const uint4 random = s.stochastic ? source.draw(j) : uint4{};
      const float amax = block.amax();
      const BlockScale scale = scale_of<R>(one, amax, s, 1, lane * 4 + j, smem);
      stored = scale.stored;
      codes = codes_of(block, amax, scale.enc, s.stochastic, random, mask);
    }
    smem.scales[1][lane * 4 + j][warp] = static_cast<uint8_t>(stored);
    const int group = lane >> 1, at = (lane * 4 + j) * 8 + (warp ^ (group >> 1));
    if (kTakesOperands<R> && s.operand()) {  // 16 chunks of 8 per column, permuted by `group`: see flush_transposed
      const uint4 v = bytes_of_block(codes, smem.magnitudes[stored]);
      smem.codes[at] = group & 1 ? make_uint4(v.z, v.w, v.x, v.y) : v;
    } else if (s.transposed) {  // 16 words per column, permuted by `group` (of 8 columns): see flush_transposed
      reinterpret_cast<uint2*>(smem.codes)[at] = group & 1 ? make_uint2(codes.y, codes.x) : codes;
    } else if ((j & 1) != 0 && col + j - 1 < cols) {  // two columns share bytes
      uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + ((col + j) >> 1);
#pragma unroll
      for (int i = 0; i < kFp4Block; ++i, address += row_bytes) {
        auto nibble = [&](uint2 c) { return (i < 8 ? c.x : c.y) >> (4 * (i & 7)) & 0xFu; };
        if (row + i < b.length) *address = static_cast<uint8_t>(nibble(last) | nibble(codes) << 4);
      }
    }
  }
}

// Copy the warp's 16 rows to shared memory asynchronously; zeros outside the tensor and from row `rows`.
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

// Store an operand's scale: one thread of its first tile.
__device__ __forceinline__ void store_operand_scale(const EncodingSpec& s, const EncodingBuffers& b, const Tile& tile,
                                                    int32_t row0) {
  if (s.present() && s.operand() && b.scale != nullptr && tile.row0 == row0 && tile.col0 == 0 && threadIdx.x == 0)
    *static_cast<float*>(b.scale) = __fmul_rn(8.0f, tensor_decode_scale(__ldcg(b.tensor_amax), s.tensor_max));
}

// Square: one (16, 16) block serves both directions. Tokens: tiles are grouped by the launch's `sources`.
template <bool Square, bool Tokens, Fp4Mode R>
__global__ void __launch_bounds__(kThreads, kFp4BlocksPerSm<R>) quantize_fp4_kernel(const __grid_constant__ Launch<1> launch) {
  extern __shared__ uint4 shared[];
  constexpr bool kOperands = kTakesOperands<R>;
  auto& smem = *reinterpret_cast<Fp4Smem<R>*>(shared);
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const TensorArgs& t = launch.tensors[0];
  const int32_t n = launch.reversed ? launch.tiles - 1 - static_cast<int32_t>(blockIdx.x) : blockIdx.x;
  Tile tile = tile_of(t, n), row_tile = tile;
  using Buffers = std::conditional_t<Tokens, EncodingBuffers, const EncodingBuffers&>;
  Buffers row_buffers = t.buffers[0], col_buffers = t.buffers[1];
  if constexpr (Tokens) {
    const int4 source =
        reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows, group, first padded row
    if (source.y == 0) return;
    row_tile.row0 = source.x, tile.start = source.w, row_tile.start = source.x - (tile.row0 - source.w);
    row_buffers.lines = source.x + source.y;
    row_buffers.compact.lines = (row_buffers.lines + (Square ? kFp4Block - 1 : 0)) / (Square ? kFp4Block : 1);
    select_group<false>(row_buffers, row, source.z), select_group<true>(col_buffers, col, source.z);
  }
  load_values<Tokens>(t, launch.input, row_tile, Tokens ? row_buffers.lines : t.rows, smem);
  if constexpr (Square && !Tokens) prefetch_later<LoadBF16>(launch, n);
  fill_factors(launch.spec, row_buffers, col_buffers, smem.factors);
  if constexpr (R == Fp4Mode::kExtended) fill_lines(launch.spec, row_buffers, col_buffers, row_tile, smem);
  if (threadIdx.x < 2 && launch.spec[threadIdx.x].present()) {
    const float* const amax = threadIdx.x ? col_buffers.tensor_amax : row_buffers.tensor_amax;
    smem.target[threadIdx.x] = two_level_target(__ldcg(amax), launch.spec[threadIdx.x]);
  }
  if (kOperands && threadIdx.x < 128) smem.magnitudes[threadIdx.x] = magnitudes_of(threadIdx.x);
  __syncthreads();
  ptx::copy_async_wait();
  __syncwarp();
  const int32_t first = row_tile.row0 + static_cast<int32_t>(threadIdx.x / 32) * kFp4Block;
  const bool is_padding = Tokens && R == Fp4Mode::kOperands && first >= row_buffers.lines;
  if (Square || (row.present() && !(is_padding && row.operand()))) encode_rows<Square>(row, row_buffers, col, row_tile, smem);
  if (!Square && col.present()) encode_columns(col, col_buffers, tile, t.cols, is_padding, smem);
  __syncthreads();
  if constexpr (kOperands) {
    store_operand_scale(row, row_buffers, row_tile, row_tile.start), store_operand_scale(col, col_buffers, tile, tile.start);
  }
  using P = std::conditional_t<Square, Path<Work::kSharedCodes, 4>, Path<Work::kPlain, 4, kFp4Block>>;
  if ((Square || row.present()) && !(kOperands && row.operand())) flush_scales<false, P>(row, row_buffers, row_tile, smem.scales[0]);
  if ((Square || col.present()) && !(kOperands && col.operand())) flush_scales<true, P>(col, col_buffers, tile, smem.scales[1]);
  const EncodingBuffers& transposed = t.buffers[1];
  if (kOperands && col.present() && col.operand()) {
    if (transposed.data != nullptr)
      flush_transposed<false>(transposed.data, transposed.vector_store, tile.row0, tile.col0, transposed.length, t.cols,
                              smem.codes);
  } else if (Square || (col.present() && col.transposed)) {
    flush_transposed<true>(transposed.data, transposed.vector_store, tile.row0, tile.col0, transposed.length, t.cols,
                           smem.codes);
  }
}

}  // namespace fsdp_quant
