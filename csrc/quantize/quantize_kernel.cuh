// SPDX-License-Identifier: Apache-2.0
// Quantize [rows, cols] in one or both directions, each with its own format, in one read.
//
//   amax    = largest |x| of a block                     reduced in registers, then lanes, then warps; or given
//   enc     = encode factor of the STORED scale          see device/numeric.cuh
//   element = saturating round of x * enc                to nearest even, or stochastically
//
// Bit-exact with fsdp_quant/ops/reference.py. Blocks are aligned to the global tensor: `shift` positions a shard's first row,
// so that its tiles match those of the whole tensor. Statistics that span tiles (whole rows, whole tensors, anchors) use
// integer atomic maxima in a statistics phase: a launch of its own for large tensors, or the same launch behind a grid
// barrier if every tile has a resident block. Block: 256 threads, a tile of 128 x 128 in registers
// (device/register_tile.cuh). Shared memory holds maxima across warps, transposed codes and one-byte scales. Tails are
// masked, never read or written.
//
// Measured on an H200. Instructions per element limit this as much as bytes: 64-bit index arithmetic alone slowed mxfp8 from
// .7 of the copy rate to .4, so strides come from the host, blocks are shifts, and common blocks are known at compile time.
// Rare cases (NaN, inf, amaxes outside the easy range) are tested once per thread's eight scales. Maxima of whole rows and
// columns go to memory one line per thread; eight lines per lane took half of the time. A kernel that selects one of two
// copies of its buffers by index keeps both in local memory (statistics of tokens ran at a third of the read rate): select
// fields, not copies. A block asks L2 for the values of a later one: 64 matrices of 4096 x 2048 and their tokens 7 to 8 % faster
// with half as many blocks ahead as run; with as many 5 to 6 % (one matrix of 8192 x 8192 at most 2 %), twice as many 16 to 19 %
// slower. Rows that are read for several experts stay in L2 where their codes are stored to leave it first: 131,072 rows x 2048
// of 16,384 in 296 us instead of 331. Rejected: asking L2 ahead for those (3 % slower), for statistics, which read at the copy
// rate, for gradients of SwiGLU and for 4-bit tokens; persistent blocks that prefetch the next tile (5 to 20 % slower everywhere);
// three blocks instead of two, four instead of three, where that spills more than it hides.
#pragma once

#include "quantize/encode.cuh"

namespace fsdp_quant {

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

// Write the amaxes that are given as those of parts. The first block that comes does it, and the others wait for it: it runs,
// so it ends, whatever the order of blocks.
__device__ __forceinline__ void complete_amaxes(const Launch<1>& launch, uint32_t (&smem)[kTile]) {
  uint32_t *const came = launch.arrivals, *const written = came + 1;
  const bool is_first = threadIdx.x == 0 && ptx::ld_acquire(written) == 0 && atomicAdd(came, 1u) == 0;
  if (__syncthreads_or(is_first)) {
    for (int d = 0; d < 2; ++d) {
      if (launch.parts[d] == nullptr) continue;
      uint32_t most = 0;
#pragma unroll 16
      for (int64_t i = threadIdx.x; i < launch.part_counts[d]; i += kThreads)
        most = max(most, __float_as_uint(fabsf(launch.parts[d][i])));
      block_max(most, smem, [&](uint32_t bits) { *launch.tensors[0].buffers[d].amax = __uint_as_float(canonical(bits)); });
      __syncthreads();  // smem is free again
    }
    if (is_first) {
      __threadfence();
      atomicExch(written, 1u);
    }
  } else if (threadIdx.x == 0) {
    while (ptx::ld_acquire(written) == 0) __nanosleep(20);
  }
  __syncthreads();
}

// Select a token group's scales, amaxes, factors and keys, which are stored per group.
template <bool Columnwise>
__device__ __forceinline__ void select_group(EncodingBuffers& b, const EncodingSpec& s, int32_t group) {
  if (s.two_level()) b.tensor_amax += group;
  if (s.operand()) b.scale = static_cast<float*>(b.scale) + group;
  if (b.key != nullptr) b.key += 5 * group;
  if (Columnwise ? !s.whole() : !s.whole_tensor()) return;
  const int64_t at = static_cast<int64_t>(group) * b.compact.lines;
  b.amax += at, b.scale = static_cast<float*>(b.scale) + at;
  if (b.enc != nullptr) b.enc += group;
}

// Whether a direction needs no statistics: it is absent, or has a history.
__device__ __forceinline__ bool needs_no_statistics(const EncodingSpec& s, const EncodingBuffers& b) {
  return !s.present() || (b.enc != nullptr && __ldcg(b.enc) > 0.0f);
}

// Compute statistics or codes of one direction; rotates if needed.
template <bool Columnwise, class P, class V, class Buffers>
__device__ __forceinline__ void process_direction(bool statistics, const RegisterTile<V>& p, const EncodingSpec& s,
                                                  const Buffers& b, const Tile& tile, const EncodingSpec* transposed_spec,
                                                  const EncodingBuffers* transposed_buffers, Smem& smem, const Position& at) {
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
        encode<Columnwise, P>(patch, s, b, tile, transposed_spec, transposed_buffers, smem, at);
      }
    };
    if constexpr (P::kRotates) {
      if (s.rotated) {
        RegisterTile<BF16> rotated_tile;
        rotate<Columnwise>(p, rotated_tile, at);
        return work(rotated_tile);
      }
    }
    work(p);
  }
}

