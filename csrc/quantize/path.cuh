// SPDX-License-Identifier: Apache-2.0
// Compile-time configuration of the quantize kernel: work per direction, and loads.
#pragma once

#include <type_traits>

#include "device/register_tile.cuh"
#include "norm/activate.cuh"

namespace fsdp_quant {

// Work of a kernel instance in one direction, in order of register use.
//   kStatistics        amaxes only
//   kRotated           amaxes only, also of rotated values
//   kPlain             scales from this tile or given amaxes (or a history), rounding to nearest; 8, 6 or 4 bits
//   kSharedCodes       plain, and the columnwise direction is the same encoding, transposed
//   kDelayed           factor from a history; the columnwise direction, if any, as in kSharedCodes
//   kAnchored          plain, but with the scale of a run: given, or with Block 128 from this tile (Launch::in_tile)
//   kOfCodes           anchored e4m3 codes, converted from the codes of their blocks (Launch::of_codes); with Block 128 the
//                      scale is of this tile
//   kExtended          4 bits, also rotated, rounded stochastically, with scales chosen by error or per line (`extended`)
//   kFull              plain, and also stochastic rounding, rotation (4 bits) and delayed scaling (8 bits)
enum class Work { kAbsent, kStatistics, kRotated, kPlain, kSharedCodes, kDelayed, kAnchored, kOfCodes, kExtended, kFull };

// Block: contraction block if known at compile time, for blocks of one line without given amax: 16 (two-level; see
// fp4_kernel.cuh), 32 (e8m0) or 128 (fp32); 0 reads it from the spec.
template <Work W, int Bits = 0, int Block = 0>
struct Path {
  static constexpr Work kWork = W;
  static constexpr int kBlock = Block;
  static constexpr bool kEncodes = W >= Work::kPlain;
  static constexpr bool kReadsAmax = kEncodes && Block == 0;
  static constexpr bool kSharedCodes = W == Work::kSharedCodes || W == Work::kDelayed, kDelayed = W == Work::kDelayed;
  static constexpr bool kAnchored = W == Work::kAnchored || W == Work::kOfCodes, kOfCodes = W == Work::kOfCodes;
  static constexpr bool kInTile = kAnchored && Block == 128;
  static constexpr bool kFull = W == Work::kFull, kExtended = W == Work::kExtended;
  static constexpr bool kRotates = W == Work::kRotated || kExtended || (kFull && Bits == 4);
  static constexpr bool kTakes4 = Bits == 4, kTakes6 = Bits == 6, kTakes8 = Bits == 8;

