// SPDX-License-Identifier: Apache-2.0
// Transpose bytes and nibbles, and convert scales to padded 128 x 4 tiles, for one or many tensors per launch. Transposes
// move a 128 x 128 tile through registers (8 x 8 per thread) and swizzled shared memory, so that every global access is a
// whole segment.
#include "device/register_tile.cuh"
#include "layout/layout.h"

namespace fsdp_quant {

namespace {

template <bool Nibbles>
__device__ __forceinline__ void transpose_tile(const RelayoutItem& m, int64_t row0, int64_t col0, uint4* smem) {
  constexpr int kPer = Nibbles ? 2 : 1;  // elements per byte
  const Position at;
  const int64_t source_bytes = (m.cols + kPer - 1) / kPer;
  const int64_t row = row0 + at.row(), start = (col0 + at.col()) / kPer;
  uint2 v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = make_uint2(0, 0);
    const uint8_t* p = m.source + (row + i) * source_bytes + start;
    if (row + i >= m.rows) continue;
    if (m.vector_load && start + 8 / kPer <= source_bytes) {
      if constexpr (Nibbles) {
        v[i].x = __ldg(reinterpret_cast<const uint32_t*>(p));
      } else {
        v[i] = __ldg(reinterpret_cast<const uint2*>(p));
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8 / kPer; ++e) {
        if (start + e < source_bytes) (e < 4 ? v[i].x : v[i].y) |= static_cast<uint32_t>(p[e]) << (8 * (e & 3));
      }
    }
  }
  stage_transposed<Nibbles>(v, smem, at);
  __syncthreads();
  flush_transposed<Nibbles>(m.out, m.vector_store, row0, col0, m.rows, m.cols, smem);
}

// 128 operand rows by 128 scale columns; a thread writes 4 bytes of a 512-byte tile per step.
__device__ __forceinline__ void swizzle_tile(const RelayoutItem& m, int64_t row0, int64_t col0) {
  const bool transposed = m.kind == Relayout::kSwizzleTransposed;
  const int64_t blocks = transposed ? m.rows : m.cols, tile_cols = (blocks + 3) / 4;
  for (int u = threadIdx.x; u < kTile * 32; u += kThreads) {
    const int64_t line = row0 + u % kTile, block = col0 + u / kTile * 4;
    if (block >= tile_cols * 4) break;
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (line < m.outer && block + e < blocks) {
        const int64_t r = transposed ? block + e : line / m.outer_block;
        const int64_t c = transposed ? line / m.outer_block : block + e;
        word |= static_cast<uint32_t>(__ldg(m.source + r * m.cols + c)) << (8 * e);
      }
    }
    const int64_t base = (row0 / kTile * tile_cols + block / 4) * 512;
    *reinterpret_cast<uint32_t*>(m.out + base + line % 32 * 16 + line % kTile / 32 * 4) = word;
  }
}

// 128 operand rows by 128 scale columns; each scale is one word of a tile.
__device__ __forceinline__ void spread_tile(const RelayoutItem& m, int64_t row0, int64_t col0) {
  const bool transposed = m.kind == Relayout::kSpreadTransposed;
  const int64_t blocks = transposed ? m.rows : m.cols;
  for (int u = threadIdx.x; u < kTile * kTile; u += kThreads) {
    const int64_t line = row0 + u % kTile, block = col0 + u / kTile, group = line / m.outer_block;
    if (block >= blocks) break;
    const int64_t at = transposed ? block * m.cols + group : group * m.cols + block;
    const uint32_t bits = line < m.outer ? __ldg(reinterpret_cast<const uint32_t*>(m.source) + at) : 0;
    const int64_t base = (row0 / kTile * blocks + block) * 512;
    *reinterpret_cast<uint32_t*>(m.out + base + line % 32 * 16 + line % kTile / 32 * 4) = (bits >> 23 & 0xFF) * 0x01010101u;
  }
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads) relayout_kernel(const __grid_constant__ RelayoutLaunch<Capacity> launch) {
  __shared__ uint4 smem[kTile * 8];
  const RelayoutItem& m = launch.tensors[Capacity > 1 ? index_of_tile(launch, blockIdx.x) : 0];
  const int64_t local = blockIdx.x - m.first_tile;
  const int64_t row0 = local / m.tile_cols * kTile, col0 = local % m.tile_cols * kTile;
  switch (m.kind) {
    case Relayout::kTransposeBytes:
      return transpose_tile<false>(m, row0, col0, smem);
    case Relayout::kTransposeNibbles:
      return transpose_tile<true>(m, row0, col0, smem);
    case Relayout::kSpread:
    case Relayout::kSpreadTransposed:
      return spread_tile(m, row0, col0);
    default:
      return swizzle_tile(m, row0, col0);
  }
}

}  // namespace

cudaError_t launch_relayout(const RelayoutLaunch<1>& launch, cudaStream_t stream) {
  relayout_kernel<1><<<static_cast<unsigned>(launch.tiles), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_relayout_multi_tensor(const RelayoutLaunch<kRelayoutCapacity>& launch, cudaStream_t stream) {
  relayout_kernel<kRelayoutCapacity><<<static_cast<unsigned>(launch.tiles), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
