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

#include <type_traits>

#include "device/patch.cuh"
#include "device/philox.cuh"
#include "device/rescale.cuh"
#include "norm/activate.cuh"
#include "quantize/pieces.h"

// emit_codes writes `random` on every path that reads it, through lambdas that the front end does not follow.
#pragma nv_diag_suppress 549

namespace fsdp_quant {

// What a kernel instance may be asked for in one direction; each adds to the one before it, and needs more registers.
//   kStatistics        amaxes only
//   kRotated           amaxes only, also of rotated values
//   kPlain             scales from this tile or given (also by a history, with the amax), rounding to nearest; 8, 6 or 4 bits by kBits
//   kTwin              plain, and the columnwise side is the same encoding, transposed
//   kDelayed           the factor from a history; the columnwise side, if any, as in kTwin
//   kAnchored          plain, but the scale is that of a longer run
//   kOfCodes           anchored, of e4m3 codes that are first those of their blocks (Launch::of_codes)
//   kFull              plain, and also stochastic rounding, rotation (4 bits) and delayed scaling (8 bits)
enum class Work { kAbsent, kStatistics, kRotated, kPlain, kTwin, kDelayed, kAnchored, kOfCodes, kFull };

// Block: the contraction block where it is known when the kernel is compiled, for blocks of one line whose amax is not
// given: 16 (two-level; see runs_kernel.cuh), 32 (e8m0) or 128 (fp32); 0 reads all of that from the side.
template <Work W, int Bits = 0, int Block = 0>
struct Path {
  static constexpr Work kWork = W;
  static constexpr int kBlock = Block;
  static constexpr bool kEncodes = W >= Work::kPlain;
  static constexpr bool kTwin = W == Work::kTwin || W == Work::kDelayed, kDelayed = W == Work::kDelayed;
  static constexpr bool kAnchored = W == Work::kAnchored || W == Work::kOfCodes, kOfCodes = W == Work::kOfCodes;
  static constexpr bool kFull = W == Work::kFull;
  static constexpr bool kTakes4 = Bits == 4, kTakes6 = Bits == 6, kTakes8 = Bits == 8;

  __device__ static int contraction(const Side& s) { return Block ? Block : s.contraction; }
  __device__ static int log2(const Side& s) { return Block == 16 ? 4 : Block == 32 ? 5 : Block ? 7 : s.contraction_log2; }
  __device__ static int outer(const Side& s) { return Block ? 1 : s.outer; }
  __device__ static int outer_log2(const Side& s) { return Block ? 0 : s.outer_log2; }
  __device__ static bool byte_scales(const Side& s) { return kTakes4 || kTakes6 || (Block ? Block == 32 : s.byte_scales()); }
  template <class Buffers>
  __device__ static bool reads_amax(const Side& s, const Buffers& b) { return !Block && (b.amax_given || s.whole()); }
};
using Absent = Path<Work::kAbsent>;
using Statistics = Path<Work::kStatistics>;
using RotatedStatistics = Path<Work::kRotated>;
using Plain8 = Path<Work::kPlain, 8>;
using Plain4 = Path<Work::kPlain, 4>;
using Full8 = Path<Work::kFull, 8>;
using Full4 = Path<Work::kFull, 4>;
using Plain6 = Path<Work::kPlain, 6>;
using Full6 = Path<Work::kFull, 6>;
using Twin8 = Path<Work::kTwin, 8>;
using Delayed8 = Path<Work::kDelayed, 8>;
using Plain8x32 = Path<Work::kPlain, 8, 32>;
using Plain8x128 = Path<Work::kPlain, 8, 128>;
using Anchored8 = Path<Work::kAnchored, 8, 32>;
using OfCodes8 = Path<Work::kOfCodes, 8, 32>;

template <auto Value>
struct Constant {
  static constexpr auto value = Value;
};

// act(x) * up, rounded where the separate operations round: bf16, columns in eights, rows of 16 bytes.
template <Activation A>
struct LoadGated {
  using Value = BF16;
  static constexpr Activation kActivation = A;
};
template <class In>
constexpr bool kIsGated = false;
template <Activation A>
constexpr bool kIsGated<LoadGated<A>> = true;

// bf16, the rows of tiles and their groups as `sources` of the launch says.
struct LoadTokens : LoadBF16 {};

// What a kernel instance is told: more than a `Launch` where its values are made (see quantize_adam.cu).
template <class In, int Capacity>
struct LaunchOf {
  using type = Launch<Capacity>;
  static constexpr bool kLoads = false;
};

template <class In, class L>
__device__ __forceinline__ void load_values(
    Patch<typename In::Value>& p, const L& launch, int which, int32_t row0, int32_t col0, int32_t rows = 0) {
  const TensorArgs& t = launch.tensors[which];
  if constexpr (LaunchOf<In, 1>::kLoads) {
    In::load(p, launch, which, row0, col0);
  } else if constexpr (std::is_same_v<In, LoadTokens>) {
    load_rows<In, true>(p, t, row0, col0, rows);
  } else if constexpr (kIsGated<In>) {
    using Values = Eight<__nv_bfloat16>;
    const auto* g = static_cast<const __nv_bfloat16*>(t.x) + row0 * t.row_stride + col0;
    const auto* u = static_cast<const __nv_bfloat16*>(launch.up) + row0 * launch.up_stride + col0;
#pragma unroll
    for (int first = 0; first < 8; first += 4) {  // all at once would take too many registers
      Values gs[4] = {}, us[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (row0 + first + k >= t.rows || col0 >= t.cols) continue;
        gs[k] = Values::load(g + (first + k) * t.row_stride);
        us[k] = Values::load(u + (first + k) * launch.up_stride);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float a[8], up[8], slope;
        gs[k].widen(a), us[k].widen(up);
#pragma unroll
        for (int i = 0; i < 8; ++i) activate<__nv_bfloat16, In::kActivation>(a[i], a[i], slope);
        round_all<__nv_bfloat16>(a);
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] *= up[i];
        const Values h = Values::round(a);
#pragma unroll
        for (int i = 0; i < 4; ++i) p.w[first + k][i] = h.w[i];
      }
    }
  } else {
    load_patch<In>(p, t, launch.input, row0, col0);
  }
}