// Tiles between a block's own and the one that it asks L2 for: half as many as an H100 runs blocks of three a processor.
constexpr int32_t kAhead = 198;

// Ask L2 for the values of a block that runs `kAhead` tiles behind that of tile `own`: two threads a row, 64 values each.
template <class In, int Capacity>
__device__ __forceinline__ void prefetch_later(const Launch<Capacity>& launch, int32_t own) {
  constexpr bool kTokens = std::is_base_of_v<LoadTokens, In>, kGated = kIsGated<In> || std::is_same_v<In, LoadSwiGLU>;
  const int32_t n = launch.reversed ? own - kAhead : own + kAhead;
  if (n < 0 || n >= launch.tiles) return;
  const TensorArgs& t = launch.tensors[Capacity > 1 ? index_of_tile(launch, n) : 0];
  const Tile tile = tile_of(t, n - t.first_tile);
  int32_t first = tile.row0, rows = t.rows;
  if constexpr (kTokens) {
    const int2 source = *reinterpret_cast<const int2*>(launch.sources + tile.row0 / kTile * 4);  // first row, rows
    first = source.x, rows = source.x + source.y;
  }
  const int64_t row = first + static_cast<int32_t>(threadIdx.x / 2);
  const int32_t col = tile.col0 + static_cast<int32_t>(threadIdx.x % 2 * 64);
  if (row < 0 || row >= rows || col >= t.cols) return;
  const int bytes = launch.input == Input::kBF16 || launch.input == Input::kF16 ? 2 : 4;
  const char* const values = static_cast<const char*>(t.x) + (row * t.row_stride + col) * bytes;
  ptx::prefetch_to_l2(values);
  if (bytes == 4 && col + 32 < t.cols) ptx::prefetch_to_l2(values + 128);
  if constexpr (kGated) ptx::prefetch_to_l2(static_cast<const char*>(launch.up) + (row * launch.up_stride + col) * 2);
}

