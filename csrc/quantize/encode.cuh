// SPDX-License-Identifier: Apache-2.0
// Encode one direction of a tile: factors and scales of its blocks, then codes.
#pragma once

#include "quantize/codes.cuh"

namespace fsdp_quant {

// Store a tile's powers of two as e8m0 scales (`EncodingSpec::spread`): one thread along the contraction stores 8 lines, a
// word of four scales each.
__device__ __forceinline__ void store_spread_scales(const uint32_t (&stored)[8], const EncodingBuffers& b,
                                                    const Place& place) {
  const int64_t tile = static_cast<int64_t>(place.line / kTile) * b.compact.blocks + place.along / kTile;
  uint8_t* const out = static_cast<uint8_t*>(b.scale) + tile * 512;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int32_t line = place.line + k, in_tile = line % kTile;
    *reinterpret_cast<uint32_t*>(out + in_tile % 32 * 16 + in_tile / 32 * 4) = line < b.lines ? (stored[k] >> 23) * 0x01010101u : 0;
  }
}

// Store fp32 scales of a tile: one thread along the contraction per line, or one per tile.
template <bool Columnwise>
__device__ __forceinline__ void store_fp32_scales(const uint32_t (&stored)[8], const EncodingSpec& s,
                                                  const EncodingBuffers& b, const Place& place, int32_t start,
                                                  bool is_anchored) {
  if (s.spread() && !is_anchored) return store_spread_scales(stored, b, place);
  const int32_t outer = is_anchored ? 1 : s.outer, log2 = is_anchored ? s.anchor_log2 : s.contraction_log2;
  const int32_t grid = place.along + place.along_shift;  // first contraction element of the tile
  if (log2 == 31 ? grid != (Columnwise ? start : 0) : grid & ((1 << log2) - 1))
    return;  // written by an earlier tile of the block
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

// Store the one scale of a tile as an operand of 128x128 blocks reads it, and zeros behind the last one of a line.
__device__ __forceinline__ void store_tile_scale(uint32_t stored, const EncodingBuffers& b, const Place& place) {
  const int32_t block = place.along / kTile;
  uint32_t* const scale = static_cast<uint32_t*>(b.scale) + index_of(b.stored, place.line / kTile, 0);
  scale[block] = stored;
  for (int32_t pad = b.compact.blocks; block == b.compact.blocks - 1 && pad < b.stored.blocks; ++pad) scale[pad] = 0;
}

// Store the scales of a direction: fp32 to memory, bytes to shared memory.
template <bool Columnwise, class P, class Buffers>
__device__ __forceinline__ void store_scales(const uint32_t (&stored)[8], const EncodingSpec& s, const Buffers& b,
                                             const Tile& tile, TileSmem& smem, const Position& at) {
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

// Factors and scales of two levels of this thread's lines, with all options. level: of line k.
template <bool Columnwise, class V, class Level>
__device__ __forceinline__ void extended_scales(LineFactors& f, uint32_t (&stored)[8], const RegisterTile<V>& p,
                                                const EncodingSpec& s, const float (&amax)[8], Level level) {
  const bool squared = s.choice == ScaleChoice::kMse;
  const auto take_line = [&](TwoScales& scales, int k) {
#pragma unroll
    for (int e = 0; e < 8; ++e) scales.take(Columnwise ? p(e, k) : p(k, e), squared);
  };
  if (s.outer != 1) {  // one block has all lines
    BlockScale scale;
    if (s.chooses()) {
      TwoScales scales(amax[0], level(0), s.exact());
#pragma unroll
      for (int k = 0; k < 8; ++k) take_line(scales, k);
      scales.add_lane(1), scales.add_lane(16);
      scale = scales.better(amax[0], squared);
    } else {
      scale = two_level_scale(amax[0], level(0), s.stochastic, s.exact());
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) f.enc[k] = scale.enc, stored[k] = scale.stored;
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    BlockScale scale;
    if (s.chooses()) {
      TwoScales scales(amax[k], level(k), s.exact());
      take_line(scales, k);
      scales.add_lane(Columnwise ? 16 : 1);  // the other half of the line
      scale = scales.better(amax[k], squared);
    } else {
      scale = two_level_scale(amax[k], level(k), s.stochastic, s.exact());
    }
    f.enc[k] = scale.enc, stored[k] = scale.stored;
  }
}

// Compute this thread's encode factors and store its scales. transposed_spec: the columnwise direction of Work::kSharedCodes.
template <bool Columnwise, class P, class V, class Buffers, class Shared>
__device__ __forceinline__ void find_factors(LineFactors& f, const RegisterTile<V>& p, const EncodingSpec& s,
                                             const Buffers& b, const Tile& tile, const EncodingSpec* transposed_spec,
                                             const EncodingBuffers* transposed_buffers, Shared& smem, const Position& at) {
  const Place place = tile.place<Columnwise>(at);
  const bool one_block = P::outer(s) != 1;  // the thread's lines share a block
  const bool delayed = P::kFull && P::kTakes8 && b.enc != nullptr;

  const int32_t inside = max(min(place.along + 7, b.length - 1), 0);  // in the block, if the thread is
  if constexpr (P::kInTile && P::kOfCodes) {
    const Maxima<V> own = block_maxima<Columnwise>(p, 1, 32, smem, at);
    const float largest = tile_maximum<Columnwise>(own, smem, at);
    const BlockScale anchor = e8m0_scale(largest, s);
    auto factors = [&](auto scale_of) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const BlockScale of_block = scale_of(own[k], s);
        f.enc[k] = of_block.enc;
        f.of_codes[k] = CodeFactor<Element::kE4M3>(static_cast<int32_t>(of_block.stored) - static_cast<int32_t>(anchor.stored));
      }
    };
    is_finite(largest) ? factors(e8m0_scale_of_finite) : factors(e8m0_scale);
    if (threadIdx.x == 0) store_tile_scale(bits_of(power_of_two(anchor.stored)), b, place);
    return;
  }
  if constexpr (P::kAnchored) {  // the run's scale replaces the block's
    const float* const from = P::kInTile ? nullptr : b.anchor + index_of(b.anchors, 0, place.block(s.anchor_log2, inside));
    uint32_t stored[8];
    Maxima<V> own;
    if constexpr (P::kOfCodes || P::kInTile) own = block_maxima<Columnwise>(p, P::outer(s), P::contraction(s), smem, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float amax;
      if constexpr (P::kInTile) {
        amax = own[k];
      } else {
        amax = __ldg(from + static_cast<int64_t>(min(place.line + k, b.lines - 1)) * b.anchors.line_stride);
      }
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
    if constexpr (std::is_same_v<Buffers, PieceBuffers>) read_cut_amaxes<Columnwise>(amax, s, b, place);
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
    if constexpr (P::kExtended) {
      if (s.by_line) {
        extended_scales<Columnwise>(f, stored, p, s, amax, [&](int k) {
          return OfLine(__ldcg(b.tensor_amax + max(min(place.line + k, b.lines - 1), 0)), s);
        });
      } else {
        const OfTensor level = {two_level_target(__ldcg(b.tensor_amax), s), smem.factors[Columnwise]};
        extended_scales<Columnwise>(f, stored, p, s, amax, [&](int) { return level; });
      }
    } else if constexpr (P::kTakes4) {
      float target;
      if constexpr (kIsPiece<Buffers>) {
        target = smem.target[Columnwise];
      } else {
        target = two_level_target(__ldcg(b.tensor_amax), s);
      }
      const OfTensor level = {target, smem.factors[Columnwise]};
      const bool round_up = P::kFull && s.stochastic;
      scales([&](float a) { return two_level_scale(a, level, round_up, s.exact()); });
    }
  } else {
    float least = amax[0], largest = amax[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      if (one_block) continue;
      least = fminf(least, amax[k]);
      largest = __uint_as_float(max(bits_of(largest), bits_of(amax[k])));  // as integers: NaN propagates
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
  if constexpr (P::kSharedCodes) store_scales<true, P>(stored, *transposed_spec, *transposed_buffers, tile, smem, at);
}

// Encode one direction: scales and codes go to memory, transposed codes and one-byte scales to shared memory.
template <bool Columnwise, class P, class V, class Buffers, class Shared>
__device__ __forceinline__ void encode(
    const RegisterTile<V>& p, const EncodingSpec& s, const Buffers& b, const Tile& tile, const EncodingSpec* transposed_spec,
    const EncodingBuffers* transposed_buffers, Shared& smem, const Position& at) {
  LineFactors f;
  if (kIsPiece<Buffers> && P::reads_amax(s, b)) {
    const uint32_t* factors = smem.lines[Columnwise] + (Columnwise ? at.col() : at.row());
#pragma unroll
    for (int k = 0; k < 8; ++k) f.enc[k] = __uint_as_float(factors[k]);
  } else {
    find_factors<Columnwise, P>(f, p, s, b, tile, transposed_spec, transposed_buffers, smem, at);
  }
  auto emit = [&](auto transposed) {
    constexpr bool kTransposed = decltype(transposed)::value;
    auto emit_rounded = [&](auto rounding) {
      emit_codes<Columnwise, kTransposed, P::kSharedCodes, decltype(rounding)::value>(p, f, s, b, tile, smem, at);
    };
    if constexpr (P::kFull || P::kExtended) {
      if (s.stochastic) {
        return emit_rounded(Constant < P::kTakes4 ? Rounding::kStochastic4
                            : P::kTakes6          ? Rounding::kStochastic6
                                                  : Rounding::kStochastic8 > ());
      }
    }
    if constexpr (P::kTakes4) {
      emit_rounded(Constant<Rounding::kE2M1>());
    } else if constexpr (P::kTakes6) {
      emit_rounded(Constant<Rounding::kNearest6>());
    } else if constexpr (P::kOfCodes) {
      emit_rounded(Constant<Rounding::kE4M3Twice>());
    } else {
      s.element == Element::kE5M2 ? emit_rounded(Constant<Rounding::kE5M2>()) : emit_rounded(Constant<Rounding::kE4M3>());
    }
  };
  if constexpr (Columnwise && !kIsPiece<Buffers> && !P::kTakes6) {
    if (s.transposed) return emit(Constant<true>());
  }
  emit(Constant<false>());
}

// Encode both directions with one factor from a history, and compute the amax of every warp.
template <class V, class Buffers>
__device__ __forceinline__ void encode_delayed(const RegisterTile<V>& p, const EncodingSpec& s, const Buffers& b,
                                               const Tile& tile, Smem& smem, const Position& at) {
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

// Raise the amax in memory, or finish delayed scaling if the amax was given. row: buffers of the tile's group.
__device__ __forceinline__ void finish_tile_delayed(
    const EncodingSpec (&spec)[2], const EncodingBuffers (&b)[2], const EncodingBuffers& row, const Smem& smem) {
  if (b[0].amax_given) {
    if (blockIdx.x == 0 && threadIdx.x < 2) finish_delayed(spec[threadIdx.x], b[threadIdx.x]);
  } else if (threadIdx.x < 32) {
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < kThreads / 32 ? smem.lines[0][threadIdx.x] : 0);
    if (threadIdx.x == 0) atomic_max(row.amax, __uint_as_float(largest));
  }
}

// Store one-byte scales from shared memory.
template <bool Columnwise, class P>
__device__ __forceinline__ void flush_scales(
    const EncodingSpec& s, const EncodingBuffers& b, const Tile& tile, const uint8_t (&scales)[kTile][8]) {
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
  // Adjacent threads write adjacent bytes: along the blocks of a line, or along the lines of a block.
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

// Fill the table of encode factors of 4-bit directions: a two-level scale is one of 128 codes, which saves a division per
// block.
__device__ __forceinline__ void fill_factors(
    const EncodingSpec (&spec)[2], const EncodingBuffers& row, const EncodingBuffers& col, float (&factors)[2][128]) {
  const int d = threadIdx.x / 128, code = threadIdx.x % 128;
  const float* const amax = d ? col.tensor_amax : row.tensor_amax;
  if (spec[d].present() && spec[d].two_level() && !spec[d].by_line) factors[d][code] = two_level_factor(code, __ldcg(amax), spec[d]);
}

}  // namespace fsdp_quant
