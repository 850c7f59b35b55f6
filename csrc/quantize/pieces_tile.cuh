// SPDX-License-Identifier: Apache-2.0
// Blocks of a tile that pieces cut: their amaxes, scales and codes. See pieces_kernel.cuh.
#pragma once

#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

// The collected amax of a block.
__device__ __forceinline__ float* amax_of(const PieceBuffers& b, int32_t block_row, int32_t block) {
  if (block_row == b.cut_row[0]) return b.cut_amax[0] + block;
  if (block_row == b.cut_row[1]) return b.cut_amax[1] + block;
  return b.amax + static_cast<int64_t>(block_row) * b.across + block;
}

// Where the block of line `line`, of a thread whose patch begins at `along`, lies: block row, block in it, its first row.
struct BlockPlace {
  int32_t block_row, block, row;
};

template <bool Columnwise>
__device__ __forceinline__ BlockPlace block_place(const EncodingSpec& s, int32_t line, int32_t along) {
  const int32_t line_block = line >> s.outer_log2, block = along >> s.contraction_log2;
  if (Columnwise) return {block, line_block, s.contraction == 0 ? 0 : block << s.contraction_log2};
  return {line_block, block, s.outer == 0 ? 0 : line_block << s.outer_log2};
}

__device__ __forceinline__ bool is_own(const PieceBuffers& b, int32_t row) { return row >= b.own[0] && row < b.own[1]; }

// A block row of the tile is cut.
template <bool Columnwise>
__device__ __forceinline__ bool holds_cut(const EncodingSpec& s, const PieceBuffers& b, const Tile& tile) {
  const int32_t log2 = Columnwise ? s.contraction_log2 : s.outer_log2;
  const int32_t first = tile.row0 >> log2, last = (tile.row0 + kTile - 1) >> log2;
  return (b.cut_row[0] >= first && b.cut_row[0] <= last) || (b.cut_row[1] >= first && b.cut_row[1] <= last);
}

// The amaxes of this thread's blocks that ranks share.
template <bool Columnwise>
__device__ __forceinline__ void read_cut_amaxes(float (&amax)[8], const EncodingSpec& s, const PieceBuffers& b, const Place& place) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k > 0 && s.outer != 1) continue;
    const BlockPlace at = block_place<Columnwise>(s, place.line + k, place.along);
    if (at.block_row == b.cut_row[0] || at.block_row == b.cut_row[1])
      amax[k] = __ldcg(amax_of(b, at.block_row, min(at.block, b.across - 1)));
  }
}

// The encode factor of a line of the tile, of a scale that spans more than the tile.
template <bool Columnwise>
__device__ __forceinline__ float line_factor(const EncodingSpec& s, const PieceBuffers& b, int32_t line) {
  if (b.enc != nullptr) return delayed_scale(s, b).enc;
  line = Columnwise ? min(line, b.lines - 1) : max(min(line, b.rows[1] - 1), b.rows[0]);  // others' amaxes are not here
  const BlockPlace at = block_place<Columnwise>(s, line, 0);
  return fp32_scale(__ldcg(amax_of(b, at.block_row, at.block)), s).enc;
}

template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const EncodingSpec& s, const PieceBuffers& b, const Place& place) {
  if (b.scale == nullptr || (s.outer != 1 && threadIdx.x != 0) || place.along >= b.length) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if ((k > 0 && s.outer != 1) || place.line + k >= b.lines) continue;
    const BlockPlace at = block_place<Columnwise>(s, place.line + k, place.along);
    if (is_own(b, at.row))
      static_cast<uint32_t*>(b.scale)[static_cast<int64_t>(at.block_row) * b.across + at.block] = stored[k];
  }
}

// One-byte scales of own blocks, from shared memory.
template <bool Columnwise>
__device__ __forceinline__ void flush_piece_scales(
    const EncodingSpec& s, const PieceBuffers& b, const Tile& tile, const uint8_t (&scales)[kTile][8]) {
  if (b.scale == nullptr) return;
  const int32_t rows_log2 = Columnwise ? s.contraction_log2 : s.outer_log2;
  const int32_t cols_log2 = Columnwise ? s.outer_log2 : s.contraction_log2;
  const int32_t first_row = tile.row0 >> rows_log2, first_block = tile.col0 >> cols_log2, in_row = 7 - cols_log2;
  auto* out = static_cast<uint8_t*>(b.scale);
  // Four neighbours of a block row in one store, where they are neighbours here: of lines that are rows.
  const bool words = !Columnwise && (b.across & 3) == 0 && (reinterpret_cast<uintptr_t>(out) & 3) == 0;
  const int32_t step = words ? 2 : 0;
  for (int u = threadIdx.x; u < 1 << (14 - rows_log2 - cols_log2 - step); u += kThreads) {
    const int32_t i = u >> (in_row - step), j = (u & ((1 << (in_row - step)) - 1)) << step;
    const int32_t block_row = first_row + i, block = first_block + j;
    if (block >= b.across || !is_own(b, block_row << rows_log2)) continue;
    uint8_t* to = out + static_cast<int64_t>(block_row) * b.across + block;
    if (words) {
      *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(&scales[i << rows_log2][j]);
    } else {
      *to = Columnwise ? scales[j << cols_log2][i] : scales[i << rows_log2][j];
    }
  }
}

