// SPDX-License-Identifier: Apache-2.0
// A 128 x 128 tile in a block's registers: its position on the grid of blocks, and the amaxes of its blocks.
#pragma once

#include "device/register_tile.cuh"

namespace fsdp_quant {

struct TileSmem {
  uint32_t maxima[8][16][8];  // [warp][chunk of columns][word]
  uint8_t scales[2][kTile][8];
  uint32_t lines[2][kTile];  // maxima to be added atomically, by direction
  float factors[2][128];     // two_level_factor of every code, by direction
};

struct Smem : TileSmem {
  uint4 codes[kTile * 8];  // [column][128 bytes], 8-byte chunks swizzled
};

// Position of a thread's register tile in one direction: first line and contraction element in the tensor (negative before a
// shard's first row), and the shifts to the block grid.
struct Place {
  int32_t line, along;
  int32_t line_shift, along_shift;

  __device__ int32_t line_block(const EncodingSpec& s, int32_t l) const {
    return ((l + line_shift) >> s.outer_log2) - (line_shift >> s.outer_log2);
  }
  __device__ int32_t block(int32_t log2, int32_t a) const { return ((a + along_shift) >> log2) - (along_shift >> log2); }
};

struct Tile {
  int32_t row0, col0;  // first element in the tensor: row0 may be negative
  int32_t shift;
  int32_t start = 0;  // first row of a scale that covers all rows (grouped tokens: of the group)

  template <bool Columnwise>
  __device__ Place place(const Position& at) const {
    const int32_t row = row0 + at.row(), col = col0 + at.col();
    return Columnwise ? Place{col, row, 0, shift} : Place{row, col, shift, 0};
  }
};

// Down four tiles, then right: consecutive blocks write adjacent parts of rows and of transposed columns. down: all the way, so
// that rows which are read several times find these columns in L2 (65,536 x 2048 of 8192 rows: 177 us for 183, an H200).
__device__ __forceinline__ Tile tile_of(const TensorArgs& t, int32_t n, bool down = false) {
  const int32_t band = __umulhi(n, t.by_band.magic) >> t.by_band.shift;
  if (down) return {(n - band * t.tile_rows) * kTile - t.shift, band * kTile, t.shift};
  const int32_t inside = n - band * 4 * t.tile_cols, tall = min(4, t.tile_rows - 4 * band);
  const int32_t tile_col = tall == 4 ? inside >> 2 : tall == 3 ? inside / 3 : inside >> (tall - 1);
  const int32_t tile_row = 4 * band + inside - tile_col * tall;
  return {tile_row * kTile - t.shift, tile_col * kTile, t.shift};
}

__device__ __forceinline__ int64_t index_of(const Grid& g, int32_t line_block, int32_t block) {
  return static_cast<int64_t>(line_block) * g.line_stride + static_cast<int64_t>(block) * g.block_stride;
}

template <class V>
__device__ __forceinline__ void across_warps(Maxima<V>& m, TileSmem& smem, const Position& at, int warps) {
  __syncthreads();  // smem.maxima may be in use
  if (at.half == 0) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) smem.maxima[at.warp][at.chunk][k] = m.w[k];
  }
  __syncthreads();
  const int first = at.warp & ~(warps - 1);
#pragma unroll 2
  for (int other = first; other < first + warps; ++other) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) m.w[k] = V::larger(m.w[k], smem.maxima[other][at.chunk][k]);
  }
}

// Amaxes of the blocks of this thread's 8 outer lines (of the tile, if blocks are wider). Lines of one block get the same
// amax.
template <bool Columnwise, class V>
__device__ __forceinline__ Maxima<V> block_maxima(
    const RegisterTile<V>& p, int outer, int contraction, TileSmem& smem, const Position& at) {
  const int lanes = contraction == 16 ? 1 : contraction == 32 ? 2 : 8;
  if (!Columnwise && outer == 1) {
    Maxima<V> m = row_maxima(p);
    m.across_lanes(1, lanes);
    return m;
  }
  Maxima<V> m = col_maxima(p);
  m.across_lanes(16, 16);
  if (outer != 1) {
    m.level();
    m.across_lanes(1, lanes);
  }
  if (contraction != 16) across_warps(m, smem, at, contraction == 32 ? 2 : 8);
  return m;
}

