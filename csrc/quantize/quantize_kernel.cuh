// Quantize [rows, cols] into one or both directions, each with its own format, in one read.
//
//   amax    = largest |x| of a block                     reduced in registers, then lanes, then warps; or given
//   enc     = encode factor of the STORED scale          see device/numeric.cuh
//   element = saturating round of x * enc                to nearest even, or stochastically
//
// Bit-exact with fsdp_quant/ops/reference.py. Blocks lie on the grid of the global tensor: `shift` places the first row
// in it, so that a shard's tiles are the whole tensor's. Statistics that leave a tile (whole rows, whole tensors,
// anchors) are collected by integer atomic maxima in a statistics phase, which is a launch of its own for large
// tensors, and the same launch behind a grid barrier where every tile has a resident block.
// Block: 256 threads, a tile of 128 x 128 in registers (device/patch.cuh). Shared memory holds maxima that cross warps,
// transposed codes and one-byte scales. Tails are masked, never read or written.
#pragma once

#include "device/patch.cuh"
#include "device/philox.cuh"

namespace fsdp_quant {

// What a kernel instance may be asked for in one direction; each adds to the one before it, and needs more registers.
//   kStatistics        amaxes only
//   kPlain             scales from this tile or given, rounding to nearest; 8 or 4 bits by kBits
//   kFull              also stochastic rounding, rotation (4 bits), anchors and delayed scaling (8 bits)
enum class Work { kAbsent, kStatistics, kPlain, kFull };

template <Work W, int Bits = 0>
struct Path {
  static constexpr Work kWork = W;
  static constexpr bool kFull = W == Work::kFull, kTakes4 = Bits == 4, kTakes8 = Bits == 8;
};
using Absent = Path<Work::kAbsent>;
using Statistics = Path<Work::kStatistics>;
using Plain8 = Path<Work::kPlain, 8>;
using Plain4 = Path<Work::kPlain, 4>;
using Full8 = Path<Work::kFull, 8>;
using Full4 = Path<Work::kFull, 4>;

template <auto Value>
struct Constant {
  static constexpr auto value = Value;
};

struct Smem {
  uint32_t maxima[8][16][8];  // [warp][group of columns][word]
  uint4 codes[kTile * 8];     // [column][128 bytes], 8-byte chunks swizzled
  uint8_t scales[2][kTile][8];
  uint32_t guard[2];          // nonzero blocks << 16 | blocks far below their anchor
};

// Where a thread's patch lies along one direction: its first line and contraction element in the tensor (negative before
// a shard's first row), and what places those on the block grid.
struct Place {
  int32_t line, along;
  int32_t line_shift, along_shift;

  __device__ int32_t line_block(const Side& s, int32_t l) const {
    return ((l + line_shift) >> s.outer_log2) - (line_shift >> s.outer_log2);
  }
  __device__ int32_t block(int32_t log2, int32_t a) const { return ((a + along_shift) >> log2) - (along_shift >> log2); }
};

struct Tile {
  int32_t row0, col0;  // of its first element, in the tensor: row0 may be negative
  int32_t shift;

  template <bool Columnwise>
  __device__ Place place(const Position& at) const {
    const int32_t row = row0 + at.row(), col = col0 + at.col();
    return Columnwise ? Place{col, row, 0, shift} : Place{row, col, shift, 0};
  }
};

__device__ __forceinline__ int64_t index_of(const Grid& g, int32_t line_block, int32_t block) {
  return static_cast<int64_t>(line_block) * g.line_stride + static_cast<int64_t>(block) * g.block_stride;
}

template <class V>
__device__ __forceinline__ void across_warps(Maxima<V>& m, Smem& smem, const Position& at, int warps) {
  __syncthreads();  // an earlier use of smem.maxima
  if (at.half == 0) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) smem.maxima[at.warp][at.group][k] = m.w[k];
  }
  __syncthreads();
  const int first = at.warp / warps * warps;
  for (int other = first; other < first + warps; ++other) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) m.w[k] = V::larger(m.w[k], smem.maxima[other][at.group][k]);
  }
}

