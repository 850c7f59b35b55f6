// SPDX-License-Identifier: Apache-2.0
// An 8 x 8 piece of a 128 x 128 tile in the registers of one thread, and largest magnitudes over it.
//
// 256 threads cover a tile: warp w holds rows 16 w to 16 w + 15, lane l the 8 rows from 8 (l / 16) and the 8 columns
// from 8 (l % 16). So a block of 16 rows is a thread and its partner 16 lanes away, one of 16 columns a thread and
// its neighbour, and every load or store of a warp is two whole row segments of the tile.
#pragma once

#include <cstdint>

#include "device/amax.cuh"
#include "device/numeric.cuh"

namespace fsdp_quant {

struct Position {
  int warp, half, chunk;  // chunk: which 8 columns
  __device__ Position() : warp(threadIdx.x >> 5), half((threadIdx.x >> 4) & 1), chunk(threadIdx.x & 15) {}
  __device__ int row() const { return warp * 16 + half * 8; }
  __device__ int col() const { return chunk * 8; }
};

// Value types: what a patch holds.
struct BF16 : MagnitudeWord<false> {
  static constexpr int kWords = 4;  // of 8 values
  static constexpr int kPerWord = 2;
  __device__ static float value(const uint32_t* w, int j) {
    return __uint_as_float(j & 1 ? w[j >> 1] & 0xFFFF0000u : w[j >> 1] << 16);
  }
  __device__ static float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
};

struct F32 : MagnitudeWord<true> {
  static constexpr int kWords = 8;
  static constexpr int kPerWord = 1;
  __device__ static float value(const uint32_t* w, int j) { return __uint_as_float(w[j]); }
  __device__ static float widen(uint32_t bits) { return __uint_as_float(bits); }
};

template <class V>
struct RegisterTile {
  uint32_t w[8][V::kWords];
  __device__ __forceinline__ float operator()(int i, int j) const { return V::value(w[i], j); }
  // The word that holds element (i, j), and which of its bytes has the sign.
  __device__ __forceinline__ uint32_t word(int i, int j) const { return w[i][j / V::kPerWord]; }
  __device__ static constexpr int sign_byte(int j) { return V::kPerWord == 1 || (j & 1) ? 3 : 1; }
};

// One byte of each of four words.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int byte) {
  const uint32_t pick = byte | (4 + byte) << 4;
  return __byte_perm(__byte_perm(a, b, pick), __byte_perm(c, d, pick), 0x5410);
}

// 4-bit codes of 8 magnitudes in the nibbles of a word, the first lowest, without their signs: magnitude(e) in units of the scale;
// threshold(e) as of stochastic_e2m1, which else is not asked. Exceeds: NaNs, and rounded stochastically more than 6.
template <bool Stochastic, bool Exceeds, class Magnitude, class Threshold>
__device__ __forceinline__ uint32_t e2m1_nibbles(Magnitude magnitude, Threshold threshold) {
  uint32_t code[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if constexpr (Stochastic) {
      code[e] = stochastic_e2m1<Exceeds>(magnitude(e), threshold(e));
    } else {
      code[e] = e2m1_magnitude<Exceeds>(magnitude(e));
    }
  }
  constexpr int kByte = Stochastic ? 3 : 0;
  return bytes_of(code[0], code[2], code[4], code[6], kByte) | bytes_of(code[1], code[3], code[5], code[7], kByte) << 4;
}

// Magnitudes of 8 rows or 8 columns, two a word for 16-bit values.
template <class V>
struct Maxima {
  static constexpr int kWords = V::kWords;
  uint32_t w[kWords];

  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (kWords == 8) return V::widen(w[k]);
    return V::widen(k & 1 ? w[k >> 1] >> 16 : w[k >> 1] & 0xFFFFu);
  }
  __device__ __forceinline__ void take(const Maxima& other) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) w[k] = V::larger(w[k], other.w[k]);
  }
  // Over the lanes that differ in these bits of their number.
  __device__ __forceinline__ void across_lanes(int first, int last) {
    for (int lane = first; lane <= last; lane <<= 1) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) w[k] = V::larger(w[k], __shfl_xor_sync(0xFFFFFFFFu, w[k], lane));
    }
  }
  // All eight become their largest.
  __device__ __forceinline__ void level() {
    uint32_t m = w[0];
#pragma unroll
    for (int k = 1; k < kWords; ++k) m = V::larger(m, w[k]);
    if constexpr (kWords == 4) m = V::larger(m, __byte_perm(m, 0, 0x1032));
#pragma unroll
    for (int k = 0; k < kWords; ++k) w[k] = m;
  }
};

template <class V>
__device__ __forceinline__ Maxima<V> col_maxima(const RegisterTile<V>& p) {
  Maxima<V> m;
#pragma unroll
  for (int k = 0; k < V::kWords; ++k) {
    m.w[k] = V::magnitude(p.w[0][k]);
#pragma unroll
    for (int i = 1; i < 8; ++i) m.w[k] = V::larger(m.w[k], V::magnitude(p.w[i][k]));
  }
  return m;
}

