// Quantize pieces of tensors that are cut at any element, as the whole tensors are: the tiles of quantize_kernel.cuh, on the
// grid of the whole tensor, with zeros in place of what other ranks hold, whose codes are not written.
#pragma once

#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

// The collected amax of a block.
__device__ __forceinline__ float* amax_of(const PieceSide& b, int32_t block_row, int32_t block) {
  if (block_row == b.cut_row[0]) return b.cut_amax[0] + block;
  if (block_row == b.cut_row[1]) return b.cut_amax[1] + block;
  return b.amax + static_cast<int64_t>(block_row) * b.across + block;
}

// Where the block of line `line`, of a thread whose patch begins at `along`, lies: block row, block in it, its first row.
struct BlockPlace {
  int32_t block_row, block, row;
};

template <bool Columnwise>
__device__ __forceinline__ BlockPlace block_place(const Side& s, int32_t line, int32_t along) {
  const int32_t line_block = line >> s.outer_log2, block = along >> s.contraction_log2;
  if (Columnwise) return {block, line_block, s.contraction == 0 ? 0 : block << s.contraction_log2};
  return {line_block, block, s.outer == 0 ? 0 : line_block << s.outer_log2};
}

__device__ __forceinline__ bool is_own(const PieceSide& b, int32_t row) { return row >= b.own[0] && row < b.own[1]; }

template <bool Columnwise>
__device__ __forceinline__ void read_amaxes(float (&amax)[8], const Side& s, const PieceSide& b, const Place& place) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k > 0 && s.outer != 1) continue;
    int32_t line = place.line + k;
    if (!Columnwise && s.whole()) line = max(min(line, b.rows[1] - 1), b.rows[0]);  // others' amaxes are not here
    const BlockPlace at = block_place<Columnwise>(s, line, place.along);
    const bool is_cut = at.block_row == b.cut_row[0] || at.block_row == b.cut_row[1];
    if (s.whole() || is_cut) amax[k] = __ldcg(amax_of(b, at.block_row, min(at.block, b.across - 1)));
  }
}

template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const Side& s, const PieceSide& b, const Place& place) {
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
    const Side& s, const PieceSide& b, const Tile& tile, const uint8_t (&scales)[kTile][8]) {
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
__device__ __forceinline__ void store_piece(const uint2 (&v)[8], const PieceSide& b, int32_t row, int32_t col, int32_t cols) {
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

// Amaxes that ranks share, and those of scales that span more than a tile.
template <bool Columnwise, class V>
__device__ __forceinline__ void collect_piece(
    const Patch<V>& p, const Side& s, const PieceSide& b, const Tile& tile, Smem& smem, const Position& at) {
  const Maxima<V> m = block_maxima<Columnwise>(p, s.outer, s.contraction, smem, at);
  const Place place = tile.place<Columnwise>(at);
  if (s.whole_tensor()) {
    if (threadIdx.x == 0) atomic_max(b.amax, m[0]);
  } else if (leads_block<Columnwise>(s.contraction, at)) {
    if (crosses_tiles(s)) {  // flush_piece_lines adds them, a line a thread
      const int line = Columnwise ? at.col() : at.row();
#pragma unroll
      for (int k = 0; k < 8; ++k) smem.lines[Columnwise][line + k] = bits_of(m[k]);
    } else if (place.along < b.length) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int32_t line = place.line + k;
        if (line >= b.lines || (s.outer > 1 && (line & (s.outer - 1)) != 0)) continue;
        const BlockPlace block = block_place<Columnwise>(s, line, place.along);
        if (b.all_amaxes || block.block_row == b.cut_row[0] || block.block_row == b.cut_row[1])
          *amax_of(b, block.block_row, block.block) = m[k];
      }
    }
  }
  if (b.tensor_amax != nullptr) {
    const Maxima<V> whole = block_maxima<Columnwise>(p, 0, 0, smem, at);
    if (threadIdx.x == 0) atomic_max(b.tensor_amax, whole[0]);
  }
}

// Line maxima of both directions to memory; rows of others have none.
__device__ __forceinline__ void flush_piece_lines(
    const Side (&side)[2], const PieceSide (&buffers)[2], int32_t work, const Tile& tile, const Smem& smem) {
  const int d = threadIdx.x / kTile, line = threadIdx.x % kTile;
  if (!(work & kCollect << (2 * d)) || !crosses_tiles(side[d])) return;
  const uint32_t bits = smem.lines[d][line];
  const int32_t at = (d ? tile.col0 : tile.row0) + line;
  if (bits == 0 || at >= buffers[d].lines) return;
  atomic_max(d ? amax_of(buffers[d], 0, at) : amax_of(buffers[d], at, 0), __uint_as_float(bits));
}