template <class In, class Row, class Col, int Capacity, int MinBlocks>
__global__ void __launch_bounds__(kThreads, MinBlocks) quantize_kernel(
    const __grid_constant__ typename LaunchOf<In, Capacity>::type launch) {
  __shared__ Smem smem;
  const Position at;
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const int32_t n = launch.reversed ? launch.tiles - 1 - static_cast<int32_t>(blockIdx.x) : blockIdx.x;
  const int which = Capacity > 1 ? index_of_tile(launch, n) : 0;
  const TensorArgs& t = launch.tensors[which];
  constexpr bool kTokens = std::is_base_of_v<LoadTokens, In>, kOrdered = std::is_same_v<In, LoadOrdered>;
  Tile tile = tile_of(t, n - t.first_tile, kOrdered && t.tile_rows > 1);
  Tile row_tile = tile;  // rowwise direction: rows of x
  using Buffers = std::conditional_t<kOrdered, StreamedBuffers,
                                     std::conditional_t<kTokens, EncodingBuffers, const EncodingBuffers&>>;
  Buffers row_buffers{t.buffers[0]}, col_buffers{t.buffers[1]};
  if constexpr (kTokens) {
    const int4 source =
        reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows, group, first padded row
    if (source.y == 0) return;
    row_tile.row0 = source.x, tile.start = source.w, row_tile.start = source.x - (tile.row0 - source.w);
    row_buffers.lines = row_buffers.stored.lines = source.x + source.y;
    select_group<false>(row_buffers, row, source.z), select_group<true>(col_buffers, col, source.z);
  }

  constexpr bool kOnlyStatistics = Row::kWork == Work::kStatistics || Row::kWork == Work::kRotated;
  if constexpr (kOnlyStatistics) {
    if (launch.sums == nullptr && needs_no_statistics(row, row_buffers) && needs_no_statistics(col, col_buffers)) return;
  }
  RegisterTile<typename In::Value> p;
  load_values<In>(p, launch, which, row_tile.row0 + at.row(), tile.col0 + at.col(), row_buffers.lines);
  if constexpr (!kOrdered && !LaunchOf<In, 1>::kLoads && (Row::kTakes8 || Col::kTakes8)) prefetch_later<In, Capacity>(launch, n);
  if constexpr (std::is_same_v<In, LoadBF16> && Capacity == 1) {
    if (launch.sums != nullptr) sum_columns(p, launch.sums, t, tile, smem, at);
  }
  if constexpr (kOnlyStatistics || Row::kFull || Col::kFull) {
    if (launch.phases & kStatistics) {
      process_direction<false, Row>(true, p, row, row_buffers, row_tile, nullptr, nullptr, smem, at);
      process_direction<true, Col>(true, p, col, col_buffers, tile, nullptr, nullptr, smem, at);
      if (has_line_maxima(row) || has_line_maxima(col)) {
        __syncthreads();
        flush_lines(launch.spec, row_buffers, col_buffers, tile, row_tile, smem);
      }
    }
  }
  if constexpr (!kOnlyStatistics) {
    if constexpr (Row::kFull || Col::kFull) {
      if (launch.barrier != nullptr) grid_barrier(launch.barrier, gridDim.x);
    }
    if constexpr (Capacity == 1 && (Row::kReadsAmax || Col::kReadsAmax)) {
      if (launch.arrivals != nullptr) complete_amaxes(launch, smem.lines[0]);
    }
    if constexpr (Row::kTakes4 || Col::kTakes4) {
      fill_factors(launch.spec, t.buffers[0], t.buffers[1], smem.factors);
      __syncthreads();
    }
    process_direction<false, Row>(false, p, row, row_buffers, row_tile, &col, &col_buffers, smem, at);
    process_direction<true, Col>(false, p, col, col_buffers, tile, nullptr, nullptr, smem, at);
    __syncthreads();
    if constexpr (Row::kDelayed) finish_tile_delayed(launch.spec, t.buffers, row_buffers, smem);
    if constexpr (Row::kEncodes && !Row::kAnchored) {
      if (row.present() && Row::byte_scales(row)) flush_scales<false, Row>(row, t.buffers[0], tile, smem.scales[0]);
    }
    using Second = std::conditional_t<Row::kSharedCodes, Row, Col>;  // encodes the columnwise direction
    if constexpr (Second::kEncodes && !Second::kAnchored) {
      if (col.present() && Second::byte_scales(col)) flush_scales<true, Second>(col, t.buffers[1], tile, smem.scales[1]);
    }
    if constexpr (Second::kEncodes) {
      if (col.present() && col.transposed)
        flush_transposed<Second::kTakes4, kOrdered>(t.buffers[1].data, t.buffers[1].vector_store, tile.row0,
                                                    tile.col0, t.buffers[1].length, t.cols, smem.codes);
    }
  }
}

// The host zeroes the amaxes of cooperative launches, as no block may add before that.
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

// Of grouped tokens.
template <class Row, class Col, int MinBlocks = 3>
cudaError_t launch_tokens(const Launch<1>& launch, cudaStream_t stream) {
  return launch.order != nullptr ? launch_instance<LoadOrdered, Row, Col, 1, MinBlocks>(launch, stream)
                                 : launch_instance<LoadTokens, Row, Col, 1, MinBlocks>(launch, stream);
}

}  // namespace fsdp_quant