struct TileSmem {
  uint32_t maxima[8][16][8];  // [warp][group of columns][word]
  uint8_t scales[2][kTile][8];
  uint32_t lines[2][kTile];   // magnitudes that atomic maxima collect, by direction
  float factors[2][128];      // two_level_factor of every code, by direction
};

struct Smem : TileSmem {
  uint4 codes[kTile * 8];     // [column][128 bytes], 8-byte chunks swizzled
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
  int32_t start = 0;   // row at which what a scale of all rows serves begins: of a group of tokens, its first

  template <bool Columnwise>
  __device__ Place place(const Position& at) const {
    const int32_t row = row0 + at.row(), col = col0 + at.col();
    return Columnwise ? Place{col, row, 0, shift} : Place{row, col, shift, 0};
  }
};

// Down four tiles, then right: neighbours in time write neighbouring parts of rows and of transposed columns.
__device__ __forceinline__ Tile tile_of(const TensorArgs& t, int32_t n) {
  const int32_t band = __umulhi(n, t.by_band.magic) >> t.by_band.shift, inside = n - band * 4 * t.tile_cols;
  const int32_t tall = min(4, t.tile_rows - 4 * band);
  const int32_t tile_col = tall == 4 ? inside >> 2 : tall == 3 ? inside / 3 : inside >> (tall - 1);
  const int32_t tile_row = 4 * band + inside - tile_col * tall;
  return {tile_row * kTile - t.shift, tile_col * kTile, t.shift};
}

__device__ __forceinline__ int64_t index_of(const Grid& g, int32_t line_block, int32_t block) {
  return static_cast<int64_t>(line_block) * g.line_stride + static_cast<int64_t>(block) * g.block_stride;
}

template <class V>
__device__ __forceinline__ void across_warps(Maxima<V>& m, TileSmem& smem, const Position& at, int warps) {
  __syncthreads();  // an earlier use of smem.maxima
  if (at.half == 0) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) smem.maxima[at.warp][at.group][k] = m.w[k];
  }
  __syncthreads();
  const int first = at.warp & ~(warps - 1);
#pragma unroll 2
  for (int other = first; other < first + warps; ++other) {
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) m.w[k] = V::larger(m.w[k], smem.maxima[other][at.group][k]);
  }
}

// Magnitudes of the 8 outer lines of this thread, each over its block; blocks wider than a tile: over the tile.
// A block of several outer lines gives all of them its own.
template <bool Columnwise, class V>
__device__ __forceinline__ Maxima<V> block_maxima(
    const Patch<V>& p, int outer, int contraction, TileSmem& smem, const Position& at) {
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
  return Columnwise ? at.half == 0 && (at.warp & (span / 2 - 1)) == 0 : (at.group & (span - 1)) == 0;
}

__device__ __forceinline__ void atomic_max(float* address, float v) {
  const uint32_t bits = bits_of(v) > 0x7F800000u ? 0x7FC00000u : bits_of(v);
  atomicMax(reinterpret_cast<uint32_t*>(address), bits);
}

// Encode factor and scale of a side with delayed scaling; the scale is right once the tensor's amax is known.
template <class Buffers>
__device__ __forceinline__ BlockScale delayed_scale(const Side& s, const Buffers& b) {
  const float amax = __ldcg(b.amax), enc = __ldcg(b.enc);
  if (!(enc > 0.0f)) return fp32_scale(amax, s);
  const float factor = s.scale == ScaleKind::kFp32Pow2 ? __uint_as_float(bits_of(enc) & 0x7F800000u) : enc;
  return {factor, bits_of(is_finite(amax) ? __fdiv_rn(1.0f, factor) : quiet_nan())};
}

// What follows from a delayed side's amax: one thread of a launch, or of the one after it.
__device__ __forceinline__ void finish_delayed(const Side& s, const SideBuffers& b) {
  if (!s.present() || b.enc == nullptr) return;
  *static_cast<uint32_t*>(b.scale) = delayed_scale(s, b).stored;
  const float amax = __ldcg(b.amax);
  if (b.record != nullptr && is_finite(amax)) atomic_max(b.record, amax);
}

// A block of one line that goes on in other tiles.
__device__ __forceinline__ bool crosses_tiles(const Side& s) {
  return s.outer == 1 && (s.contraction == 0 || s.contraction > kTile);
}

