// SPDX-License-Identifier: Apache-2.0
// Encode register tiles in 8, 6 or 4 bits, rounded to nearest even or stochastically.
#pragma once

#include <type_traits>

#include "device/philox.cuh"
#include "device/rescale.cuh"
#include "quantize/path.cuh"
#include "quantize/pieces.h"
#include "quantize/tile.cuh"

// emit_codes writes `random` on every path that reads it, in lambdas that the front end does not analyze.
#pragma nv_diag_suppress 549

namespace fsdp_quant {

// Random bytes of this thread's 8 outer lines: byte e of line k belongs to contraction element e.
template <bool Columnwise>
struct RandomLines {
  uint32_t k0, k1, step, stream, line, block;
  int offset;    // of the thread's first element in its block of 16
  bool aligned;  // two threads share each block of 16; false only columnwise if the global row is no multiple of 16

  __device__ RandomLines(const int64_t* memory, const Tile& tile, const Position& at) {
    const RandomKey key(memory);
    const int64_t row = key.row0 + tile.row0 + at.row(), col = key.col0 + tile.col0 + at.col(), along = Columnwise ? row : col;
    k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32);
    step = static_cast<uint32_t>(key.step), stream = stream_of(key, Columnwise);
    line = static_cast<uint32_t>(Columnwise ? col : row), block = static_cast<uint32_t>(along >> 4);
    offset = along & 15;
    aligned = !Columnwise || ((along - at.half * 8) & 15) == 0;
  }

  // Lines k, k + 1, k + 4 and k + 5, for k of 0 and 2: the thread with the other half of the blocks draws two of them.
  __device__ __forceinline__ void draw(uint32_t (&random)[8][2], int k) const {
    const bool upper = offset & 8;
    uint4 drawn[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) drawn[n] = make_uint4(block, line + (upper ? k + n + 4 : k + n), step, stream);
    philox4x32(drawn, k0, k1);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint4 r = drawn[n];
      const uint32_t mine0 = upper ? r.z : r.x, mine1 = upper ? r.w : r.y;
      const uint32_t theirs0 = __shfl_xor_sync(0xFFFFFFFFu, upper ? r.x : r.z, Columnwise ? 16 : 1);
      const uint32_t theirs1 = __shfl_xor_sync(0xFFFFFFFFu, upper ? r.y : r.w, Columnwise ? 16 : 1);
      random[k + n][0] = upper ? theirs0 : mine0, random[k + n][1] = upper ? theirs1 : mine1;
      random[k + n + 4][0] = upper ? mine0 : theirs0, random[k + n + 4][1] = upper ? mine1 : theirs1;
    }
  }

  // All lines, for blocks at any offset.
  __device__ __forceinline__ void draw_unaligned(uint32_t (&random)[8][2]) const {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      uint4 drawn[2] = {make_uint4(block, line + k, step, stream), make_uint4(block + 1, line + k, step, stream)};
      philox4x32(drawn, k0, k1);
      uint32_t lo = 0, hi = 0;
#pragma unroll 1
      for (int e = 0; e < 8; ++e) {
        const int byte = offset + e, word = byte >> 2;
        const uint4 from = word < 4 ? drawn[0] : drawn[1];
        const uint32_t half = word & 2 ? (word & 1 ? from.w : from.z) : (word & 1 ? from.y : from.x);
        (e < 4 ? lo : hi) |= ((half >> (8 * (byte & 3))) & 0xFFu) << (8 * (e & 3));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i == k) random[i][0] = lo, random[i][1] = hi;
      }
    }
  }
};

// Buffers whose codes leave L2 first: rows that are read several times stay.
struct StreamedBuffers : EncodingBuffers {};

// Buffers of a tensor piece, cut at any element: see pieces_kernel.cuh.
template <class Buffers>
constexpr bool kIsPiece = std::is_base_of_v<PieceBuffers, Buffers>;
template <bool FourBit>
__device__ __forceinline__ void store_piece(const uint2 (&v)[8], const PieceBuffers& b, int32_t row, int32_t col,
                                            int32_t cols);
template <bool Columnwise>
__device__ __forceinline__ void read_cut_amaxes(float (&amax)[8], const EncodingSpec& s, const PieceBuffers& b,
                                                const Place& place);
template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const EncodingSpec& s, const PieceBuffers& b, const Place& place);

// Encode factors of the thread's 8 outer lines, and those of their codes (kOfCodes).
struct LineFactors {
  float enc[8];
  CodeFactor<Element::kE4M3> of_codes[8];
};

// Rounding of codes, fixed at compile time.
enum class Rounding { kE4M3, kE4M3Twice, kE5M2, kE2M1, kNearest6, kStochastic8, kStochastic6, kStochastic4 };