  __device__ static int contraction(const EncodingSpec& s) { return Block ? Block : s.contraction; }
  __device__ static int log2(const EncodingSpec& s) {
    return Block == 16 ? 4 : Block == 32 ? 5 : Block ? 7 : s.contraction_log2;
  }
  __device__ static int outer(const EncodingSpec& s) { return Block ? 1 : s.outer; }
  __device__ static int outer_log2(const EncodingSpec& s) { return Block ? 0 : s.outer_log2; }
  __device__ static bool byte_scales(const EncodingSpec& s) {
    return kTakes4 || kTakes6 || (Block ? Block == 32 : s.byte_scales());
  }
  template <class Buffers>
  __device__ static bool reads_amax(const EncodingSpec& s, const Buffers& b) { return kReadsAmax && (b.amax_given || s.whole()); }
};
using Absent = Path<Work::kAbsent>;
using Statistics = Path<Work::kStatistics>;
using RotatedStatistics = Path<Work::kRotated>;
using Plain8 = Path<Work::kPlain, 8>;
using Plain4 = Path<Work::kPlain, 4>;
using Full8 = Path<Work::kFull, 8>;
using Full4 = Path<Work::kFull, 4>;
using Extended4 = Path<Work::kExtended, 4>;
using Plain6 = Path<Work::kPlain, 6>;
using Full6 = Path<Work::kFull, 6>;
using SharedCodes8 = Path<Work::kSharedCodes, 8>;
using Delayed8 = Path<Work::kDelayed, 8>;
using Plain8x32 = Path<Work::kPlain, 8, 32>;
using Plain8x128 = Path<Work::kPlain, 8, 128>;
using Anchored8 = Path<Work::kAnchored, 8, 32>;
using OfCodes8 = Path<Work::kOfCodes, 8, 32>;
using AnchoredInTile8 = Path<Work::kAnchored, 8, 128>;
using OfCodesInTile8 = Path<Work::kOfCodes, 8, 128>;

template <auto Value>
struct Constant {
  static constexpr auto value = Value;
};

// act(x) * up, rounded as the separate operations: bf16, columns in eights, 16-byte aligned rows.
template <Activation A>
struct LoadGated {
  using Value = BF16;
  static constexpr Activation kActivation = A;
};
template <class In>
constexpr bool kIsGated = false;
template <Activation A>
constexpr bool kIsGated<LoadGated<A>> = true;

// bf16 rows gathered by the launch's `sources`; LoadOrdered: and by its `order`. Experts that share a token find it in L2.
struct LoadTokens : LoadBF16 {};
struct LoadOrdered : LoadTokens {};

// SwiGLU of grouped tokens, silu(g) * u of x and `up`, times `row_weights`, rounded as the separate operations: bf16, columns in
// eights, 16-byte aligned rows.
struct LoadSwiGLU : LoadTokens {
  static constexpr Activation kActivation = Activation::kSilu;
};

// Kernel argument; more than a `Launch` if the kernel computes its values (see quantize_adam.cu).
template <class In, int Capacity>
struct LaunchOf {
  using type = Launch<Capacity>;
  static constexpr bool kLoads = false;
};

// act(g) * u of 8 columns and at most `rows` rows.
template <Activation A>
__device__ __forceinline__ void load_gated(
    RegisterTile<BF16>& p, const __nv_bfloat16* g, int64_t g_stride, const __nv_bfloat16* u, int64_t u_stride, int32_t rows) {
  using Values = Eight<__nv_bfloat16>;
#pragma unroll
  for (int first = 0; first < 8; first += 4) {  // all at once would need too many registers
    Values gs[4] = {}, us[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (first + k >= rows) continue;
      gs[k] = Values::load(g + (first + k) * g_stride);
      us[k] = Values::load(u + (first + k) * u_stride);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float a[8], up[8], slope;
      gs[k].widen(a), us[k].widen(up);
#pragma unroll
      for (int i = 0; i < 8; ++i) activate<__nv_bfloat16, A>(a[i], a[i], slope);
      round_all<__nv_bfloat16>(a);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] *= up[i];
      const Values h = Values::round(a);
#pragma unroll
      for (int i = 0; i < 4; ++i) p.w[first + k][i] = h.w[i];
    }
  }
}

// Multiply at most `rows` rows, rounded as a separate operation.
__device__ __forceinline__ void weight_rows(RegisterTile<BF16>& p, const float* weights, int32_t rows) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float weight = i < rows ? __ldg(weights + i) : 0.0f;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = p(i, j) * weight;
    const auto rounded = Eight<__nv_bfloat16>::round(v);
#pragma unroll
    for (int k = 0; k < 4; ++k) p.w[i][k] = rounded.w[k];
  }
}

template <class In, class L>
__device__ __forceinline__ void load_values(
    RegisterTile<typename In::Value>& p, const L& launch, int which, int32_t row0, int32_t col0, int32_t rows = 0) {
  const TensorArgs& t = launch.tensors[which];
  if constexpr (LaunchOf<In, 1>::kLoads) {
    In::load(p, launch, which, row0, col0);
  } else if constexpr (std::is_same_v<In, LoadTokens>) {
    load_rows<In, true>(p, t, row0, col0, rows);
  } else if constexpr (std::is_same_v<In, LoadOrdered>) {
    load_ordered_rows<In>(p, t, launch.order + row0, col0, rows - row0);
  } else if constexpr (kIsGated<In> || std::is_base_of_v<LoadTokens, In>) {
    const auto* x = static_cast<const __nv_bfloat16*>(t.x) + row0 * t.row_stride;
    const auto* up = static_cast<const __nv_bfloat16*>(launch.up) + row0 * launch.up_stride;
    const int32_t left = col0 < t.cols ? (kIsGated<In> ? t.rows : rows) - row0 : 0;
    load_gated<In::kActivation>(p, x + col0, t.row_stride, up + col0, launch.up_stride, left);
    if constexpr (!kIsGated<In>) weight_rows(p, launch.row_weights + row0, left);
  } else {
    load_register_tile<In>(p, t, launch.input, row0, col0);
  }
}

}  // namespace fsdp_quant
