// SPDX-License-Identifier: Apache-2.0
// Quantize pieces of tensors that are cut at any element, as the whole tensors are: the tiles of quantize_kernel.cuh, on the
// grid of the whole tensor, with zeros in place of what other ranks hold, whose codes are not written.
//
// A tile lies on the grid of the whole tensor, so blocks that no cut divides are one tile's: where
// a scale needs no more, the first launch encodes them, and the second those of cut block rows
// alone. Masters are read once in those formats, twice in others. A run lies in its segment as in
// its plane modulo 16 bytes, so rows are stored as vectors whatever the cut; masters that begin
// anywhere are read as aligned words around eight values, which are shifted in registers.
//
// 0.97 B parameters, H200 (copy 4.25 TB/s), over a copy of as many bytes: mxfp8 1.29 became 1.00,
// fp8_row 1.25 .99, mxfp8/nvfp4 1.24 1.06, nvfp4 16x16 1.13 1.02. Two loads of 16 bytes that share
// sectors, told not to stay in L1, read everything from L2 twice. Both directions' values in
// registers at once were spilled: codes are stored a line at a time, and what one direction widened is
// hidden from the other. Tiles within a piece look at no edges (`InnerPieceBuffers`). Factors of whole
// lines are made once for a tile, not in each thread. Where a launch encodes both directions the copy
// engine brings the tile (1.01; loads by threads 1.33): rows of 512 bytes at multiples of 128, a
// barrier per warp; a pitch of 528 costs 3 %. With one direction, threads that load for themselves win
// (fp8_block .99, copied 1.09). Blocks that stay and have their next tile copied while they encode
// lost again (fp8_block 1.17): static shares drift pointer_table. Of one rank's eighth, 15 us are the
// second launch, whose few tiles wait for memory and instructions, and 5 the scales.
#pragma once

#include "quantize/pieces_tile.cuh"

namespace fsdp_quant {

// 8 fp32 values that begin at an address, of three aligned words of four, as bf16.
__device__ __forceinline__ void put_shifted(uint32_t (&to)[4], const uint4 (&raw)[3], uint32_t address) {
  const bool two = address & 8, one = address & 4;
  uint32_t w[12] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y,
                    raw[1].z, raw[1].w, raw[2].x, raw[2].y, raw[2].z, raw[2].w};
#pragma unroll
  for (int j = 0; j < 10; ++j) w[j] = two ? w[j + 2] : w[j];
  uint32_t words[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) words[j] = one ? w[j + 1] : w[j];
  LoadBF16::put(to, words, false);
}