template <class V>
__device__ __forceinline__ Maxima<V> row_maxima(const RegisterTile<V>& p) {
  uint32_t row[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    row[i] = V::magnitude(p.w[i][0]);
#pragma unroll
    for (int k = 1; k < V::kWords; ++k) row[i] = V::larger(row[i], V::magnitude(p.w[i][k]));
  }
  Maxima<V> m;
  if constexpr (V::kWords == 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) m.w[i] = row[i];
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      m.w[k] = V::larger(__byte_perm(row[2 * k], row[2 * k + 1], 0x5410), __byte_perm(row[2 * k], row[2 * k + 1], 0x7632));
  }
  return m;
}

// Load: elements beyond the tensor are zero. A kernel holds bf16 (bf16, or fp32 masters rounded once) or fp32 (fp32, or
// fp16, which fp32 holds exactly).
struct LoadBF16 {
  using Value = BF16;
  static constexpr Input kNarrow = Input::kBF16;
  __device__ static void put(uint32_t* w, const uint32_t* raw, bool narrow) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(__uint_as_float(raw[2 * k]), __uint_as_float(raw[2 * k + 1]));
      w[k] = narrow ? raw[k] : *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

struct LoadF32 {
  using Value = F32;
  static constexpr Input kNarrow = Input::kF16;
  __device__ static void put(uint32_t* w, const uint32_t* raw, bool narrow) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const __half2 pair = *reinterpret_cast<const __half2*>(&raw[k / 2]);
      w[k] = narrow ? __float_as_uint(k & 1 ? __high2float(pair) : __low2float(pair)) : raw[k];
    }
  }
};

template <class In, bool Narrow>
__device__ __forceinline__ void load_rows(
    RegisterTile<typename In::Value>& p, const TensorArgs& t, int32_t row0, int32_t col0, int32_t rows) {
  constexpr int kBytes = Narrow ? 2 : 4, kRaw = 2 * kBytes;  // words of 8 elements
  const char* base = static_cast<const char*>(t.x);
  if (t.vector_load && col0 + 8 <= t.cols && row0 >= 0 && row0 + 8 <= rows) {
    uint4 raw[8][kRaw / 4];
    const char* at = base + (static_cast<int64_t>(row0) * t.row_stride + col0) * kBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int k = 0; k < kRaw / 4; ++k) raw[i][k] = ptx::ld_streaming(at + i * t.row_stride * kBytes + 16 * k);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t words[8] = {};
#pragma unroll
      for (int k = 0; k < kRaw / 4; ++k) {
        words[4 * k] = raw[i][k].x, words[4 * k + 1] = raw[i][k].y;
        words[4 * k + 2] = raw[i][k].z, words[4 * k + 3] = raw[i][k].w;
      }
      In::put(p.w[i], words, Narrow);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t words[8] = {};
    const int32_t row = row0 + i;
    if (row >= 0 && row < rows) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (col0 + j >= t.cols) continue;
        const char* at = base + (static_cast<int64_t>(row) * t.row_stride + col0 + j) * kBytes;
        if constexpr (Narrow) {
          words[j / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(at)) << (16 * (j & 1));
        } else {
          words[j] = *reinterpret_cast<const uint32_t*>(at);
        }
      }
    }
    In::put(p.w[i], words, Narrow);
  }
}

template <class In>
__device__ __forceinline__ void load_register_tile(
    RegisterTile<typename In::Value>& p, const TensorArgs& t, Input input, int32_t row0, int32_t col0) {
  if (input == In::kNarrow) {
    load_rows<In, true>(p, t, row0, col0, t.rows);
  } else {
    load_rows<In, false>(p, t, row0, col0, t.rows);
  }
}

// The first `bytes` bytes of two words, one by one: rows that are not aligned, or end early.
__device__ __forceinline__ void store_bytes(uint8_t* at, uint32_t lo, uint32_t hi, int32_t bytes) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < bytes) at[e] = static_cast<uint8_t>((e < 4 ? lo >> (8 * e) : hi >> (8 * (e - 4))) & 0xFFu);
  }
}

// Rows of a 4 x 4 byte matrix (byte j of word i is element (i, j)) become its columns.
__device__ __forceinline__ void transpose4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_lo = __byte_perm(a, b, 0x5140), ab_hi = __byte_perm(a, b, 0x7362);
  const uint32_t cd_lo = __byte_perm(c, d, 0x5140), cd_hi = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_lo, cd_lo, 0x5410), b = __byte_perm(ab_lo, cd_lo, 0x7632);
  c = __byte_perm(ab_hi, cd_hi, 0x5410), d = __byte_perm(ab_hi, cd_hi, 0x7632);
}

// 8 x 8 nibbles in the x of 8 words: halves of words, of halves, of bytes are exchanged in turn.
__device__ __forceinline__ void transpose_nibbles(uint2 (&v)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const uint32_t mask = step == 4 ? 0x0000FFFFu : step == 2 ? 0x00FF00FFu : 0x0F0F0F0Fu;
    const int bits = 4 * step;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const uint32_t upper = v[i].x, lower = v[i + step].x;
      v[i].x = (upper & mask) | ((lower & mask) << bits);
      v[i + step].x = ((upper >> bits) & mask) | (lower & ~mask);
    }
  }
}