// Magnitudes of the 8 outer lines of this thread, each over its block; blocks wider than a tile: over the tile.
// A block of several outer lines gives all of them its own.
template <bool Columnwise, class V>
__device__ __forceinline__ Maxima<V> block_maxima(
    const Patch<V>& p, int outer, int contraction, Smem& smem, const Position& at) {
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

// This thread writes for its outer lines: one thread of the block along the contraction, if it lies in the tile.
template <bool Columnwise>
__device__ __forceinline__ bool leads_block(int contraction, const Position& at) {
  const int span = contraction == 16 ? 2 : contraction == 32 ? 4 : 16;  // threads of a block, rowwise
  return Columnwise ? at.half == 0 && at.warp % (span / 2) == 0 : at.group % span == 0;
}

__device__ __forceinline__ void atomic_max(float* address, float v) {
  const uint32_t bits = bits_of(v) > 0x7F800000u ? 0x7FC00000u : bits_of(v);
  atomicMax(reinterpret_cast<uint32_t*>(address), bits);
}

// Statistics of one direction. Threads outside the tensor take part in what crosses lanes, and write nothing.
template <bool Columnwise, class V>
__device__ __forceinline__ void collect(
    const Patch<V>& p, const Side& s, const SideBuffers& b, const Tile& tile, Smem& smem, const Position& at) {
  if (b.amax != nullptr && !b.amax_given) {
    const Maxima<V> m = block_maxima<Columnwise>(p, s.outer, s.contraction, smem, at);
    const Place place = tile.place<Columnwise>(at);
    if (s.whole_tensor()) {
      if (threadIdx.x == 0) atomic_max(b.amax, m[0]);
    } else if (leads_block<Columnwise>(s.contraction, at)) {
      const bool atomic = s.contraction == 0 || s.contraction > kTile;
      const int32_t size = atomic ? kTile : s.contraction;  // along the contraction, in this tile
      const bool inside = place.along < b.length && place.along + size > 0;
      const int32_t block = place.block(s.contraction_log2, max(place.along, 0));
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int32_t line = place.line + k;
        const bool first = s.outer <= 1 || ((line + place.line_shift) & (s.outer - 1)) == 0;  // of its block
        if (!inside || !first || line >= b.lines || line + max(s.outer, 1) <= 0) continue;
        float* address = b.amax + index_of(b.compact, place.line_block(s, max(line, 0)), block);
        if (atomic) {
          atomic_max(address, m[k]);
        } else {
          *address = m[k];
        }
      }
    }
  }
  if (b.tensor_amax != nullptr && !b.tensor_amax_given) {
    const Maxima<V> m = block_maxima<Columnwise>(p, 0, 0, smem, at);
    if (threadIdx.x == 0) atomic_max(b.tensor_amax, m[0]);
  }
}

// Random bytes of the 8 outer lines of this thread: byte e of line k is of contraction element e.
template <bool Columnwise>
__device__ __forceinline__ void random_bytes(
    uint32_t (&random)[8][2], const int64_t* memory, const Tile& tile, const Position& at) {
  const RandomKey key = {memory[0], memory[1], memory[2], memory[3], memory[4]};
  const uint32_t stream = stream_of(key, Columnwise), step = static_cast<uint32_t>(key.step);
  const uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32);
  const int64_t row = key.row0 + tile.row0 + at.row(), col = tile.col0 + at.col();
  const int64_t along = Columnwise ? row : col;
  const uint32_t line = static_cast<uint32_t>(Columnwise ? col : row), run = static_cast<uint32_t>(along >> 4);
  auto draw = [&](uint32_t block, int k) { return philox4x32(make_uint4(block, line + k, step, stream), k0, k1); };
  if (!Columnwise || ((along - at.half * 8) & 15) == 0) {
    // The thread that holds the other half of the run draws four of the eight lines.
    const bool upper = along & 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 r = draw(run, upper ? k + 4 : k);
      const uint32_t mine0 = upper ? r.z : r.x, mine1 = upper ? r.w : r.y;
      const uint32_t theirs0 = __shfl_xor_sync(0xFFFFFFFFu, upper ? r.x : r.z, Columnwise ? 16 : 1);
      const uint32_t theirs1 = __shfl_xor_sync(0xFFFFFFFFu, upper ? r.y : r.w, Columnwise ? 16 : 1);
      random[k][0] = upper ? theirs0 : mine0, random[k][1] = upper ? theirs1 : mine1;
      random[k + 4][0] = upper ? mine0 : theirs0, random[k + 4][1] = upper ? mine1 : theirs1;
    }
    return;
  }
  const int offset = along & 15;  // columnwise, and the global row of the first row is not a multiple of 16
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const uint4 a = draw(run, k), b = offset > 8 ? draw(run + 1, k) : a;
    uint32_t lo = 0, hi = 0;
