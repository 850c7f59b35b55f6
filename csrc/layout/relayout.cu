// Transposes of bytes and nibbles, and scales into padded 128 x 4 tiles: one matrix, or all of a parameter group, in
// one launch. Transposes move a 128 x 128 tile through registers (8 x 8 a thread) and swizzled shared memory, so that
// every access to memory is a whole segment.
#include "device/patch.cuh"
#include "layout/layout.h"

namespace fsdp_quant {

namespace {

// Rows 0 to 3 of a 4 x 4 byte matrix (byte j of w[i] is element (i, j)) become its columns.
__device__ __forceinline__ void transpose4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_lo = __byte_perm(a, b, 0x5140), ab_hi = __byte_perm(a, b, 0x7362);
  const uint32_t cd_lo = __byte_perm(c, d, 0x5140), cd_hi = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_lo, cd_lo, 0x5410), b = __byte_perm(ab_lo, cd_lo, 0x7632);
  c = __byte_perm(ab_hi, cd_hi, 0x5410), d = __byte_perm(ab_hi, cd_hi, 0x7632);
}

// 8 x 8 nibbles (nibble j of w[i] is element (i, j)): halves of words, of halves, of bytes are exchanged in turn.
__device__ __forceinline__ void transpose_nibbles(uint32_t (&w)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const uint32_t mask = step == 4 ? 0x0000FFFFu : step == 2 ? 0x00FF00FFu : 0x0F0F0F0Fu;
    const int bits = 4 * step;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const uint32_t upper = w[i], lower = w[i + step];
      w[i] = (upper & mask) | ((lower & mask) << bits);
      w[i + step] = ((upper >> bits) & mask) | (lower & ~mask);
    }
  }
}

template <bool Nibbles>
__device__ __forceinline__ void transpose_tile(const RelayoutItem& m, int64_t row0, int64_t col0, uint4* smem) {
  constexpr int kPer = Nibbles ? 2 : 1;  // elements a byte
  const Position at;
  const int64_t source_bytes = (m.cols + kPer - 1) / kPer;
  const int64_t row = row0 + at.row(), start = (col0 + at.col()) / kPer;
  uint32_t lo[8], hi[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    lo[i] = hi[i] = 0;
    const uint8_t* p = m.source + (row + i) * source_bytes + start;
    if (row + i >= m.rows) continue;
    if (m.vector_load && start + 8 / kPer <= source_bytes) {
      if constexpr (Nibbles) {
        lo[i] = __ldg(reinterpret_cast<const uint32_t*>(p));
      } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
        lo[i] = v.x, hi[i] = v.y;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8 / kPer; ++e) {
        if (start + e < source_bytes) (e < 4 ? lo[i] : hi[i]) |= static_cast<uint32_t>(p[e]) << (8 * (e & 3));
      }
    }
  }
  const int chunk = (at.warp * 2 + at.half) ^ at.group;
  if constexpr (Nibbles) {
    transpose_nibbles(lo);
#pragma unroll
    for (int k = 0; k < 8; ++k) reinterpret_cast<uint32_t*>(smem)[(at.col() + k) * 16 + chunk] = lo[k];
  } else {
    transpose4(lo[0], lo[1], lo[2], lo[3]);
    transpose4(lo[4], lo[5], lo[6], lo[7]);
    transpose4(hi[0], hi[1], hi[2], hi[3]);
    transpose4(hi[4], hi[5], hi[6], hi[7]);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint2 v = k < 4 ? make_uint2(lo[k], lo[k + 4]) : make_uint2(hi[k - 4], hi[k]);
      reinterpret_cast<uint2*>(smem)[(at.col() + k) * 16 + chunk] = v;
    }
  }
  __syncthreads();
  flush_transposed<Nibbles>(m.out, m.vector_store, row0, col0, m.rows, m.cols, smem);
}

// 128 operand rows by 128 scale columns: 4 bytes of a 512-byte tile a thread and step.
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

template <int Capacity>
__global__ void __launch_bounds__(kThreads) relayout_kernel(const __grid_constant__ RelayoutLaunch<Capacity> launch) {
  __shared__ uint4 smem[kTile * 8];
  int which = 0;
  if constexpr (Capacity > 1) {
    for (int low = 0, high = launch.count; high - low > 1;) {
      const int middle = (low + high) / 2;
      (launch.items[middle].first_tile <= blockIdx.x ? low : high) = middle;
      which = low;
    }
  }
  const RelayoutItem& m = launch.items[which];
  const int64_t local = blockIdx.x - m.first_tile;
  const int64_t row0 = local / m.tile_cols * kTile, col0 = local % m.tile_cols * kTile;
  switch (m.kind) {
    case Relayout::kTransposeBytes:
      return transpose_tile<false>(m, row0, col0, smem);
    case Relayout::kTransposeNibbles:
      return transpose_tile<true>(m, row0, col0, smem);
    default:
      return swizzle_tile(m, row0, col0);
  }
}

}  // namespace

cudaError_t launch_relayout(const RelayoutLaunch<1>& launch, cudaStream_t stream) {
  relayout_kernel<1><<<static_cast<unsigned>(launch.tiles), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_relayout_group(const RelayoutLaunch<kRelayoutCapacity>& launch, cudaStream_t stream) {
  relayout_kernel<kRelayoutCapacity><<<static_cast<unsigned>(launch.tiles), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