// 8 x 8 values of the piece as bf16, zeros around it.
__device__ __forceinline__ void load_piece(RegisterTile<BF16>& p, const Piece& t, int32_t row, int32_t col) {
  const int64_t flat = static_cast<int64_t>(row) * t.cols + col, end = flat + 7 * static_cast<int64_t>(t.cols) + 8;
  const bool wide = !t.narrow, within = col + 8 <= t.cols;
  if (within && t.vectors && flat >= t.first && end <= t.last) {
    if (wide) {
      const auto* at = static_cast<const float*>(t.x) + flat;
      uint4 raw[8][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)  // both loads have half of each sector, so L1 is to keep it
          raw[i][k] = __ldg(reinterpret_cast<const uint4*>(at + static_cast<int64_t>(i) * t.cols + 4 * k));
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
      for (int i = 0; i < 4; ++i) put_shifted(p.w[first + i], raw[i], static_cast<uint32_t>(address(first + i)));
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

constexpr int kPieceBlocks = 3;  // share a multiprocessor
constexpr int kRowPitch = kTile * 4 + 16;  // bytes of a row of values, at most

struct PiecesSmem : TileSmem {
  uint32_t largest[kThreads / 32];
  float target[2];  // two_level_target
  Piece piece;
};

struct CopySmem : PiecesSmem {
  uint64_t barrier[kThreads / 32];  // of the rows that a warp copies, which are those that it reads
  alignas(128) uint8_t values[kTile * kRowPitch];
};
static_assert(kPieceBlocks * (sizeof(CopySmem) + 1024) <= 228 * 1024, "too large for as many blocks");

// The tile lies within the piece. The copy engine takes 16 bytes at a time, so that fp32 rows which are not aligned need
// values of the piece around them.
__device__ __forceinline__ bool is_within(const Piece& t, const Tile& tile) {
  const int32_t around = t.vectors ? 0 : 4;
  const int64_t first = static_cast<int64_t>(tile.row0) * t.cols + tile.col0;
  return tile.row0 + kTile <= t.rows && tile.col0 + kTile <= t.cols && (t.vectors || !t.narrow) &&
         first - around >= t.first && first + static_cast<int64_t>(kTile - 1) * t.cols + kTile + around <= t.last;
}

__device__ __forceinline__ const char* row_of(const Piece& t, const Tile& tile, int row) {
  const int64_t flat = static_cast<int64_t>(tile.row0 + row) * t.cols + tile.col0;
  return static_cast<const char*>(t.x) + flat * (t.narrow ? 2 : 4);
}

// Rows that are not aligned begin anywhere in their first 16 bytes. Others keep to 128 bytes, which is faster.
__device__ __forceinline__ int pitch_of(const Piece& t) { return t.vectors ? kTile * 4 : kRowPitch; }

__device__ __forceinline__ void copy_values(const Piece& t, const Tile& tile, CopySmem& smem) {
  constexpr int kRows = kTile / (kThreads / 32);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, row = warp * kRows + lane;
  const uint32_t barrier = ptx::shared_address(smem.barrier + warp), bytes = kTile * (t.narrow ? 2 : 4) + (t.vectors ? 0 : 16);
  if (lane == 0) ptx::mbarrier_expect(barrier, kRows * bytes);
  if (lane < kRows) {
    const char* from = row_of(t, tile, row);
    from -= reinterpret_cast<uintptr_t>(from) & 15;
    ptx::copy_bytes(ptx::shared_address(smem.values) + row * pitch_of(t), from, bytes, barrier);
  }
  while (!ptx::mbarrier_try_wait(barrier, 0)) {
  }
}

// 8 x 8 values of a tile that was copied.
__device__ __forceinline__ void read_values(
    RegisterTile<BF16>& p, const Piece& t, const Tile& tile, const uint8_t* values, const Position& at) {
  const int pitch = pitch_of(t);
  const uint8_t* from = values + at.row() * pitch + at.col() * (t.narrow ? 2 : 4);
  if (t.narrow) {
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<uint4*>(p.w[i]) = *reinterpret_cast<const uint4*>(from + i * pitch);
  } else if (t.vectors) {
    const int first = at.chunk & 4 ? 16 : 0;  // lanes that are 128 bytes pointer_table begin with other halves: other banks
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 a = *reinterpret_cast<const uint4*>(from + i * pitch + first);
      const uint4 b = *reinterpret_cast<const uint4*>(from + i * pitch + (first ^ 16));
      const uint32_t raw[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      uint32_t w[4];
      LoadBF16::put(w, raw, false);
#pragma unroll
      for (int k = 0; k < 4; ++k) p.w[i][k] = first ? w[k ^ 2] : w[k];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto* words = reinterpret_cast<const uint4*>(from + i * pitch);
      const uint4 raw[3] = {words[0], words[1], words[2]};
      put_shifted(p.w[i], raw, static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row_of(t, tile, at.row() + i))));
    }
  }
}

// What all threads of a tile encode with: factors of lines whose scale spans more than it, a line a thread, and those of
// two-level scales, a code a thread.
template <bool FourBit>
__device__ __forceinline__ void fill_factors(const EncodingSpec (&spec)[2], const Tile& tile, PiecesSmem& smem) {
  const int d = threadIdx.x / kTile, i = threadIdx.x % kTile;
  const EncodingSpec& s = spec[d];
  const PieceBuffers& b = smem.piece.buffers[d];
  const auto spans = [&](const EncodingSpec& one) { return one.present() && one.whole(); };
  if (!FourBit && !spans(spec[0]) && !spans(spec[1])) return;
  if (spans(s)) {
    smem.lines[d][i] = bits_of(d ? line_factor<true>(s, b, tile.col0 + i) : line_factor<false>(s, b, tile.row0 + i));
  } else if (FourBit && s.present() && s.two_level()) {
    const float amax = __ldcg(b.tensor_amax);
    smem.factors[d][i] = two_level_factor(i, amax, s);
    if (i == 0) smem.target[d] = two_level_target(amax, s);
  }
  __syncthreads();
}

// Of a tile that lies within the piece: see InnerPieceBuffers.
template <bool Columnwise>
__device__ __forceinline__ bool is_inner(const EncodingSpec& s, const PieceBuffers& b, const Tile& tile) {
  const int32_t lo = b.early[0], hi = b.early[1], row = tile.row0;
  return b.vectors && !holds_cut<Columnwise>(s, b, tile) &&
         (b.second ? row >= hi || row + kTile <= lo : row >= lo && row + kTile <= hi);
}

template <bool Columnwise, class P>
__device__ __forceinline__ void encode_piece(
    const RegisterTile<BF16>& p, const EncodingSpec& s, const InnerPieceBuffers& b, const Tile& tile, bool within, PiecesSmem& smem, const Position& at) {
  if (within && is_inner<Columnwise>(s, b, tile)) {
    encode<Columnwise, P>(p, s, b, tile, nullptr, nullptr, smem, at);
  } else {
    encode<Columnwise, P>(p, s, static_cast<const PieceBuffers&>(b), tile, nullptr, nullptr, smem, at);
  }
}

// Where both directions are encoded, what a thread does is long, and loads of its own would wait for it. Else they are faster.
template <class Row, class Col>
constexpr bool copies_tiles = Row::kEncodes && Col::kEncodes;

// Of the code that is compiled: bulk copies came with sm_90.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Row, class Col>
constexpr bool copies_here = copies_tiles<Row, Col>;
#else
template <class Row, class Col>
constexpr bool copies_here = false;
#endif

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, kPieceBlocks) quantize_pieces_kernel(const __grid_constant__ PiecesLaunch launch) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  constexpr bool kCopies = copies_here<Row, Col>;
  auto& smem = *reinterpret_cast<std::conditional_t<kCopies, CopySmem, PiecesSmem>*>(dynamic);
  if (launch.skip != nullptr && *launch.skip != 0) return;
  const int thread = threadIdx.x;
  const int4 where = launch.tiles[blockIdx.x];
  Piece& piece = smem.piece;
  constexpr int kWords = sizeof(Piece) / 4, kSecond = offsetof(PieceBuffers, second) / 4;
  static_assert(sizeof(Piece) % 4 == 0 && kWords <= kThreads);
  if (thread < kWords) {
    constexpr int kBuffersAt = offsetof(Piece, buffers) / 4, kBufferWords = sizeof(PieceBuffers) / 4;
    const uint32_t word = reinterpret_cast<const uint32_t*>(launch.pieces + where.x)[thread];
    const bool second = thread == kBuffersAt + kSecond || thread == kBuffersAt + kBufferWords + kSecond;
    reinterpret_cast<uint32_t*>(&piece)[thread] = second ? launch.second : word;
  }
  if constexpr (kCopies) {
    if (thread < kThreads / 32) ptx::mbarrier_init(ptx::shared_address(smem.barrier + thread), 1), ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const Tile tile = {where.y * kTile, where.z * kTile, 0};
  const int32_t work = where.w;
  const Position at;
  RegisterTile<BF16> p;
  const bool within = is_within(piece, tile);
  if (kCopies && within) {
    if constexpr (kCopies) {
      copy_values(piece, tile, smem);
      read_values(p, piece, tile, smem.values, at);
    }
  } else {
    load_piece(p, piece, tile.row0 + at.row(), tile.col0 + at.col());
  }
  if (work & (kCollect | kCollect << 2)) {
    const auto of_tensor = [&](int d) -> float* {
      if (!(work & kCollect << (2 * d))) return nullptr;
      return launch.spec[d].whole_tensor() ? piece.buffers[d].amax : piece.buffers[d].tensor_amax;
    };
    if (of_tensor(0) != nullptr || of_tensor(1) != nullptr) collect_largest(p, smem.largest);
    if (work & kCollect) collect_blocks<false>(p, row, piece.buffers[0], tile, smem, at);
    if (work & kCollect << 2) collect_blocks<true>(p, col, piece.buffers[1], tile, smem, at);
    __syncthreads();
    flush_piece_lines(launch.spec, piece, work, tile, smem);
    if (thread < 2 && of_tensor(thread) != nullptr) {
      uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, smem.largest[w]);
      atomic_max(of_tensor(thread), __uint_as_float(largest));
    }
  }
  if (!(work & (kEncodePiece | kEncodePiece << 2))) return;
  fill_factors<Row::kTakes4 || Col::kTakes4>(launch.spec, tile, smem);
  if constexpr (Row::kEncodes) {
    if (work & kEncodePiece) encode_piece<false, Row>(p, row, piece.buffers[0], tile, within, smem, at);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // else values that both directions widen stay in registers, and others are spilled
#pragma unroll
    for (int k = 0; k < BF16::kWords; ++k) asm volatile("" : "+r"(p.w[i][k]));
  }
  if constexpr (Col::kEncodes) {
    if (work & kEncodePiece << 2) encode_piece<true, Col>(p, col, piece.buffers[1], tile, within, smem, at);
  }
  __syncthreads();
  if constexpr (Row::kEncodes) {
    if (work & kEncodePiece && row.byte_scales()) flush_piece_scales<false>(row, piece.buffers[0], tile, smem.scales[0]);
  }
  if constexpr (Col::kEncodes) {
    if (work & kEncodePiece << 2 && col.byte_scales()) flush_piece_scales<true>(col, piece.buffers[1], tile, smem.scales[1]);
  }
}

template <class Row, class Col>
cudaError_t launch_pieces(const PiecesLaunch& launch, cudaStream_t stream) {
  auto* kernel = quantize_pieces_kernel<Row, Col>;
  int bytes = sizeof(PiecesSmem);
  if constexpr (copies_tiles<Row, Col>) {
    int device = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess && major >= 9) {
      bytes = sizeof(CopySmem);
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(launch.count), kThreads, bytes, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