// Line maxima of both directions to memory: threads of the first half the rows, of the second the columns.
// row_tile: where the rowwise side lies.
__device__ __forceinline__ void flush_lines(
    const Side (&side)[2], const SideBuffers& row, const SideBuffers& col, const Tile& tile, const Tile& row_tile,
    const Smem& smem) {
  const int d = threadIdx.x / kTile, line = threadIdx.x % kTile;
  const auto of = [&](auto field) { return d ? col.*field : row.*field; };  // no address of buffers that are in registers
  float* const amax = of(&SideBuffers::amax);
  if (!side[d].present() || !crosses_tiles(side[d]) || amax == nullptr || of(&SideBuffers::amax_given)) return;
  const int32_t at = (d ? tile.col0 : row_tile.row0) + line, along = max(d ? tile.row0 : tile.col0, 0);
  const int32_t shift = d ? tile.shift : 0;
  if (at < 0 || at >= of(&SideBuffers::lines) || along >= of(&SideBuffers::length)) return;
  const int32_t block = ((along + shift) >> side[d].contraction_log2) - (shift >> side[d].contraction_log2);
  const int64_t place = d ? index_of(col.compact, at, block) : index_of(row.compact, at, block);
  atomic_max(amax + place, __uint_as_float(smem.lines[d][line]));
}

// Sums of the columns of a tile: a thread's rows, then the two halves of a warp, then the warps, in order.
template <class V>
__device__ __forceinline__ void sum_columns(
    const Patch<V>& p, float* sums, const TensorArgs& t, const Tile& tile, Smem& smem, const Position& at) {
  float sum[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum[j] = p(0, j);
#pragma unroll
    for (int i = 1; i < 8; ++i) sum[j] += p(i, j);
    sum[j] += __shfl_xor_sync(0xFFFFFFFFu, sum[j], 16);
  }
  auto& of_warps = reinterpret_cast<float(&)[8][kTile]>(smem.maxima);  // in use only behind a barrier: see across_warps
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
      if (crosses_tiles(s)) {  // flush_lines adds them, a line a thread
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
    const Maxima<V> m = block_maxima<Columnwise>(p, 0, 0, smem, at);
    if (threadIdx.x == 0) atomic_max(b.tensor_amax, m[0]);
  }
}

// Random bytes of the 8 outer lines of this thread: byte e of line k is of contraction element e.
template <bool Columnwise>
struct RandomLines {
  uint32_t k0, k1, step, stream, line, run;
  int offset;     // of the thread's first element in its run of 16
  bool aligned;   // two threads share each run: always, rowwise; columnwise unless the global row is no multiple of 16

  __device__ RandomLines(const int64_t* memory, const Tile& tile, const Position& at) {
    const RandomKey key(memory);
    const int64_t row = key.row0 + tile.row0 + at.row(), col = key.col0 + tile.col0 + at.col(), along = Columnwise ? row : col;
    k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32);
    step = static_cast<uint32_t>(key.step), stream = stream_of(key, Columnwise);
    line = static_cast<uint32_t>(Columnwise ? col : row), run = static_cast<uint32_t>(along >> 4);
    offset = along & 15;
    aligned = !Columnwise || ((along - at.half * 8) & 15) == 0;
  }

  // Lines k, k + 1, k + 4 and k + 5, for k of 0 and 2: the thread with the other half of the runs draws two of them.
  __device__ __forceinline__ void draw(uint32_t (&random)[8][2], int k) const {
    const bool upper = offset & 8;
    uint4 drawn[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) drawn[n] = make_uint4(run, line + (upper ? k + n + 4 : k + n), step, stream);
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

  // All lines, of runs that begin anywhere.
  __device__ __forceinline__ void draw_unaligned(uint32_t (&random)[8][2]) const {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      uint4 drawn[2] = {make_uint4(run, line + k, step, stream), make_uint4(run + 1, line + k, step, stream)};
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

// fp32 scales of a tile: one thread along the contraction for each line, or one for the tile.
template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const Side& s, const SideBuffers& b, const Place& place, int32_t start, bool is_anchored) {
  const int32_t outer = is_anchored ? 1 : s.outer, log2 = is_anchored ? s.anchor_log2 : s.contraction_log2;
  const int32_t grid = place.along + place.along_shift;  // the tile's first, along the contraction
  if (log2 == 31 ? grid != (Columnwise ? start : 0) : grid & ((1 << log2) - 1)) return;  // an earlier tile of the block writes
  const int32_t first = Columnwise ? 0 : start;
  if (outer != 1 && (threadIdx.x != 0 || (outer == 0 && place.line + place.line_shift != first))) return;
  const int32_t block = place.block(log2, max(place.along, 0));
  const int32_t line = outer == 1 ? place.line : max(place.line, 0), count = outer == 1 ? 8 : 1;
  const int32_t line_block = is_anchored ? line : place.line_block(s, line);
  uint32_t* scale = static_cast<uint32_t*>(b.scale) + index_of(b.stored, line_block, block);
  const int32_t left = b.stored.lines - line_block, real = b.lines - line;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k < count && k < left && line + k >= 0) scale[k * b.stored.line_stride] = k < real || outer != 1 ? stored[k] : 0;
  }
  const int32_t blocks = is_anchored ? b.anchors.blocks : b.compact.blocks;
  for (int32_t pad = blocks; block == blocks - 1 && pad < b.stored.blocks; ++pad)  // one line of whole-tile blocks
    static_cast<uint32_t*>(b.scale)[index_of(b.stored, line_block, pad)] = 0;
}