// Codes of 8 rows of 8 (two words; 4-bit codes: x alone) to the columns of `flush_transposed`.
template <bool FourBit>
__device__ __forceinline__ void stage_transposed(uint2 (&v)[8], uint4* smem, const Position& at) {
  const int chunk = at.col() * 16 + ((at.warp * 2 + at.half) ^ at.chunk);
  if constexpr (FourBit) {
    transpose_nibbles(v);
#pragma unroll
    for (int k = 0; k < 8; ++k) reinterpret_cast<uint32_t*>(smem)[chunk + k * 16] = v[k].x;
  } else {
    transpose4(v[0].x, v[1].x, v[2].x, v[3].x);
    transpose4(v[4].x, v[5].x, v[6].x, v[7].x);
    transpose4(v[0].y, v[1].y, v[2].y, v[3].y);
    transpose4(v[4].y, v[5].y, v[6].y, v[7].y);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      reinterpret_cast<uint2*>(smem)[chunk + k * 16] =
          k < 4 ? make_uint2(v[k].x, v[k + 4].x) : make_uint2(v[k - 4].y, v[k].y);
  }
}

// A tile of transposed codes from shared memory to [cols, line bytes]: each column is 128 (64) contiguous bytes.
// smem holds columns of 16 chunks of 8 (4) bytes, chunk q of the columns of group g at q ^ g.
template <bool FourBit>
__device__ __forceinline__ void flush_transposed(
    uint8_t* out, bool vector_store, int32_t row0, int32_t col0, int32_t rows, int32_t cols, const uint4* smem) {
  constexpr int kUnits = FourBit ? 4 : 8;
  const int32_t line_bytes = FourBit ? (rows + 1) >> 1 : rows, start = FourBit ? row0 >> 1 : row0;
#pragma unroll
  for (int n = 0; n < kTile * kUnits / kThreads; ++n) {
    const int unit = threadIdx.x % kUnits, column = threadIdx.x / kUnits + n * (kThreads / kUnits);
    if (col0 + column >= cols) continue;
    const int chunk = column / 8;
    const uint4 raw = smem[column * kUnits + (unit ^ (chunk >> (FourBit ? 2 : 1)))];
    uint4 v = raw;
    if constexpr (FourBit) {
      if (chunk & 1) v = make_uint4(v.y, v.x, v.w, v.z);
      if (chunk & 2) v = make_uint4(v.z, v.w, v.x, v.y);
    } else {
      if (chunk & 1) v = make_uint4(v.z, v.w, v.x, v.y);
    }
    const int32_t offset = start + unit * 16;
    uint8_t* address = out + static_cast<int64_t>(col0 + column) * line_bytes + offset;
    if (vector_store && offset + 16 <= line_bytes) {
      *reinterpret_cast<uint4*>(address) = v;
    } else {
      store_bytes(address, v.x, v.y, line_bytes - offset);
      store_bytes(address + 8, v.z, v.w, line_bytes - offset - 8);
    }
  }
}

// Bit k: the sign of element k of a run that is rotated is negative.
constexpr uint32_t kRotationSigns = 0xD7E8u;

// Random Hadamard transform along runs of 16: fp32 butterflies of stride 1, 2, 4, 8 on signed values, times 0.25,
// rounded to bf16 once. Half of each run lies with the neighbour lane (rowwise) or the partner lane (columnwise).
template <bool Columnwise, class V>
__device__ __forceinline__ void rotate(const RegisterTile<V>& p, RegisterTile<BF16>& out, const Position& at) {
  const bool upper = Columnwise ? at.half : at.chunk & 1;
  const uint32_t signs = upper ? kRotationSigns >> 8 : kRotationSigns;
  uint32_t flip[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) flip[e] = (signs >> e & 1) << 31;
  const float last = upper ? -1.0f : 1.0f;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    float y[2][8];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        y[c][e] = __uint_as_float(bits_of(Columnwise ? p(e, k + c) : p(k + c, e)) ^ flip[e]);
#pragma unroll
      for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e & stride) continue;
          const float a = y[c][e], b = y[c][e + stride];
          y[c][e] = __fadd_rn(a, b), y[c][e + stride] = __fsub_rn(a, b);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {  // the lower half adds its partner's, the upper is taken from it
        const float other = __shfl_xor_sync(0xFFFFFFFFu, y[c][e], Columnwise ? 16 : 1);
        y[c][e] = __fmul_rn(__fmaf_rn(y[c][e], last, other), 0.25f);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; e += Columnwise ? 1 : 2) {
#pragma unroll
      for (int c = 0; c < (Columnwise ? 1 : 2); ++c) {
        const __nv_bfloat162 pair =
            Columnwise ? __floats2bfloat162_rn(y[0][e], y[1][e]) : __floats2bfloat162_rn(y[c][e], y[c][e + 1]);
        out.w[Columnwise ? e : k + c][Columnwise ? k / 2 : e / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }
}

}  // namespace fsdp_quant