#pragma unroll 1
    for (int e = 0; e < 8; ++e) {
      const int byte = offset + e, word = byte >> 2;
      const uint4 from = word < 4 ? a : b;
      const uint32_t half = word & 2 ? (word & 1 ? from.w : from.z) : (word & 1 ? from.y : from.x);
      const uint32_t value = (half >> (8 * (byte & 3))) & 0xFFu;
      (e < 4 ? lo : hi) |= value << (8 * (e & 3));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i == k) random[i][0] = lo, random[i][1] = hi;
    }
  }
}

// fp32 scales of a tile: one thread along the contraction for each line, or one for the tile.
template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const Side& s, const SideBuffers& b, const Place& place, bool is_anchored) {
  const int32_t outer = is_anchored ? 1 : s.outer, log2 = is_anchored ? s.anchor_log2 : s.contraction_log2;
  const int32_t grid = place.along + place.along_shift;  // the tile's first, along the contraction
  if (log2 == 31 ? grid != 0 : grid & ((1 << log2) - 1)) return;  // an earlier tile of the block writes
  if (outer != 1 && (threadIdx.x != 0 || (outer == 0 && place.line + place.line_shift != 0))) return;
  auto* scale = static_cast<uint32_t*>(b.scale);
  const int32_t block = place.block(log2, max(place.along, 0));
  const int32_t blocks = is_anchored ? b.anchors.blocks : b.compact.blocks;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k > 0 && outer != 1) break;
    const int32_t line = outer == 1 ? place.line + k : max(place.line, 0);
    const int32_t line_block = is_anchored ? line : place.line_block(s, line);
    if (line < 0 || line_block >= b.stored.lines) continue;
    scale[index_of(b.stored, line_block, block)] = line < b.lines ? stored[k] : 0;
    for (int32_t pad = blocks; block == blocks - 1 && pad < b.stored.blocks; ++pad) scale[index_of(b.stored, line_block, pad)] = 0;
  }
}

// Two 8-bit codes times 2^-d each, encoded again: the bytes of an anchored operand.
__device__ __forceinline__ uint32_t anchored(uint32_t two, __half2 factors, bool e5m2) {
  if (e5m2) return ptx::cvt_e5m2x2_f16x2(__hmul2(ptx::cvt_f16x2_e5m2x2(two), factors));
  return ptx::cvt_e4m3x2_f16x2(__hmul2(ptx::cvt_f16x2_e4m3x2(two), factors));
}

// 2^-d in fp16, for d of 0 to 24.
__device__ __forceinline__ __half power_below(uint32_t d) {
  return __ushort_as_half(static_cast<uint16_t>(d < 15 ? (15 - d) << 10 : 1u << (24 - d)));
}

// What turns the values of a patch into codes: factors and random bytes of its 8 outer lines.
struct LineFactors {
  float enc[8];
  uint32_t random[8][2];
  __half anchor[8];
};

// How codes are rounded: the parts of a side that the inner loop is compiled for.
enum class Rounding { kE4M3, kE5M2, kE2M1, kStochastic8, kStochastic4, kAnchored };

template <Rounding R>
constexpr bool kIsFourBit = R == Rounding::kE2M1 || R == Rounding::kStochastic4;

// Bit 4 k + 3 of the result: bit k of the argument.
__device__ __forceinline__ uint32_t sign_nibbles(uint32_t bits) {
  bits = (bits | bits << 12) & 0x000F000Fu;
  bits = (bits | bits << 6) & 0x03030303u;
  return ((bits | bits << 3) & 0x11111111u) << 3;
}