// Buffers of a tensor of which a launch makes a piece, cut at any element: see pieces_kernel.cuh.
template <class Buffers>
constexpr bool kIsPiece = std::is_base_of_v<PieceSide, Buffers>;
template <bool FourBit>
__device__ __forceinline__ void store_piece(const uint2 (&v)[8], const PieceSide& b, int32_t row, int32_t col, int32_t cols);
template <bool Columnwise>
__device__ __forceinline__ void read_cut_amaxes(float (&amax)[8], const Side& s, const PieceSide& b, const Place& place);
template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(
    const uint32_t (&stored)[8], const Side& s, const PieceSide& b, const Place& place);

// What turns the values of a patch into codes: encode factors of its 8 outer lines, and those of their codes (kOfCodes).
struct LineFactors {
  float enc[8];
  CodeFactor<Element::kE4M3> of_codes[8];
};

// How codes are rounded: the parts of a side that the inner loop is compiled for.
enum class Rounding { kE4M3, kE4M3Twice, kE5M2, kE2M1, kNearest6, kStochastic8, kStochastic6, kStochastic4 };

// Bits of a code: bytes of eight of them.
template <Rounding R>
constexpr int kBitsOf = R == Rounding::kE2M1 || R == Rounding::kStochastic4      ? 4
                        : R == Rounding::kNearest6 || R == Rounding::kStochastic6 ? 6
                                                                                  : 8;