// Bits per code, or bytes per eight.
template <Rounding R>
constexpr int kBitsOf = R == Rounding::kE2M1 || R == Rounding::kStochastic4      ? 4
                        : R == Rounding::kNearest6 || R == Rounding::kStochastic6 ? 6
                                                                                  : 8;

// Encode 8 x 8 values, 8 elements per line: rows to memory, transposed columns to shared memory.
template <bool Columnwise, bool Transposed, bool Twin, Rounding R, class V, class Buffers, class Shared>
__device__ __forceinline__ void emit_codes(
    const RegisterTile<V>& p, const LineFactors& f, const EncodingSpec& s, const Buffers& b, const Tile& tile, Shared& smem,
    const Position& at) {
  constexpr bool kFourBit = kBitsOf<R> == 4, kSixBit = kBitsOf<R> == 6;
  constexpr int kBytes = kBitsOf<R>;  // per 8 codes
  const int32_t rows_end = Columnwise ? b.length : b.lines, cols_end = Columnwise ? b.lines : b.length;
  const int32_t row = tile.row0 + at.row(), col = tile.col0 + at.col();
  auto value = [&](int i, int j) { return __fmul_rn(p(i, j), f.enc[Columnwise ? j : i]); };
  uint32_t random[8][2];  // for the outer lines
  auto random_byte = [&](int i, int j) {
    const int k = Columnwise ? j : i, e = Columnwise ? i : j;
    return (random[k][e >> 2] >> (8 * (e & 3))) & 0xFFu;
  };
  // Element e of line k of the output.
  auto row_of = [](int k, int e) { return Transposed ? e : k; };
  auto col_of = [](int k, int e) { return Transposed ? k : e; };
  auto two = [&](int k, int e) -> uint32_t {
    const int i0 = row_of(k, e), j0 = col_of(k, e), i1 = row_of(k, e + 1), j1 = col_of(k, e + 1);
    if constexpr (R == Rounding::kStochastic8) {
      return stochastic_code<8>(value(i0, j0), random_byte(i0, j0), s) | stochastic_code<8>(value(i1, j1), random_byte(i1, j1), s) << 8;
    } else if constexpr (R == Rounding::kStochastic6) {
      return stochastic_code<6>(value(i0, j0), random_byte(i0, j0), s) | stochastic_code<6>(value(i1, j1), random_byte(i1, j1), s) << 6;
    } else if constexpr (R == Rounding::kNearest6) {
      return nearest_code6(value(i0, j0), s) | nearest_code6(value(i1, j1), s) << 6;
    } else if constexpr (R == Rounding::kE5M2) {
      return ptx::cvt_e5m2x2(value(i1, j1), value(i0, j0));
    } else if constexpr (R == Rounding::kE4M3Twice) {
      const CodeFactor<Element::kE4M3> factor(f.of_codes[Columnwise ? j0 : i0], f.of_codes[Columnwise ? j1 : i1]);
      return scaled_pair(ptx::cvt_e4m3x2(value(i1, j1), value(i0, j0)), factor);
    } else {
      return ptx::cvt_e4m3x2(value(i1, j1), value(i0, j0));
    }
  };
  // Sign mask of a line's elements; 0 for NaN blocks, whose codes are +6. One for all lines, or one per line.
  constexpr int kSigns = Transposed == Columnwise ? 8 : 1;
  uint32_t low_signs[kSigns], high_signs[kSigns];
  if constexpr (kFourBit) {
#pragma unroll
    for (int k = 0; k < kSigns; ++k) {
      low_signs[k] = 0x08080808u, high_signs[k] = 0x80808080u;
      if constexpr (kSigns == 8) {
        if (f.enc[k] != f.enc[k]) low_signs[k] = high_signs[k] = 0;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (f.enc[e] != f.enc[e]) (e & 1 ? high_signs : low_signs)[0] &= ~(0xFFu << (8 * (e / 2)));
        }
      }
    }
  }
  // 8 codes of line k: one word of nibbles, 48 bits, or two words of bytes.
  auto line = [&](int k) {
    uint32_t lo = 0, hi = 0;
    const auto end_of_row = [&] {
      const int32_t left = Transposed ? rows_end - row : cols_end - col;
      if (left < 8) lo &= left > 0 ? (1u << (4 * left)) - 1 : 0;  // zero the nibble that pads the last byte
    };
    if constexpr (R == Rounding::kE2M1 && ptx::kHardwareCasts) {
      float v[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = value(row_of(k, e), col_of(k, e));
      lo = ptx::cvt_e2m1x8(v);
      end_of_row();
    } else if constexpr (kFourBit) {
      // Codes and signs are bytes until 8 of them are packed: even elements low, odd ones high.
      const auto magnitude = [&](int e) {
        const int i = row_of(k, e), j = col_of(k, e);
        return __fmul_rn(fabsf(p(i, j)), f.enc[Columnwise ? j : i]);
      };
      const auto threshold = [&](int e) {
        const int i = row_of(k, e), j = col_of(k, e), outer = Columnwise ? j : i, along = Columnwise ? i : j;
        return __byte_perm(random[outer][along >> 2], 0xFB008001u, 0x7054 | (along & 3) << 8);
      };
      uint32_t sign[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) sign[e] = p.word(row_of(k, e), col_of(k, e));
      const int even = RegisterTile<V>::sign_byte(col_of(k, 0)), odd = RegisterTile<V>::sign_byte(col_of(k, 1));
      const int n = kSigns == 8 ? k : 0;
      lo = e2m1_nibbles<R == Rounding::kStochastic4, true>(magnitude, threshold) |
           (bytes_of(sign[0], sign[2], sign[4], sign[6], even) >> 4 & low_signs[n]) |
           (bytes_of(sign[1], sign[3], sign[5], sign[7], odd) & high_signs[n]);
      end_of_row();
    } else if constexpr (kSixBit) {
      const uint32_t middle = two(k, 4);
      lo = two(k, 0) | two(k, 2) << 12 | middle << 24, hi = middle >> 8 | two(k, 6) << 4;
      const int32_t left = cols_end - col;  // zero codes that pad the last container
      if (left < 8) {
        const uint64_t mask = left > 0 ? (uint64_t{1} << (6 * left)) - 1 : 0;
        lo &= static_cast<uint32_t>(mask), hi &= static_cast<uint32_t>(mask >> 32);
      }
    } else {
      lo = two(k, 0) | two(k, 2) << 16;
      hi = two(k, 4) | two(k, 6) << 16;
    }
    return make_uint2(lo, hi);
  };
  auto store = [](void* address, uint2 v) {
    if constexpr (kFourBit) {
      *static_cast<uint32_t*>(address) = v.x;
    } else if constexpr (kSixBit) {
      auto* const halves = static_cast<uint16_t*>(address);
      halves[0] = static_cast<uint16_t>(v.x), halves[1] = static_cast<uint16_t>(v.x >> 16), halves[2] = static_cast<uint16_t>(v.y);
    } else {
      *static_cast<uint2*>(address) = v;
    }
  };
  // Visit the lines in the order in which their random bytes are drawn.
  constexpr bool kRandom = R == Rounding::kStochastic8 || R == Rounding::kStochastic6 || R == Rounding::kStochastic4;
  auto each_line = [&](auto fn) {
    if constexpr (kRandom) {
      const RandomLines<Columnwise> lines(b.key, tile, at);
      if (!lines.aligned) lines.draw_unaligned(random);
      if (kSigns != 8 && lines.aligned) lines.draw(random, 0), lines.draw(random, 2);  // a transposed line needs all
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        if (kSigns == 8 && lines.aligned) lines.draw(random, k);
        fn(k), fn(k + 1), fn(k + 4), fn(k + 5);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) fn(k);
    }
  };
  if constexpr (Transposed) {
    uint8_t* staged =
        reinterpret_cast<uint8_t*>(smem.codes) + (at.col() * 16 + ((at.warp * 2 + at.half) ^ at.chunk)) * kBytes;
    each_line([&](int k) { store(staged + k * 16 * kBytes, line(k)); });
  } else {
    const int32_t row_bytes = kFourBit ? (cols_end + 1) >> 1 : kSixBit ? ((cols_end + 3) >> 2) * 3 : cols_end;
    const int32_t offset = (col >> 3) * kBytes;
    uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + offset;
    if constexpr (std::is_same_v<Buffers, InnerPieceBuffers>) {  // store each line at once: eight would spill
      each_line([&](int k) { store(address, line(k)), address += row_bytes; });
      return;
    }
    uint2 v[8];
    each_line([&](int k) { v[k] = line(k); });
    if constexpr (kIsPiece<Buffers>) {
      store_piece<kFourBit>(v, b, row, col, cols_end);
    } else if (b.vector_store && row >= 0 && row + 8 <= rows_end && col + 8 <= cols_end) {
#pragma unroll
      for (int k = 0; k < 8; ++k, address += row_bytes) {
        if constexpr (std::is_same_v<Buffers, StreamedBuffers>) store_vector<true>(address, v[k]);
        else store(address, v[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k, address += row_bytes) {
        const bool exists = row + k >= 0 && row + k < rows_end;
        if (exists) store_bytes(address, v[k].x, v[k].y, min(row_bytes - offset, kBytes));
        if (kFourBit && !exists) v[k].x = 0;
      }
    }
    if constexpr (Twin) stage_transposed<kFourBit>(v, smem.codes, at);
  }
}

}  // namespace fsdp_quant