// Codes of 8 x 8 values, 8 elements a line: rows to memory, transposed columns to shared memory.
template <bool Columnwise, bool Transposed, Rounding R, class V>
__device__ __forceinline__ void emit_codes(
    const Patch<V>& p, const LineFactors& f, const Side& s, const SideBuffers& b, const Tile& tile, Smem& smem,
    const Position& at) {
  constexpr bool kFourBit = kIsFourBit<R>;
  constexpr int kBytes = kFourBit ? 4 : 8;  // of 8 codes
  const int32_t rows_end = Columnwise ? b.length : b.lines, cols_end = Columnwise ? b.lines : b.length;
  const int32_t row = tile.row0 + at.row(), col = tile.col0 + at.col();
  auto value = [&](int i, int j) { return __fmul_rn(p(i, j), f.enc[Columnwise ? j : i]); };
  auto random = [&](int i, int j) {
    const int k = Columnwise ? j : i, e = Columnwise ? i : j;
    return (f.random[k][e >> 2] >> (8 * (e & 3))) & 0xFFu;
  };
  // Element e of line k of the output.
  auto row_of = [](int k, int e) { return Transposed ? e : k; };
  auto col_of = [](int k, int e) { return Transposed ? k : e; };
  auto two = [&](int k, int e) -> uint32_t {
    const int i0 = row_of(k, e), j0 = col_of(k, e), i1 = row_of(k, e + 1), j1 = col_of(k, e + 1);
    if constexpr (R == Rounding::kStochastic8) {
      return stochastic_code<false>(value(i0, j0), random(i0, j0), s) |
             stochastic_code<false>(value(i1, j1), random(i1, j1), s) << 8;
    } else if constexpr (R == Rounding::kE5M2) {
      return ptx::cvt_e5m2x2(value(i1, j1), value(i0, j0));
    } else if constexpr (R == Rounding::kAnchored) {
      const bool e5m2 = s.element == Element::kE5M2;
      const uint32_t codes = e5m2 ? ptx::cvt_e5m2x2(value(i1, j1), value(i0, j0)) : ptx::cvt_e4m3x2(value(i1, j1), value(i0, j0));
      return anchored(codes, __halves2half2(f.anchor[Columnwise ? j0 : i0], f.anchor[Columnwise ? j1 : i1]), e5m2);
    } else {
      return ptx::cvt_e4m3x2(value(i1, j1), value(i0, j0));
    }
  };
  // 8 codes of line k: one word of nibbles, or two of bytes.
  auto line = [&](int k) {
    uint32_t lo = 0, hi = 0;
    if constexpr (R == Rounding::kE2M1) {
      // Codes are shifted in from the last; what their words hold above the code is one known sum.
      constexpr uint32_t kRest = kE2M1Rest * 0x11111111u;
      uint32_t signs = 0, nan = 0;
#pragma unroll
      for (int e = 7; e >= 0; --e) {
        const int i = row_of(k, e), j = col_of(k, e);
        const float v = p(i, j), factor = f.enc[Columnwise ? j : i];
        lo = lo * 16 + e2m1_magnitude(__fmul_rn(fabsf(v), factor));
        signs = __funnelshift_l(bits_of(v), signs, 1);
        if (Transposed == !Columnwise) nan |= (factor != factor) << e;
      }
      if (Transposed == Columnwise) nan = f.enc[k] != f.enc[k] ? 0xFFu : 0;
      lo = (lo - kRest) | sign_nibbles(signs & ~nan);  // the +6 of a NaN block has no sign
      const int32_t left = Transposed ? rows_end - row : cols_end - col;
      if (left < 8) lo &= left > 0 ? (1u << (4 * left)) - 1 : 0;  // the nibble that fills the last byte is zero
    } else if constexpr (R == Rounding::kStochastic4) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = row_of(k, e), j = col_of(k, e);
        lo |= stochastic_code<true>(value(i, j), random(i, j), s) << (4 * e);
      }
      const int32_t left = Transposed ? rows_end - row : cols_end - col;
      if (left < 8) lo &= left > 0 ? (1u << (4 * left)) - 1 : 0;
    } else {
      lo = two(k, 0) | two(k, 2) << 16;
      hi = two(k, 4) | two(k, 6) << 16;
    }
    return make_uint2(lo, hi);
  };
  auto store = [](void* address, uint2 v) {
    if constexpr (kFourBit) {
      *static_cast<uint32_t*>(address) = v.x;
    } else {
      *static_cast<uint2*>(address) = v;
    }
  };
  if constexpr (Transposed) {
    uint8_t* staged = reinterpret_cast<uint8_t*>(smem.codes) + (at.col() * 16 + ((at.warp * 2 + at.half) ^ at.group)) * kBytes;
#pragma unroll
    for (int k = 0; k < 8; ++k) store(staged + k * 16 * kBytes, line(k));
  } else {
    const int32_t row_bytes = kFourBit ? (cols_end + 1) >> 1 : cols_end, offset = kFourBit ? col >> 1 : col;
    uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + offset;
    const bool inside = b.vector_store && row >= 0 && row + 8 <= rows_end && col + 8 <= cols_end;
#pragma unroll
    for (int k = 0; k < 8; ++k, address += row_bytes) {
      const uint2 v = line(k);
      if (inside) {
        store(address, v);
      } else if (row + k >= 0 && row + k < rows_end) {
        store_bytes(address, v.x, v.y, min(row_bytes - offset, kBytes));
      }
    }
  }
}