// Largest magnitude of the tile, from the maxima of its blocks.
template <bool Columnwise, class V>
__device__ __forceinline__ float tile_maximum(Maxima<V> m, TileSmem& smem, const Position& at) {
  m.level();
  const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, bits_of(m[0]));
  if ((threadIdx.x & 31) == 0) smem.lines[Columnwise][at.warp] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, smem.lines[Columnwise][w]);
  return __uint_as_float(largest);
}

// Whether this thread writes for its outer lines: one thread of the block along the contraction.
template <bool Columnwise>
__device__ __forceinline__ bool leads_block(int contraction, const Position& at) {
  const int span = contraction == 16 ? 2 : contraction == 32 ? 4 : 16;  // threads per block, rowwise
  return Columnwise ? at.half == 0 && (at.warp & (span / 2 - 1)) == 0 : (at.chunk & (span - 1)) == 0;
}

// Encode factor and scale in delayed scaling; the scale is valid once the tensor's amax is complete.
template <class Buffers>
__device__ __forceinline__ BlockScale delayed_scale(const EncodingSpec& s, const Buffers& b) {
  const float amax = __ldcg(b.amax), enc = __ldcg(b.enc);
  if (!(enc > 0.0f)) return fp32_scale(amax, s);
  const float factor = s.scale == ScaleKind::kFp32Pow2 ? __uint_as_float(bits_of(enc) & 0x7F800000u) : enc;
  return {factor, bits_of(is_finite(amax) ? __fdiv_rn(1.0f, factor) : quiet_nan())};
}

// Write the scale and record of delayed scaling: one thread, after all amaxes.
__device__ __forceinline__ void finish_delayed(const EncodingSpec& s, const EncodingBuffers& b) {
  if (!s.present() || b.enc == nullptr) return;
  *static_cast<uint32_t*>(b.scale) = delayed_scale(s, b).stored;
  const float amax = __ldcg(b.amax);
  if (b.record != nullptr && is_finite(amax)) atomic_max(b.record, amax);
}

// Whether a block of one line spans tiles.
__device__ __forceinline__ bool crosses_tiles(const EncodingSpec& s) {
  return s.outer == 1 && (s.contraction == 0 || s.contraction > kTile);
}

// Whether a direction has an amax per line that spans tiles: of its block, or of its second level.
__device__ __forceinline__ bool has_line_maxima(const EncodingSpec& s) { return crosses_tiles(s) || s.by_line; }

// Add line maxima of both directions to memory: the first half of the threads rows, the second columns. row_tile: position of
// the rowwise direction.
__device__ __forceinline__ void flush_lines(const EncodingSpec (&spec)[2], const EncodingBuffers& row,
                                            const EncodingBuffers& col, const Tile& tile, const Tile& row_tile,
                                            const Smem& smem) {
  const int d = threadIdx.x / kTile, line = threadIdx.x % kTile;
  const auto of = [&](auto field) {
    return d ? col.*field : row.*field;
  };  // select fields: copies of buffers would leave registers
  const bool by_line = spec[d].by_line;
  float* const amax = by_line ? of(&EncodingBuffers::tensor_amax) : of(&EncodingBuffers::amax);
  const bool given = by_line ? of(&EncodingBuffers::tensor_amax_given) : of(&EncodingBuffers::amax_given);
  if (!spec[d].present() || !has_line_maxima(spec[d]) || amax == nullptr || given) return;
  const int32_t at = (d ? tile.col0 : row_tile.row0) + line, along = max(d ? tile.row0 : tile.col0, 0);
  const int32_t shift = d ? tile.shift : 0;
  if (at < 0 || at >= of(&EncodingBuffers::lines) || along >= of(&EncodingBuffers::length)) return;
  if (by_line) return atomic_max(amax + at, __uint_as_float(smem.lines[d][line]));
  const int32_t block = ((along + shift) >> spec[d].contraction_log2) - (shift >> spec[d].contraction_log2);
  const int64_t place = d ? index_of(col.compact, at, block) : index_of(row.compact, at, block);
  atomic_max(amax + place, __uint_as_float(smem.lines[d][line]));
}