// Codes of 8 x 8 values, 8 elements a line: rows to memory, transposed columns to shared memory.
template <bool Columnwise, bool Transposed, bool Twin, Rounding R, class V, class Buffers, class Shared>
__device__ __forceinline__ void emit_codes(
    const Patch<V>& p, const LineFactors& f, const Side& s, const Buffers& b, const Tile& tile, Shared& smem,
    const Position& at) {
  constexpr bool kFourBit = kBitsOf<R> == 4, kSixBit = kBitsOf<R> == 6;
  constexpr int kBytes = kBitsOf<R>;  // of 8 codes
  const int32_t rows_end = Columnwise ? b.length : b.lines, cols_end = Columnwise ? b.lines : b.length;
  const int32_t row = tile.row0 + at.row(), col = tile.col0 + at.col();
  auto value = [&](int i, int j) { return __fmul_rn(p(i, j), f.enc[Columnwise ? j : i]); };
  uint32_t random[8][2];  // bytes of the outer lines
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
  // Where the signs of a line's elements go; the +6 of a NaN block has none. One for all lines, or one a line.
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
    if constexpr (kFourBit) {
      // A code and a sign are a byte each until 8 of them are packed: even elements low, odd ones high.
      uint32_t code[8], sign[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = row_of(k, e), j = col_of(k, e), outer = Columnwise ? j : i, along = Columnwise ? i : j;
        const float a = __fmul_rn(fabsf(p(i, j)), f.enc[outer]);
        if constexpr (R == Rounding::kE2M1) {
          code[e] = e2m1_magnitude<true>(a);
        } else {
          code[e] = stochastic_e2m1<true>(a, __byte_perm(random[outer][along >> 2], 0xFB008001u, 0x7054 | (along & 3) << 8));
        }
        sign[e] = p.word(i, j);
      }
      constexpr int kByte = R == Rounding::kE2M1 ? 0 : 3;
      const int even = Patch<V>::sign_byte(col_of(k, 0)), odd = Patch<V>::sign_byte(col_of(k, 1));
      const uint32_t low = bytes_of(code[0], code[2], code[4], code[6], kByte);
      const uint32_t high = bytes_of(code[1], code[3], code[5], code[7], kByte);
      const int n = kSigns == 8 ? k : 0;
      lo = low | high << 4 | (bytes_of(sign[0], sign[2], sign[4], sign[6], even) >> 4 & low_signs[n]) |
           (bytes_of(sign[1], sign[3], sign[5], sign[7], odd) & high_signs[n]);
      const int32_t left = Transposed ? rows_end - row : cols_end - col;
      if (left < 8) lo &= left > 0 ? (1u << (4 * left)) - 1 : 0;  // the nibble that fills the last byte is zero
    } else if constexpr (kSixBit) {
      const uint32_t middle = two(k, 4);
      lo = two(k, 0) | two(k, 2) << 12 | middle << 24, hi = middle >> 8 | two(k, 6) << 4;
      const int32_t left = cols_end - col;  // codes that fill the last container are zero
      if (left < 8) {
        const uint64_t kept = left > 0 ? (uint64_t{1} << (6 * left)) - 1 : 0;
        lo &= static_cast<uint32_t>(kept), hi &= static_cast<uint32_t>(kept >> 32);
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
  // Lines in the order in which their random bytes are drawn, fn(k).
  constexpr bool kRandom = R == Rounding::kStochastic8 || R == Rounding::kStochastic6 || R == Rounding::kStochastic4;
  auto each_line = [&](auto fn) {
    if constexpr (kRandom) {
      const RandomLines<Columnwise> lines(b.key, tile, at);
      if (!lines.aligned) lines.draw_unaligned(random);
      if (kSigns != 8 && lines.aligned) lines.draw(random, 0), lines.draw(random, 2);  // a line of codes needs them all
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
    uint8_t* staged = reinterpret_cast<uint8_t*>(smem.codes) + (at.col() * 16 + ((at.warp * 2 + at.half) ^ at.group)) * kBytes;
    each_line([&](int k) { store(staged + k * 16 * kBytes, line(k)); });
  } else {
    const int32_t row_bytes = kFourBit ? (cols_end + 1) >> 1 : kSixBit ? ((cols_end + 3) >> 2) * 3 : cols_end;
    const int32_t offset = (col >> 3) * kBytes;
    uint8_t* address = b.data + static_cast<int64_t>(row) * row_bytes + offset;
    if constexpr (std::is_same_v<Buffers, InnerSide>) {  // a line is stored as it is made: eight would be spilled
      each_line([&](int k) { store(address, line(k)), address += row_bytes; });
      return;
    }
    uint2 v[8];
    each_line([&](int k) { v[k] = line(k); });
    if constexpr (kIsPiece<Buffers>) {
      store_piece<kFourBit>(v, b, row, col, cols_end);
    } else if (b.vector_store && row >= 0 && row + 8 <= rows_end && col + 8 <= cols_end) {
#pragma unroll
      for (int k = 0; k < 8; ++k, address += row_bytes) store(address, v[k]);
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

// Scales of a direction: fp32 to memory, bytes to shared memory.
template <bool Columnwise, class P, class Buffers>
__device__ __forceinline__ void store_scales(
    const uint32_t (&stored)[8], const Side& s, const Buffers& b, const Tile& tile, TileSmem& smem, const Position& at) {
  if (P::kAnchored || !P::byte_scales(s)) {
    if (leads_block<Columnwise>(kTile, at)) {
      if constexpr (kIsPiece<Buffers>) {
        store_fp32_scales<Columnwise>(stored, s, b, tile.place<Columnwise>(at));
      } else {
        store_fp32_scales<Columnwise>(stored, s, b, tile.place<Columnwise>(at), tile.start, P::kAnchored);
      }
    }
  } else if (leads_block<Columnwise>(P::contraction(s), at)) {
    const int block = (Columnwise ? at.row() : at.col()) >> P::log2(s), line = Columnwise ? at.col() : at.row();
#pragma unroll
    for (int k = 0; k < 8; ++k) smem.scales[Columnwise][line + k][block] = static_cast<uint8_t>(stored[k]);
  }
}

// Encode factors of this thread's lines; scales go to memory, those of one byte to shared memory.
// twin: the columnwise side of Work::kTwin, which is stored from the same codes.
template <bool Columnwise, class P, class V, class Buffers, class Shared>
__device__ __forceinline__ void find_factors(
    LineFactors& f, const Patch<V>& p, const Side& s, const Buffers& b, const Tile& tile, const Side* twin_side,
    const SideBuffers* twin, Shared& smem, const Position& at) {
  const Place place = tile.place<Columnwise>(at);
  const bool one_block = P::outer(s) != 1;  // the thread's lines share their block
  const bool delayed = P::kFull && P::kTakes8 && b.enc != nullptr;

  const int32_t inside = max(min(place.along + 7, b.length - 1), 0);  // in the block, if the thread is
  if constexpr (P::kAnchored) {  // the scale of the run takes the place of the block's
    const float* from = b.anchor + index_of(b.anchors, 0, place.block(s.anchor_log2, inside));
    uint32_t stored[8];
    Maxima<V> own;
    if constexpr (P::kOfCodes) own = block_maxima<Columnwise>(p, P::outer(s), P::contraction(s), smem, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float amax = __ldg(from + static_cast<int64_t>(min(place.line + k, b.lines - 1)) * b.anchors.line_stride);
      const BlockScale anchor = e8m0_scale(amax, s);
      f.enc[k] = anchor.enc, stored[k] = bits_of(power_of_two(anchor.stored));
      if constexpr (P::kOfCodes) {
        const BlockScale of_block = e8m0_scale(own[k], s);
        f.enc[k] = of_block.enc;
        f.of_codes[k] = CodeFactor<Element::kE4M3>(static_cast<int32_t>(of_block.stored) - static_cast<int32_t>(anchor.stored));
      }
    }
    return store_scales<Columnwise, P>(stored, s, b, tile, smem, at);
  }

  float amax[8];
  if (!P::reads_amax(s, b) || delayed) {
    const Maxima<V> m = block_maxima<Columnwise>(p, P::outer(s), P::contraction(s), smem, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) amax[k] = m[k];
  }
  const float tile_amax = amax[0];
  if constexpr (kIsPiece<Buffers>) {
    if constexpr (std::is_same_v<Buffers, PieceSide>) read_cut_amaxes<Columnwise>(amax, s, b, place);
  } else if (P::reads_amax(s, b)) {
    const int32_t block = place.block(s.contraction_log2, inside);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k > 0 && one_block) continue;
      const int32_t line = max(min(place.line + k, b.lines - 1), 0);
      amax[k] = __ldcg(b.amax + index_of(b.compact, place.line_block(s, line), block));
    }
  }

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
  if (P::kTakes4 && s.two_level()) {
    if constexpr (P::kTakes4) {
      float target;
      if constexpr (kIsPiece<Buffers>) {
        target = smem.target[Columnwise];
      } else {
        target = two_level_target(__ldcg(b.tensor_amax), s);
      }
      const bool round_up = P::kFull && s.stochastic;
      scales([&](float a) { return two_level_scale(a, target, round_up, s.exact(), smem.factors[Columnwise]); });
    }
  } else {
    float least = amax[0], largest = amax[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      if (one_block) continue;
      least = fminf(least, amax[k]);
      largest = __uint_as_float(max(bits_of(largest), bits_of(amax[k])));  // as integers, a NaN stays
    }
    if (P::byte_scales(s)) {
      if (is_finite(largest) && s.scale == ScaleKind::kE8M0Up) {
        scales([&](float a) { return e8m0_scale_of_finite(a, s); });
      } else {
        scales([&](float a) { return e8m0_scale(a, s); });
      }
    } else if (!kIsPiece<Buffers> && P::kWork == Work::kPlain && P::kBlock == 0 && b.enc != nullptr) {
      if constexpr (!kIsPiece<Buffers>) {
        scales([&](float) { return delayed_scale(s, b); });
        if (threadIdx.x == 0 && tile.row0 <= 0 && tile.col0 == 0) finish_delayed(s, b);
      }
    } else if (s.scale == ScaleKind::kFp32Pow2 && has_easy_power(least, largest, s)) {
      scales([&](float a) { return easy_power(a, s); });
    } else {
      scales([&](float a) { return fp32_scale(a, s); });
    }
  }

  if constexpr (P::kFull && P::kTakes8) {
    if (delayed) {
      const float factor = delayed_scale(s, b).enc;
#pragma unroll
      for (int k = 0; k < 8; ++k) f.enc[k] = factor;
      if (threadIdx.x == 0 && !b.amax_given) atomic_max(b.amax, tile_amax);
    }
  }
  if (!delayed) store_scales<Columnwise, P>(stored, s, b, tile, smem, at);
  if constexpr (P::kTwin) store_scales<true, P>(stored, *twin_side, *twin, tile, smem, at);
}

// Encode one direction: scales and codes go to memory, transposed codes and one-byte scales to shared memory.
template <bool Columnwise, class P, class V, class Buffers, class Shared>
__device__ __forceinline__ void encode(
    const Patch<V>& p, const Side& s, const Buffers& b, const Tile& tile, const Side* twin_side,
    const SideBuffers* twin, Shared& smem, const Position& at) {
  LineFactors f;
  if (kIsPiece<Buffers> && P::reads_amax(s, b)) {
    const uint32_t* factors = smem.lines[Columnwise] + (Columnwise ? at.col() : at.row());
#pragma unroll
    for (int k = 0; k < 8; ++k) f.enc[k] = __uint_as_float(factors[k]);
  } else {
    find_factors<Columnwise, P>(f, p, s, b, tile, twin_side, twin, smem, at);
  }
  auto emit = [&](auto transposed) {
    constexpr bool kTransposed = decltype(transposed)::value;
    auto run = [&](auto rounding) {
      emit_codes<Columnwise, kTransposed, P::kTwin, decltype(rounding)::value>(p, f, s, b, tile, smem, at);
    };
    if constexpr (P::kFull) {
      if (s.stochastic) {
        return run(Constant<P::kTakes4 ? Rounding::kStochastic4 : P::kTakes6 ? Rounding::kStochastic6 : Rounding::kStochastic8>());
      }
    }
    if constexpr (P::kTakes4) {
      run(Constant<Rounding::kE2M1>());
    } else if constexpr (P::kTakes6) {
      run(Constant<Rounding::kNearest6>());
    } else if constexpr (P::kOfCodes) {
      run(Constant<Rounding::kE4M3Twice>());
    } else {
      s.element == Element::kE5M2 ? run(Constant<Rounding::kE5M2>()) : run(Constant<Rounding::kE4M3>());
    }
  };
  if constexpr (Columnwise && !kIsPiece<Buffers> && !P::kTakes6) {
    if (s.transposed) return emit(Constant<true>());
  }
  emit(Constant<false>());
}

// Both sides by one factor from a history, with the largest magnitude of every warp on the way.
template <class V>
__device__ __forceinline__ void encode_delayed(
    const Patch<V>& p, const Side& s, const SideBuffers& b, const Tile& tile, Smem& smem, const Position& at) {
  if (!b.amax_given) {
    Maxima<V> m = col_maxima(p);
    m.level();
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, bits_of(m[0]));
    if ((threadIdx.x & 31) == 0) smem.lines[0][at.warp] = largest;
  }
  LineFactors f;
  const float factor = delayed_scale(s, b).enc;
#pragma unroll
  for (int k = 0; k < 8; ++k) f.enc[k] = factor;
  s.element == Element::kE5M2 ? emit_codes<false, false, true, Rounding::kE5M2>(p, f, s, b, tile, smem, at)
                              : emit_codes<false, false, true, Rounding::kE4M3>(p, f, s, b, tile, smem, at);
}

// The tile's largest magnitude to memory, or what follows from an amax that was known. row: of the tile's group.
__device__ __forceinline__ void finish_tile_delayed(
    const Side (&side)[2], const SideBuffers (&b)[2], const SideBuffers& row, const Smem& smem) {
  if (b[0].amax_given) {
    if (blockIdx.x == 0 && threadIdx.x < 2) finish_delayed(side[threadIdx.x], b[threadIdx.x]);
  } else if (threadIdx.x < 32) {
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < kThreads / 32 ? smem.lines[0][threadIdx.x] : 0);
    if (threadIdx.x == 0) atomic_max(row.amax, __uint_as_float(largest));
  }
}

// One-byte scales from shared memory.
template <bool Columnwise, class P>
__device__ __forceinline__ void flush_scales(
    const Side& s, const SideBuffers& b, const Tile& tile, const uint8_t (&scales)[kTile][8]) {
  const int32_t log2 = P::log2(s), outer_log2 = P::outer_log2(s);
  auto* out = static_cast<uint8_t*>(b.scale);
  const Place place = Columnwise ? Place{tile.col0, tile.row0, 0, tile.shift} : Place{tile.row0, tile.col0, tile.shift, 0};
  const int32_t in_tile = kTile >> log2, first_line = place.line + place.line_shift;
  const int32_t first_block = ((place.along + place.along_shift) >> log2) - (place.along_shift >> log2);
  if (s.scale_layout == ScaleLayout::kBlackwell) {
    const int32_t tile_cols = (b.compact.blocks + 3) >> 2;
    for (int u = threadIdx.x; u < kTile * (in_tile >> 2); u += kThreads) {
      const int32_t line = u & (kTile - 1), local = u / kTile * 4, block = first_block + local;
      if (block >= tile_cols * 4) continue;
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (block + e < b.compact.blocks && first_line + line < b.lines)
          word |= static_cast<uint32_t>(scales[line][local + e]) << (8 * e);
      }
      const int64_t base = (static_cast<int64_t>(first_line / kTile) * tile_cols + block / 4) * 512;
      *reinterpret_cast<uint32_t*>(out + base + line % 32 * 16 + line / 32 * 4) = word;
    }
    return;
  }
  // Neighbouring threads write neighbouring bytes: along the blocks of a line, or along the lines of a block.
  const bool by_line = b.stored.block_stride == 1;
  const int32_t in_tile_log2 = 7 - log2;
  if (by_line && outer_log2 == 0 && in_tile >= 4 && (b.stored.line_stride & 3) == 0 && first_block + in_tile <= b.compact.blocks) {
    const int32_t words = in_tile >> 2;
    for (int u = threadIdx.x; u < kTile * words; u += kThreads) {
      const int32_t line = words == 2 ? u >> 1 : u, word = words == 2 ? u & 1 : 0, l = place.line + line;
      if (l < 0 || l >= b.lines) continue;
      *reinterpret_cast<uint32_t*>(out + index_of(b.stored, l, first_block + word * 4)) =
          *reinterpret_cast<const uint32_t*>(&scales[line][word * 4]);
    }
    return;
  }
  const int32_t lines_log2 = 7 - outer_log2, first_line_block = (first_line >> outer_log2) - (place.line_shift >> outer_log2);
  for (int u = threadIdx.x; u < in_tile << lines_log2; u += kThreads) {
    const int32_t line = by_line ? u >> in_tile_log2 : u & ((1 << lines_log2) - 1);
    const int32_t local = by_line ? u & (in_tile - 1) : u >> lines_log2;
    const int32_t line_block = first_line_block + line, block = first_block + local;
    if (line_block < 0 || line_block >= b.compact.lines || block < 0 || block >= b.compact.blocks) continue;
    out[index_of(b.stored, line_block, block)] = scales[line << outer_log2][local];
  }
}

// Encode factors of every scale code, of the 4-bit directions.
__device__ __forceinline__ void fill_factors(
    const Side (&side)[2], const SideBuffers& row, const SideBuffers& col, float (&factors)[2][128]) {
  const int d = threadIdx.x / 128, code = threadIdx.x % 128;
  const float* const amax = d ? col.tensor_amax : row.tensor_amax;
  if (side[d].present() && side[d].two_level()) factors[d][code] = two_level_factor(code, __ldcg(amax), side[d]);
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

// Of a group of tokens: scales of all its rows, and their amaxes, are one set a group, as are the factors of histories, amaxes of
// tensors and random keys.
template <bool Columnwise>
__device__ __forceinline__ void take_group(SideBuffers& b, const Side& s, int32_t group) {
  if (s.two_level()) b.tensor_amax += group;
  if (s.operand()) b.scale = static_cast<float*>(b.scale) + group;
  if (b.key != nullptr) b.key += 5 * group;
  if (Columnwise ? !s.whole() : !s.whole_tensor()) return;
  const int64_t at = static_cast<int64_t>(group) * b.compact.lines;
  b.amax += at, b.scale = static_cast<float*>(b.scale) + at;
  if (b.enc != nullptr) b.enc += group;
}

// No statistics are wanted of this direction: it is absent, or its scale comes from a history.
__device__ __forceinline__ bool needs_none(const Side& s, const SideBuffers& b) {
  return !s.present() || (b.enc != nullptr && __ldcg(b.enc) > 0.0f);
}

// Statistics, or codes, of one direction; rotated values are made where they are needed.
template <bool Columnwise, class P, class V>
__device__ __forceinline__ void run_side(
    bool statistics, const Patch<V>& p, const Side& s, const SideBuffers& b, const Tile& tile, const Side* twin_side,
    const SideBuffers* twin, Smem& smem, const Position& at) {
  if constexpr (P::kWork == Work::kAbsent) {
    return;
  } else {
    if (!s.present()) return;
    auto work = [&](const auto& patch) {
      if constexpr (!P::kEncodes) {
        collect<Columnwise>(patch, s, b, tile, smem, at);
      } else {
        if constexpr (P::kFull) {
          if (statistics) return collect<Columnwise>(patch, s, b, tile, smem, at);
        }
        if constexpr (P::kDelayed) return encode_delayed(patch, s, b, tile, smem, at);
        encode<Columnwise, P>(patch, s, b, tile, twin_side, twin, smem, at);
      }
    };
    if constexpr (P::kWork == Work::kRotated || (P::kFull && P::kTakes4)) {
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
__global__ void __launch_bounds__(kThreads, MinBlocks) quantize_kernel(
    const __grid_constant__ typename LaunchOf<In, Capacity>::type launch) {
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
  Tile tile = tile_of(t, n - t.first_tile);
  Tile row_tile = tile;  // of the rowwise side, whose rows are x's
  constexpr bool kTokens = std::is_same_v<In, LoadTokens>;
  using Buffers = std::conditional_t<kTokens, SideBuffers, const SideBuffers&>;
  Buffers row_buffers = t.side[0], col_buffers = t.side[1];
  if constexpr (kTokens) {
    const int4 source = reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows, group, its first
    if (source.y == 0) return;
    row_tile.row0 = source.x, tile.start = source.w, row_tile.start = source.x - (tile.row0 - source.w);
    row_buffers.lines = row_buffers.stored.lines = source.x + source.y;
    take_group<false>(row_buffers, row, source.z), take_group<true>(col_buffers, col, source.z);
  }

  constexpr bool kOnlyStatistics = Row::kWork == Work::kStatistics || Row::kWork == Work::kRotated;
  if constexpr (kOnlyStatistics) {
    if (launch.sums == nullptr && needs_none(row, row_buffers) && needs_none(col, col_buffers)) return;
  }
  Patch<typename In::Value> p;
  load_values<In>(p, launch, which, row_tile.row0 + at.row(), tile.col0 + at.col(), row_buffers.lines);
  if constexpr (std::is_same_v<In, LoadBF16> && Capacity == 1) {
    if (launch.sums != nullptr) sum_columns(p, launch.sums, t, tile, smem, at);
  }
  if constexpr (kOnlyStatistics || Row::kFull || Col::kFull) {
    if (launch.phases & kStatistics) {
      run_side<false, Row>(true, p, row, row_buffers, row_tile, nullptr, nullptr, smem, at);
      run_side<true, Col>(true, p, col, col_buffers, tile, nullptr, nullptr, smem, at);
      if (crosses_tiles(row) || crosses_tiles(col)) {
        __syncthreads();
        flush_lines(launch.side, row_buffers, col_buffers, tile, row_tile, smem);
      }
    }
  }
  if constexpr (!kOnlyStatistics) {
    if constexpr (Row::kFull || Col::kFull) {
      if (launch.barrier != nullptr) grid_barrier(launch.barrier, gridDim.x);
    }
    if constexpr (Row::kTakes4 || Col::kTakes4) {
      fill_factors(launch.side, t.side[0], t.side[1], smem.factors);
      __syncthreads();
    }
    run_side<false, Row>(false, p, row, row_buffers, row_tile, &col, &col_buffers, smem, at);
    run_side<true, Col>(false, p, col, col_buffers, tile, nullptr, nullptr, smem, at);
    __syncthreads();
    if constexpr (Row::kDelayed) finish_tile_delayed(launch.side, t.side, row_buffers, smem);
    if constexpr (Row::kEncodes && !Row::kAnchored) {
      if (row.present() && Row::byte_scales(row)) flush_scales<false, Row>(row, t.side[0], tile, smem.scales[0]);
    }
    using Second = std::conditional_t<Row::kTwin, Row, Col>;  // what made the columnwise side
    if constexpr (Second::kEncodes && !Second::kAnchored) {
      if (col.present() && Second::byte_scales(col)) flush_scales<true, Second>(col, t.side[1], tile, smem.scales[1]);
    }
    if constexpr (Second::kEncodes) {
      if (col.present() && col.transposed)
        flush_transposed<Second::kTakes4>(t.side[1].data, t.side[1].vector_store, tile.row0, tile.col0,
                                          t.side[1].length, t.cols, smem.codes);
    }
  }
}

// Cooperative launches need the amaxes zeroed before any block adds to them: the host does it.
template <class In, class Row, class Col, int Capacity, int MinBlocks>
cudaError_t launch_instance(const typename LaunchOf<In, Capacity>::type& launch, cudaStream_t stream) {
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