// Encode one direction: scales and codes go to memory, transposed codes and one-byte scales to shared memory.
template <bool Columnwise, class P, class V>
__device__ __forceinline__ void encode(
    const Patch<V>& p, const Side& s, const SideBuffers& b, const Tile& tile, int32_t tiles, Smem& smem,
    const Position& at) {
  constexpr bool kFull8 = P::kFull && P::kTakes8;
  const Place place = tile.place<Columnwise>(at);
  const bool one_block = s.outer != 1;  // the thread's lines share their block
  const bool reads_amax = b.amax_given || s.whole();
  const bool delayed = kFull8 && b.enc != nullptr, is_anchored = kFull8 && b.anchor != nullptr;

  float amax[8];
  if (!reads_amax || delayed) {
    const Maxima<V> m = block_maxima<Columnwise>(p, s.outer, s.contraction, smem, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) amax[k] = m[k];
  }
  const float tile_amax = amax[0];
  const int32_t inside = max(min(place.along + 7, b.length - 1), 0);  // in the block, if the thread is
  if (reads_amax) {
    const int32_t block = place.block(s.contraction_log2, inside);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k > 0 && one_block) continue;
      const int32_t line = max(min(place.line + k, b.lines - 1), 0);
      amax[k] = __ldcg(b.amax + index_of(b.compact, place.line_block(s, line), block));
    }
  }

  LineFactors f;
  uint32_t stored[8];
  auto scales = [&](auto scale_of) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k > 0 && one_block) {
        f.enc[k] = f.enc[0], stored[k] = stored[0];
        continue;
      }
      const BlockScale scale = scale_of(amax[k]);
      f.enc[k] = scale.enc, stored[k] = scale.stored;
    }
  };
  if constexpr (P::kTakes4) {
    const TensorScale tensor = tensor_scale(__ldcg(b.tensor_amax));
    const bool round_up = P::kFull && s.stochastic;
    scales([&](float a) { return two_level_scale(a, tensor, round_up); });
  } else if (s.byte_scales()) {
    scales([&](float a) { return e8m0_scale(a, s); });
  } else {
    scales([&](float a) { return fp32_scale(a, s); });
  }

  uint32_t nonzero = 0, far = 0;
  if constexpr (kFull8) {
    if (delayed && __ldcg(b.enc) > 0.0f) {
      const uint32_t bits = bits_of(__ldcg(b.enc));
#pragma unroll
      for (int k = 0; k < 8; ++k) f.enc[k] = __uint_as_float(s.scale == ScaleKind::kFp32Pow2 ? bits & 0x7F800000u : bits);
    }
    if (is_anchored) {
      const int32_t run = place.block(s.anchor_log2, inside);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int32_t line = min(place.line + k, b.lines - 1);
        const uint32_t anchor = e8m0_code(__ldcg(b.anchor + index_of(b.anchors, line, run)), s);
        const uint32_t below = anchor - stored[k];
        const bool counts = amax[one_block ? 0 : k] > 0.0f && place.line + k < b.lines && place.along < b.length;
        f.anchor[k] = power_below(min(below, 24u));
        nonzero += counts, far += counts && below > 9;
        stored[k] = bits_of(power_of_two(anchor));
      }
    }
  }

  const bool leads = leads_block<Columnwise>(s.contraction, at);
  if constexpr (kFull8) {
    if (is_anchored && b.guard != nullptr) {
      // At most 2 * 128 * 8 blocks a tile: both counts fit one word until the tile's sum goes to memory.
      const uint32_t counts = __reduce_add_sync(0xFFFFFFFFu, leads ? nonzero << 16 | far : 0);
      if ((threadIdx.x & 31) == 0 && counts != 0) atomicAdd(&smem.guard[Columnwise], counts);
    }
    if (delayed && threadIdx.x == 0) {  // the tile that comes last knows the tensor's amax
      atomic_max(b.amax, tile_amax);
      __threadfence();
      if (atomicAdd(b.counter, 1u) == static_cast<uint32_t>(tiles) - 1) {
        __threadfence();
        *static_cast<float*>(b.scale) = is_finite(__ldcg(b.amax)) ? __fdiv_rn(1.0f, f.enc[0]) : quiet_nan();
      }
    }
  }
  if (s.byte_scales() && !is_anchored) {
    if (leads) {
      const int block = (Columnwise ? at.row() : at.col()) / s.contraction;
      const int line = Columnwise ? at.col() : at.row();
#pragma unroll
      for (int k = 0; k < 8; ++k) smem.scales[Columnwise][line + k][block] = static_cast<uint8_t>(stored[k]);
    }
  } else if (!delayed && leads_block<Columnwise>(kTile, at)) {
    store_fp32_scales<Columnwise>(stored, s, b, place, is_anchored);
  }

  auto emit = [&](auto transposed) {
    constexpr bool kTransposed = decltype(transposed)::value;
    auto run = [&](auto rounding) {
      emit_codes<Columnwise, kTransposed, decltype(rounding)::value>(p, f, s, b, tile, smem, at);
    };
    if constexpr (P::kFull) {
      if (s.stochastic) {
        random_bytes<Columnwise>(f.random, b.key, tile, at);
        return run(Constant<P::kTakes4 ? Rounding::kStochastic4 : Rounding::kStochastic8>());
      }
    }
    if constexpr (P::kTakes4) {
      run(Constant<Rounding::kE2M1>());
    } else {
      if constexpr (P::kFull) {
        if (is_anchored) return run(Constant<Rounding::kAnchored>());
      }
      s.element == Element::kE5M2 ? run(Constant<Rounding::kE5M2>()) : run(Constant<Rounding::kE4M3>());
    }
  };
  if constexpr (Columnwise) {
    if (s.transposed) return emit(Constant<true>());
  }
  emit(Constant<false>());
}

