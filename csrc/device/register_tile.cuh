// SPDX-License-Identifier: Apache-2.0
// An 8 x 8 part of a 128 x 128 tile in the registers of one thread, and maxima over it.
//
// 256 threads cover a tile: warp w holds rows 16 w to 16 w + 15, lane l the 8 rows from 8 (l / 16) and the 8 columns from 8
// (l % 16). So a block of 16 rows is a thread and its partner 16 lanes away, a block of 16 columns a thread and its
// neighbour, and every load or store of a warp is two whole row segments of the tile.
#pragma once

#include <cstdint>

#include "device/amax.cuh"
#include "device/numeric.cuh"

namespace fsdp_quant {

struct Position {
  int warp, half, chunk;  // chunk: index of the 8 columns
  __device__ Position() : warp(threadIdx.x >> 5), half((threadIdx.x >> 4) & 1), chunk(threadIdx.x & 15) {}
  __device__ int row() const { return warp * 16 + half * 8; }
  __device__ int col() const { return chunk * 8; }
};

// Value types of a register tile.
struct BF16 : MagnitudeWord<false> {
  static constexpr int kWords = 4;  // per 8 values
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
  // The word of element (i, j), and the index of its sign byte.
  __device__ __forceinline__ uint32_t word(int i, int j) const { return w[i][j / V::kPerWord]; }
  __device__ static constexpr int sign_byte(int j) { return V::kPerWord == 1 || (j & 1) ? 3 : 1; }
};

// Gather one byte of each of four words.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int byte) {
  const uint32_t pick = byte | (4 + byte) << 4;
  return __byte_perm(__byte_perm(a, b, pick), __byte_perm(c, d, pick), 0x5410);
}

// Pack 4-bit codes of 8 magnitudes into a word, the first lowest, without signs. magnitude(e) is in units of the scale;
// threshold(e) as in stochastic_e2m1, only if Stochastic. Exceeds: values may be NaN or, with Stochastic, exceed 6.
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

// Maxima of 8 rows or 8 columns; two per word for 16-bit values.
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
  // Reduce over the lanes whose index differs in these bits.
  __device__ __forceinline__ void across_lanes(int first, int last) {
    for (int lane = first; lane <= last; lane <<= 1) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) w[k] = V::larger(w[k], __shfl_xor_sync(0xFFFFFFFFu, w[k], lane));
    }
  }
  // Set all eight to their maximum.
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

// Loads; elements outside the tensor are zero. Tiles hold bf16 (bf16, or fp32 rounded once) or fp32 (fp32, or fp16, exactly).
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
  constexpr int kBytes = Narrow ? 2 : 4, kRaw = 2 * kBytes;  // words per 8 elements
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

// 16-bit rows `order`[0 .. rows), aligned, with columns in eights.
template <class In>
__device__ __forceinline__ void load_ordered_rows(
    RegisterTile<typename In::Value>& p, const TensorArgs& t, const int64_t* order, int32_t col0, int32_t rows) {
  uint4 raw[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    raw[i] = make_uint4(0, 0, 0, 0);
    if (i >= rows || col0 >= t.cols) continue;
    const int64_t at = static_cast<int32_t>(__ldg(order + i)) * t.row_stride + col0;
    raw[i] = ptx::ld_again(static_cast<const char*>(t.x) + 2 * at);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t words[8] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    In::put(p.w[i], words, true);
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

// Streams: what L2 gives up first.
template <bool Streams, class T>
__device__ __forceinline__ void store_vector(void* at, const T& v) {
  if constexpr (Streams) __stcs(static_cast<T*>(at), v);
  else *static_cast<T*>(at) = v;
}

// Store the first `bytes` bytes of two words one by one: rows that are unaligned or end early.
__device__ __forceinline__ void store_bytes(uint8_t* at, uint32_t lo, uint32_t hi, int32_t bytes) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < bytes) at[e] = static_cast<uint8_t>((e < 4 ? lo >> (8 * e) : hi >> (8 * (e - 4))) & 0xFFu);
  }
}

// Transpose a 4 x 4 byte matrix (byte j of word i is element (i, j)).
__device__ __forceinline__ void transpose4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_lo = __byte_perm(a, b, 0x5140), ab_hi = __byte_perm(a, b, 0x7362);
  const uint32_t cd_lo = __byte_perm(c, d, 0x5140), cd_hi = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_lo, cd_lo, 0x5410), b = __byte_perm(ab_lo, cd_lo, 0x7632);
  c = __byte_perm(ab_hi, cd_hi, 0x5410), d = __byte_perm(ab_hi, cd_hi, 0x7632);
}

// Transpose 8 x 8 nibbles in the x of 8 words: exchange halves of words, then of halves, then of bytes.
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

// Stage codes of 8 rows of 8 (two words; 4-bit codes: x only) for `flush_transposed`.
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

// Store a tile of transposed codes from shared memory to [cols, line bytes]: each column is 128 (64) contiguous bytes. A
// column in smem is 16 chunks of 8 (4) bytes; chunk q is stored at q ^ (column / 8).
template <bool FourBit, bool Streams = false>
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
      store_vector<Streams>(address, v);
    } else {
      store_bytes(address, v.x, v.y, line_bytes - offset);
      store_bytes(address + 8, v.z, v.w, line_bytes - offset - 8);
    }
  }
}

// Bit k: element k of a rotated block is negated.
constexpr uint32_t kRotationSigns = 0xD7E8u;

// Random Hadamard transform along blocks of 16: fp32 butterflies of stride 1, 2, 4, 8 on signed values, times 0.25, rounded
// to bf16 once. Half of each block is held by the neighbour lane (rowwise) or partner lane (columnwise).
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
      for (int e = 0; e < 8; ++e) {  // the lower half adds, the upper subtracts
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