// Codes of 8 rows of 8, of those elements that this launch makes.
template <bool FourBit>
__device__ __forceinline__ void store_piece(const uint2 (&v)[8], const PieceBuffers& b, int32_t row, int32_t col, int32_t cols) {
  const int64_t flat = static_cast<int64_t>(row) * cols + col;
  const int32_t lo = b.early[0], hi = b.early[1];
  const bool inside = col + 8 <= cols && flat >= b.first && flat + 7 * static_cast<int64_t>(cols) + 8 <= b.last;
  const bool all = b.second ? row >= hi || row + 8 <= lo : row >= lo && row + 8 <= hi;
  if (inside && all && b.vectors) {
    uint8_t* address = b.data + (FourBit ? flat >> 1 : flat);
    const int64_t row_bytes = FourBit ? cols >> 1 : cols;
#pragma unroll
    for (int k = 0; k < 8; ++k, address += row_bytes) {
      if constexpr (FourBit) {
        *reinterpret_cast<uint32_t*>(address) = v[k].x;
      } else {
        *reinterpret_cast<uint2*>(address) = v[k];
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int64_t at = flat + static_cast<int64_t>(k) * cols;
    const bool early = row + k >= lo && row + k < hi;
    const int32_t begin = static_cast<int32_t>(max(min(b.first - at, int64_t{8}), int64_t{0}));
    const int32_t end = static_cast<int32_t>(min(b.last - at, static_cast<int64_t>(min(cols - col, 8))));
    if (early == static_cast<bool>(b.second) || begin >= end) continue;
    uint8_t* address = b.data + (FourBit ? at >> 1 : at);
    if constexpr (FourBit) {  // two codes a byte; that of another rank's element is zero
      const uint32_t below = begin == 0 ? 0u : ~0u >> (32 - 4 * begin), upto = ~0u >> (32 - 4 * end);
      const uint32_t codes = v[k].x & upto & ~below;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (2 * e + 1 >= begin && 2 * e < end) address[e] = static_cast<uint8_t>(codes >> (8 * e) & 0xFFu);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e >= begin && e < end)
          address[e] = static_cast<uint8_t>((e < 4 ? v[k].x >> (8 * e) : v[k].y >> (8 * (e - 4))) & 0xFFu);
      }
    }
  }
}

// The largest magnitude of each warp.
template <class V>
__device__ __forceinline__ void collect_largest(const RegisterTile<V>& p, uint32_t (&largest)[kThreads / 32]) {
  Maxima<V> m = col_maxima(p);
  m.level();
  const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, bits_of(m[0]));
  if ((threadIdx.x & 31) == 0) largest[threadIdx.x / 32] = of_warp;
}

// Amaxes of blocks that ranks share, and those of lines that go on in other tiles.
template <bool Columnwise, class V>
__device__ __forceinline__ void collect_blocks(
    const RegisterTile<V>& p, const EncodingSpec& s, const PieceBuffers& b, const Tile& tile, TileSmem& smem, const Position& at) {
  const bool crosses = crosses_tiles(s);
  if (s.whole_tensor() || !(crosses || b.all_amaxes || holds_cut<Columnwise>(s, b, tile))) return;
  const Maxima<V> m = block_maxima<Columnwise>(p, s.outer, s.contraction, smem, at);
  if (!leads_block<Columnwise>(s.contraction, at)) return;
  const Place place = tile.place<Columnwise>(at);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int32_t line = place.line + k;
    if (crosses) {  // flush_piece_lines adds them, a line a thread
      smem.lines[Columnwise][(Columnwise ? at.col() : at.row()) + k] = bits_of(m[k]);
    } else if (place.along < b.length && line < b.lines && (s.outer <= 1 || (line & (s.outer - 1)) == 0)) {
      const BlockPlace block = block_place<Columnwise>(s, line, place.along);
      if (b.all_amaxes || block.block_row == b.cut_row[0] || block.block_row == b.cut_row[1])
        *amax_of(b, block.block_row, block.block) = m[k];
    }
  }
}

// Line maxima of both directions to memory; rows of others have none.
__device__ __forceinline__ void flush_piece_lines(
    const EncodingSpec (&spec)[2], const Piece& piece, int32_t work, const Tile& tile, const TileSmem& smem) {
  const int d = threadIdx.x / kTile, line = threadIdx.x % kTile;
  if (!(work & kCollect << (2 * d)) || !crosses_tiles(spec[d])) return;
  const uint32_t bits = smem.lines[d][line];
  const int32_t at = (d ? tile.col0 : tile.row0) + line;
  const PieceBuffers& b = piece.buffers[d];
  if (bits == 0 || at >= b.lines) return;
  atomic_max(d ? amax_of(b, 0, at) : amax_of(b, at, 0), __uint_as_float(bits));
}

}  // namespace fsdp_quant