// One-byte scales from shared memory.
template <bool Columnwise>
__device__ __forceinline__ void flush_scales(const Side& s, const SideBuffers& b, const Tile& tile, const Smem& smem) {
  auto* out = static_cast<uint8_t*>(b.scale);
  const Place place = Columnwise ? Place{tile.col0, tile.row0, 0, tile.shift} : Place{tile.row0, tile.col0, tile.shift, 0};
  const int32_t in_tile = kTile >> s.contraction_log2, first_line = place.line + place.line_shift;
  const int32_t first_block = ((place.along + place.along_shift) >> s.contraction_log2) - (place.along_shift >> s.contraction_log2);
  if (s.scale_layout == ScaleLayout::kBlackwell) {
    const int32_t tile_cols = (b.compact.blocks + 3) >> 2;
    for (int u = threadIdx.x; u < kTile * (in_tile >> 2); u += kThreads) {
      const int32_t line = u & (kTile - 1), local = u / kTile * 4, block = first_block + local;
      if (block >= tile_cols * 4) continue;
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (block + e < b.compact.blocks && first_line + line < b.lines)
          word |= static_cast<uint32_t>(smem.scales[Columnwise][line][local + e]) << (8 * e);
      }
      const int64_t base = (static_cast<int64_t>(first_line / kTile) * tile_cols + block / 4) * 512;
      *reinterpret_cast<uint32_t*>(out + base + line % 32 * 16 + line / 32 * 4) = word;
    }
    return;
  }
  // Neighbouring threads write neighbouring bytes: along the blocks of a line, or along the lines of a block.
  const bool by_line = b.stored.block_stride == 1;
  const int32_t in_tile_log2 = 7 - s.contraction_log2;
  if (by_line && s.outer == 1 && in_tile >= 4 && (b.stored.line_stride & 3) == 0 && first_block + in_tile <= b.compact.blocks) {
    const int32_t words = in_tile >> 2;
    for (int u = threadIdx.x; u < kTile * words; u += kThreads) {
      const int32_t line = words == 2 ? u >> 1 : u, word = words == 2 ? u & 1 : 0, l = place.line + line;
      if (l < 0 || l >= b.lines) continue;
      *reinterpret_cast<uint32_t*>(out + index_of(b.stored, l, first_block + word * 4)) =
          *reinterpret_cast<const uint32_t*>(&smem.scales[Columnwise][line][word * 4]);
    }
    return;
  }
  for (int u = threadIdx.x; u < kTile * in_tile; u += kThreads) {
    const int32_t line = by_line ? u >> in_tile_log2 : u & (kTile - 1), local = by_line ? u & (in_tile - 1) : u / kTile;
    if ((first_line + line) & (s.outer - 1)) continue;
    const int32_t line_block = ((first_line + line) >> s.outer_log2) - (place.line_shift >> s.outer_log2);
    const int32_t block = first_block + local;
    if (line_block < 0 || line_block >= b.compact.lines || block < 0 || block >= b.compact.blocks) continue;
    out[index_of(b.stored, line_block, block)] = smem.scales[Columnwise][line][local];
  }
}