// Sum the columns of a tile in a fixed order: rows of a thread, halves of a warp, warps.
template <class V>
__device__ __forceinline__ void sum_columns(
    const RegisterTile<V>& p, float* sums, const TensorArgs& t, const Tile& tile, Smem& smem, const Position& at) {
  float sum[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum[j] = p(0, j);
#pragma unroll
    for (int i = 1; i < 8; ++i) sum[j] += p(i, j);
    sum[j] += __shfl_xor_sync(0xFFFFFFFFu, sum[j], 16);
  }
  auto& of_warps = reinterpret_cast<float(&)[8][kTile]>(smem.maxima);  // free behind the barrier in across_warps
  if (at.half == 0) {
    auto* const to = reinterpret_cast<float4*>(of_warps[at.warp] + at.col());
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  __syncthreads();
  const int32_t col = tile.col0 + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x >= kTile || col >= t.cols) return;
  float total = of_warps[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < 8; ++w) total += of_warps[w][threadIdx.x];
  sums[static_cast<int64_t>((tile.row0 + tile.shift) / kTile) * t.cols + col] = total;
}

// Collect statistics of one direction. Threads outside the tensor take part in lane reductions and write nothing.
template <bool Columnwise, class V>
__device__ __forceinline__ void collect(const RegisterTile<V>& p, const EncodingSpec& s, const EncodingBuffers& b,
                                        const Tile& tile, Smem& smem, const Position& at) {
  if (b.amax != nullptr && !b.amax_given) {
    const Maxima<V> m = block_maxima<Columnwise>(p, s.outer, s.contraction, smem, at);
    const Place place = tile.place<Columnwise>(at);
    if (s.whole_tensor()) {
      if (threadIdx.x == 0) atomic_max(b.amax, m[0]);
    } else if (leads_block<Columnwise>(s.contraction, at)) {
      if (crosses_tiles(s)) {  // flush_lines adds them, one line per thread
        const int line = Columnwise ? at.col() : at.row();
#pragma unroll
        for (int k = 0; k < 8; ++k) smem.lines[Columnwise][line + k] = bits_of(m[k]);
      } else {
        const bool inside = place.along < b.length && place.along + s.contraction > 0;
        const int32_t block = place.block(s.contraction_log2, max(place.along, 0));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const int32_t line = place.line + k;
          const bool first = s.outer <= 1 || ((line + place.line_shift) & (s.outer - 1)) == 0;  // of its block
          if (!inside || !first || line >= b.lines || line + s.outer <= 0) continue;
          b.amax[index_of(b.compact, place.line_block(s, max(line, 0)), block)] = m[k];
        }
      }
    }
  }
  if (b.tensor_amax != nullptr && !b.tensor_amax_given) {
    const Maxima<V> m = block_maxima<Columnwise>(p, s.by_line, 0, smem, at);
    if (!s.by_line) {
      if (threadIdx.x == 0) atomic_max(b.tensor_amax, m[0]);
    } else if (leads_block<Columnwise>(kTile, at)) {  // flush_lines adds them
      const int line = Columnwise ? at.col() : at.row();
#pragma unroll
      for (int k = 0; k < 8; ++k) smem.lines[Columnwise][line + k] = bits_of(m[k]);
    }
  }
}

}  // namespace fsdp_quant