// 8 x 8 values of the piece as bf16, zeros around it.
__device__ __forceinline__ void load_piece(Patch<BF16>& p, const Piece& t, int32_t row, int32_t col) {
  const int64_t flat = static_cast<int64_t>(row) * t.cols + col, end = flat + 7 * static_cast<int64_t>(t.cols) + 8;
  const bool wide = !t.narrow, within = col + 8 <= t.cols;
  if (within && t.vectors && flat >= t.first && end <= t.last) {
    if (wide) {
      const auto* at = static_cast<const float*>(t.x) + flat;
      uint4 raw[8][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) raw[i][k] = ptx::ld_streaming(at + static_cast<int64_t>(i) * t.cols + 4 * k);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t words[8] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w,
                                   raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w};
        LoadBF16::put(p.w[i], words, false);
      }
    } else {
      const auto* at = static_cast<const __nv_bfloat16*>(t.x) + flat;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 raw = ptx::ld_streaming(at + static_cast<int64_t>(i) * t.cols);
        p.w[i][0] = raw.x, p.w[i][1] = raw.y, p.w[i][2] = raw.z, p.w[i][3] = raw.w;
      }
    }
    return;
  }
  if (wide && within && flat - 4 >= t.first && end + 4 <= t.last) {  // aligned words around the eight, moved into place
    const auto address = [&](int i) {
      return reinterpret_cast<uintptr_t>(static_cast<const float*>(t.x) + flat + i * static_cast<int64_t>(t.cols));
    };
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      uint4 raw[4][3];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto* words = reinterpret_cast<const uint4*>(address(first + i) & ~uintptr_t{15});
#pragma unroll
        for (int k = 0; k < 3; ++k) raw[i][k] = __ldg(words + k);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool two = address(first + i) & 8, one = address(first + i) & 4;
        uint32_t w[12] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w, raw[i][1].x, raw[i][1].y,
                          raw[i][1].z, raw[i][1].w, raw[i][2].x, raw[i][2].y, raw[i][2].z, raw[i][2].w};
#pragma unroll
        for (int j = 0; j < 10; ++j) w[j] = two ? w[j + 2] : w[j];
        uint32_t words[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) words[j] = one ? w[j + 1] : w[j];
        LoadBF16::put(p.w[first + i], words, false);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t words[8] = {};
    const int64_t at = flat + static_cast<int64_t>(i) * t.cols;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (col + j >= t.cols || at + j < t.first || at + j >= t.last) continue;
      if (wide) {
        words[j] = static_cast<const uint32_t*>(t.x)[at + j];
      } else {
        words[j / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(t.x)[at + j]) << (16 * (j & 1));
      }
    }
    LoadBF16::put(p.w[i], words, !wide);
  }
}

template <class Row, class Col, int MinBlocks>
__global__ void __launch_bounds__(kThreads, MinBlocks) quantize_pieces_kernel(const __grid_constant__ PiecesLaunch launch) {
  __shared__ Smem smem;
  __shared__ Piece piece;
  if (launch.skip != nullptr && *launch.skip != 0) return;
  const int4 where = launch.tiles[blockIdx.x];
  static_assert(sizeof(Piece) % 4 == 0 && sizeof(Piece) / 4 <= kThreads);
  if (threadIdx.x < sizeof(Piece) / 4)
    reinterpret_cast<uint32_t*>(&piece)[threadIdx.x] = reinterpret_cast<const uint32_t*>(launch.pieces + where.x)[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 2) piece.side[threadIdx.x].second = launch.second;
  const Side& row = launch.side[0];
  const Side& col = launch.side[1];
  const Tile tile = {where.y * kTile, where.z * kTile, 0};
  const int32_t work = where.w;
  const Position at;
  Patch<BF16> p;
  load_piece(p, piece, tile.row0 + at.row(), tile.col0 + at.col());
  __syncthreads();
  if (work & (kCollect | kCollect << 2)) {
    if constexpr (Row::kEncodes) {
      if (work & kCollect) collect_piece<false>(p, row, piece.side[0], tile, smem, at);
    }
    if constexpr (Col::kEncodes) {
      if (work & kCollect << 2) collect_piece<true>(p, col, piece.side[1], tile, smem, at);
    }
    __syncthreads();
    flush_piece_lines(launch.side, piece.side, work, tile, smem);
  }
  if (!(work & (kEncodePiece | kEncodePiece << 2))) return;
  if constexpr (Row::kTakes4 || Col::kTakes4) {
    const int d = threadIdx.x / 128, code = threadIdx.x % 128;
    if (launch.side[d].present() && launch.side[d].four_bit())
      smem.factors[d][code] = two_level_factor(code, __ldcg(piece.side[d].tensor_amax));
    __syncthreads();
  }
  if constexpr (Row::kEncodes) {
    if (work & kEncodePiece) encode<false, Row>(p, row, piece.side[0], tile, nullptr, nullptr, smem, at);
  }
  if constexpr (Col::kEncodes) {
    if (work & kEncodePiece << 2) encode<true, Col>(p, col, piece.side[1], tile, nullptr, nullptr, smem, at);
  }
  __syncthreads();
  if constexpr (Row::kEncodes) {
    if (work & kEncodePiece && row.byte_scales()) flush_piece_scales<false>(row, piece.side[0], tile, smem.scales[0]);
  }
  if constexpr (Col::kEncodes) {
    if (work & kEncodePiece << 2 && col.byte_scales()) flush_piece_scales<true>(col, piece.side[1], tile, smem.scales[1]);
  }
}

template <class Row, class Col, int MinBlocks>
cudaError_t launch_pieces(const PiecesLaunch& launch, cudaStream_t stream) {
  quantize_pieces_kernel<Row, Col, MinBlocks><<<static_cast<unsigned>(launch.count), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