__device__ __forceinline__ void grid_barrier(uint32_t* barrier, uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t generation = ptx::ld_acquire(barrier + 1);
    __threadfence();
    if (atomicAdd(barrier, 1u) == blocks - 1) {
      atomicExch(barrier, 0u);
      __threadfence();
      atomicAdd(barrier + 1, 1u);
    } else {
      while (ptx::ld_acquire(barrier + 1) == generation) __nanosleep(20);
    }
    __threadfence();
  }
  __syncthreads();
}

// No statistics are wanted of this direction: it is absent, or its scale comes from a history.
__device__ __forceinline__ bool needs_none(const Side& s, const SideBuffers& b) {
  return !s.present() || (b.enc != nullptr && __ldcg(b.enc) > 0.0f);
}

// Statistics, or codes, of one direction; rotated values are made where they are needed.
template <bool Columnwise, class P, class V>
__device__ __forceinline__ void run_side(
    bool statistics, const Patch<V>& p, const Side& s, const SideBuffers& b, const Tile& tile, int32_t tiles, Smem& smem,
    const Position& at) {
  if constexpr (P::kWork == Work::kAbsent) {
    return;
  } else {
    if (!s.present()) return;
    auto work = [&](const auto& patch) {
      if constexpr (P::kWork == Work::kStatistics) {
        collect<Columnwise>(patch, s, b, tile, smem, at);
      } else {
        if constexpr (P::kFull) {
          if (statistics) return collect<Columnwise>(patch, s, b, tile, smem, at);
        }
        encode<Columnwise, P>(patch, s, b, tile, tiles, smem, at);
      }
    };
    if constexpr (P::kWork == Work::kStatistics || (P::kFull && P::kTakes4)) {
      if (s.rotated) {
        Patch<BF16> turned;
        rotate<Columnwise>(p, turned, at);
        return work(turned);
      }
    }
    work(p);
  }
}

template <class In, class Row, class Col, int Capacity, int MinBlocks>
__global__ void __launch_bounds__(kThreads, MinBlocks) quantize_kernel(const __grid_constant__ Launch<Capacity> launch) {
  __shared__ Smem smem;
  const Position at;
  const Side& row = launch.side[0];
  const Side& col = launch.side[1];
  const int32_t n = launch.reversed ? launch.tiles - 1 - static_cast<int32_t>(blockIdx.x) : blockIdx.x;
  int which = 0;
  if constexpr (Capacity > 1) {
    for (int low = 0, high = launch.count; high - low > 1;) {
      const int middle = (low + high) / 2;
      (launch.tensors[middle].first_tile <= n ? low : high) = middle;
      which = low;
    }
  }
  const TensorArgs& t = launch.tensors[which];
  const int32_t local = n - t.first_tile, tile_row = local / t.tile_cols;
  const Tile tile = {tile_row * kTile - t.shift, (local - tile_row * t.tile_cols) * kTile, t.shift};

  constexpr bool kOnlyStatistics = Row::kWork == Work::kStatistics;
  if constexpr (kOnlyStatistics) {
    if (needs_none(row, t.side[0]) && needs_none(col, t.side[1])) return;
  }
  Patch<typename In::Value> p;
  load_patch<In>(p, t, launch.input, tile.row0 + at.row(), tile.col0 + at.col());
  if constexpr (kOnlyStatistics || Row::kFull || Col::kFull) {
    if (launch.phases & kStatistics) {
      run_side<false, Row>(true, p, row, t.side[0], tile, launch.tiles, smem, at);
      run_side<true, Col>(true, p, col, t.side[1], tile, launch.tiles, smem, at);
    }
  }
  if constexpr (!kOnlyStatistics) {
    if constexpr (Row::kFull || Col::kFull) {
      if (launch.barrier != nullptr) grid_barrier(launch.barrier, gridDim.x);
    }
    constexpr bool kGuards = (Row::kFull && Row::kTakes8) || (Col::kFull && Col::kTakes8);
    if constexpr (kGuards) {
      if (threadIdx.x < 2) smem.guard[threadIdx.x] = 0;
      __syncthreads();
    }
    run_side<false, Row>(false, p, row, t.side[0], tile, launch.tiles, smem, at);
    run_side<true, Col>(false, p, col, t.side[1], tile, launch.tiles, smem, at);
    __syncthreads();
    if constexpr (kGuards) {
      if (threadIdx.x < 2 && t.side[threadIdx.x].guard != nullptr && smem.guard[threadIdx.x] != 0) {
        auto* guard = reinterpret_cast<unsigned long long*>(t.side[threadIdx.x].guard);
        atomicAdd(guard, smem.guard[threadIdx.x] & 0xFFFFu);
        atomicAdd(guard + 1, smem.guard[threadIdx.x] >> 16);
      }
    }
    if constexpr (Row::kWork != Work::kAbsent) {
      if (row.present() && row.byte_scales() && t.side[0].anchor == nullptr)
        flush_scales<false>(row, t.side[0], tile, smem);
    }
    if constexpr (Col::kWork != Work::kAbsent) {
      if (col.present() && col.byte_scales() && t.side[1].anchor == nullptr)
        flush_scales<true>(col, t.side[1], tile, smem);
      if (col.present() && col.transposed)
        flush_transposed<Col::kTakes4>(t.side[1].data, t.side[1].vector_store, tile.row0, tile.col0, t.side[1].length,
                                       t.cols, smem.codes);
    }
  }
}

// Cooperative launches need the amaxes zeroed before any block adds to them: the host does it.
template <class In, class Row, class Col, int Capacity, int MinBlocks>
cudaError_t launch_instance(const Launch<Capacity>& launch, cudaStream_t stream) {
  auto* kernel = quantize_kernel<In, Row, Col, Capacity, MinBlocks>;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.tiles));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  if (launch.barrier != nullptr) config.attrs = &cooperative, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch);
}

}  // namespace fsdp_quant
