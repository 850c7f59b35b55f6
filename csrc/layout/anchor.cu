// SPDX-License-Identifier: Apache-2.0
// Re-express codes with one exponent E per line, run of a line, tile or tensor: q' = operand(q * 2^(e - E)), E = max(0, max(e) -
// shift) over the line, run, tile or tensor. The first launch writes 2^(E - 127), or the largest e of parts of a tensor. The
// second converts the codes in 128 x 128 tiles, 8 x 8 per thread; E of tiles is found by the second. Grid y: matrix; z: run;
// surplus blocks exit. Two-level codes: q' = e4m3(q * s / 8), and 8 D for the tensor, both in the second launch.
#include "device/amax.cuh"
#include "device/register_tile.cuh"
#include "device/rescale.cuh"
#include "layout/decode_codes.cuh"
#include "layout/layout.h"

namespace fsdp_quant {

namespace {

__device__ __forceinline__ int32_t scale_rows(const AnchorCodes& a) {
  return ((a.rows - 1) >> (a.columnwise ? a.contraction_log2 : a.outer_log2)) + 1;
}

__device__ __forceinline__ int32_t scale_cols(const AnchorCodes& a) {
  return ((a.cols - 1) >> (a.columnwise ? a.outer_log2 : a.contraction_log2)) + 1;
}

// E of the largest exponent; NaN propagates.
__device__ __forceinline__ uint32_t below(uint32_t exponent, const AnchorCodes& a) {
  return exponent == 255 ? 255 : max(static_cast<int32_t>(exponent) - a.shift, 0);
}

// This block's run, in blocks along the contraction.
struct RunBlocks {
  int32_t first, end;

  __device__ RunBlocks(const AnchorCodes& a, int32_t blocks) : first(0), end(blocks) {
    if (a.run_log2 == 31) return;
    const int32_t log2 = a.run_log2 - a.contraction_log2;
    first = static_cast<int32_t>(blockIdx.z) << log2, end = min(blocks, first + (1 << log2));
  }
  __device__ bool exists() const { return blockIdx.z == 0 || first < end; }
};

// This block's matrix: of a stack, or of a table of tensors.
__device__ __forceinline__ AnchorCodes matrix_of(AnchorCodes a) {
  const int64_t i = blockIdx.y;
  a.data += i * a.rows * row_bytes(a.element, a.cols), a.out += i * a.rows * a.cols, a.scale += i * scale_rows(a) * scale_cols(a);
  a.line_scale += i * a.line_plane, a.parts += i * kExponentParts;
  return a;
}

__device__ __forceinline__ const AnchorCodes& matrix_of(const AnchorMultiTensor& group) { return group.items[blockIdx.y]; }

__device__ __forceinline__ uint32_t byte_of(uint2 v, int e) { return ((e < 4 ? v.x : v.y) >> (8 * (e & 3))) & 0xFF; }

__device__ __forceinline__ uint2 larger(uint2 a, uint2 b) { return make_uint2(__vmaxu4(a.x, b.x), __vmaxu4(a.y, b.y)); }

__device__ __forceinline__ bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Exchange with the lane whose index differs in this bit.
__device__ __forceinline__ uint2 from_lane(uint2 v, int bit) {
  return make_uint2(__shfl_xor_sync(0xFFFFFFFFu, v.x, bit), __shfl_xor_sync(0xFFFFFFFFu, v.y, bit));
}

// Exponents of rows: 8 lanes read a row of scales, 8 bytes each per step.
constexpr int kLanes = 8;

template <typename Of>
__global__ void __launch_bounds__(kThreads) row_exponents_kernel(const __grid_constant__ Of of_all) {
  const AnchorCodes a = matrix_of(of_all);
  const int32_t lane = threadIdx.x % kLanes, line = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int32_t lines = ((a.rows - 1) >> a.outer_log2) + 1, blocks = scale_cols(a);
  const RunBlocks run(a, blocks);
  if (!run.exists()) return;
  uint2 top = make_uint2(0, 0);
  if (line < lines) {
    const uint8_t* row = a.scale + static_cast<int64_t>(line) * blocks;
#pragma unroll 4
    for (int32_t block = run.first + lane * 8; block < run.end; block += kLanes * 8)
      top = larger(top, load8(row + block, run.end - block, a.vector_scales && (run.first & 7) == 0));
  }
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) top = larger(top, from_lane(top, bit));
  uint32_t exponent = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) exponent = max(exponent, byte_of(top, e));
  if (line >= lines) return;
  const int32_t outer = 1 << a.outer_log2, first = line << a.outer_log2;
  float* out = a.line_scale + static_cast<int64_t>(blockIdx.z) * a.scale_ld + first;
  for (int32_t i = lane; i < outer && first + i < a.rows; i += kLanes) out[i] = power_of_two(below(exponent, a));
}

// Exponents of columns: a block reads 128 columns of scales, 8 bytes per thread, 64 rows per step.
constexpr int kColumnThreads = 1024, kGroups = 16, kWarps = kColumnThreads / 32;

template <typename Of>
__global__ void __launch_bounds__(kColumnThreads) col_exponents_kernel(const __grid_constant__ Of of_all) {
  const AnchorCodes a = matrix_of(of_all);
  __shared__ uint2 parts[kWarps * kGroups];
  __shared__ uint8_t tops[kTile];
  const int32_t lines = scale_cols(a), blocks = scale_rows(a);
  const RunBlocks run(a, blocks);
  if (!run.exists()) return;
  const int32_t line = blockIdx.x * kTile + threadIdx.x % kGroups * 8;
  uint2 top = make_uint2(0, 0);
#pragma unroll 4
  for (int32_t block = run.first + threadIdx.x / kGroups; block < run.end; block += kColumnThreads / kGroups)
    top = larger(top, load8(a.scale + static_cast<int64_t>(block) * lines + line, lines - line, a.vector_scales));
  top = larger(top, from_lane(top, 16));
  if (threadIdx.x % 32 < kGroups) parts[threadIdx.x / 32 * kGroups + threadIdx.x % 32] = top;
  __syncthreads();
  if (threadIdx.x < kTile) {
    uint32_t exponent = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint32_t part = reinterpret_cast<const uint8_t*>(parts)[warp * kTile + threadIdx.x];
      exponent = max(exponent, part);
    }
    tops[threadIdx.x] = static_cast<uint8_t>(below(exponent, a));
  }
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTile << a.outer_log2;
  float* out = a.line_scale + static_cast<int64_t>(blockIdx.z) * a.scale_ld + first;
  for (int32_t i = threadIdx.x; i < kTile << a.outer_log2 && first + i < a.cols; i += kColumnThreads)
    out[i] = power_of_two(tops[i >> a.outer_log2]);
}

// Exponent of block i of a table of fp32 scales. A block of zeros has scale 1, unrelated to its magnitude, and counts as the
// least exponent. All lanes call it, with consecutive blocks.
__device__ __forceinline__ uint32_t exponent_of_power(const AnchorCodes& a, int32_t i) {
  const int32_t width = scale_cols(a), lane = threadIdx.x % 32;
  const bool exists = i < scale_rows(a) * width;
  const float scale = exists ? __ldg(a.powers + i) : 0.0f;
  uint32_t exponent = __float_as_uint(scale) >> 23 & 0xFF;
  for (uint32_t rest = __ballot_sync(~0u, scale == 1.0f); rest != 0; rest &= rest - 1) {
    const int32_t which = i - lane + __ffs(rest) - 1, row0 = which / width * kTile, col0 = which % width * kTile;
    uint32_t any = 0;
    for (int32_t e = lane; e < kTile * kTile; e += 32) {
      const int32_t row = row0 + e / kTile, col = col0 + e % kTile;
      if (row < a.rows && col < a.cols) any |= a.data[static_cast<int64_t>(row) * a.cols + col] & 0x7Fu;
    }
    if (!__any_sync(~0u, any) && i == which) exponent = 0;
  }
  return exponent;
}

// Largest exponent of a tensor, in parts: of the blocks that a block of threads reads.
constexpr int kPartThreads = 1024;

template <typename Of>
__global__ void __launch_bounds__(kPartThreads) tensor_exponent_kernel(const __grid_constant__ Of of_all) {
  const AnchorCodes a = matrix_of(of_all);
  __shared__ uint32_t of_warps[kPartThreads / 32];
  const int64_t count = static_cast<int64_t>(scale_rows(a)) * scale_cols(a);
  const int32_t thread = blockIdx.x * kPartThreads + threadIdx.x;
  uint32_t exponent = 0;
  if (a.powers != nullptr) {
    for (int64_t i = thread; i - threadIdx.x % 32 < count; i += kExponentParts * kPartThreads)  // uniform per warp
      exponent = max(exponent, exponent_of_power(a, static_cast<int32_t>(i)));
  } else {
    uint2 top = make_uint2(0, 0);
    const bool vectors = is_aligned(a.scale, 8);
#pragma unroll 8
    for (int64_t i = thread * int64_t{8}; i < count; i += kExponentParts * kPartThreads * 8)
      top = larger(top, load8(a.scale + i, static_cast<int32_t>(min(count - i, int64_t{8})), vectors));
#pragma unroll
    for (int e = 0; e < 8; ++e) exponent = max(exponent, byte_of(top, e));
  }
  block_max(exponent, of_warps, [&](uint32_t most) { a.parts[blockIdx.x] = static_cast<uint8_t>(most); });
}

// E of the tensor; one thread writes its scale.
__device__ __forceinline__ int32_t tensor_exponent(const AnchorCodes& a) {
  static_assert(kExponentParts == 32, "a lane reads one");
  const uint32_t exponent = below(__reduce_max_sync(~0u, static_cast<uint32_t>(__ldg(a.parts + threadIdx.x % 32))), a);
  if (blockIdx.x + threadIdx.x == 0) *a.line_scale = power_of_two(exponent);
  return static_cast<int32_t>(exponent);
}

// Factor of codes: a power of two, or for two-level codes (e2m1) the scale of their block.
template <Element E, bool TwoLevel>
using FactorOf = CodeFactor<E == Element::kE5M2 || TwoLevel ? E : Element::kE4M3>;

// Convert codes 2 k and 2 k + 1 of eight.
template <Element E, class Factor>
__device__ __forceinline__ uint32_t scaled_pair_of(uint2 v, int k, const Factor& factor) {
  if constexpr (code_bits(E) == 8) {
    return scaled_pair<E>((k < 2 ? v.x : v.y) >> (16 * (k & 1)) & 0xFFFF, factor);
  } else {
    __half2 pair = halves_of<E>(v, k);
    if constexpr (kHalfScale<E> != 1.0f) pair = __hmul2(pair, __float2half2_rn(kHalfScale<E>));
    return ptx::cvt_e4m3x2_f16x2(__hmul2(pair, *reinterpret_cast<const __half2*>(&factor.first)));
  }
}

// Exponents E of 8 lines, from the exponent field of their fp32 scales; also right for the subnormal 2^-127 and NaN.
template <bool Columnwise>
__device__ __forceinline__ void read_line_exponents(int32_t (&out)[8], const AnchorCodes& a, int32_t row, int32_t col) {
  const int32_t lines = Columnwise ? a.cols : a.rows, line = Columnwise ? col : row;
  const int64_t run = (Columnwise ? row : col) >> a.run_log2;
  const auto* at = reinterpret_cast<const uint32_t*>(a.line_scale) + run * a.scale_ld + line;
  if (line + 8 <= lines) {
    const uint4 lo = __ldg(reinterpret_cast<const uint4*>(at)), hi = __ldg(reinterpret_cast<const uint4*>(at) + 1);
    const uint32_t bits[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = bits[k] >> 23;
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) out[k] = line + k < lines ? __ldg(at + k) >> 23 : 255;  // no block is above it
}

// Exponents of the blocks of 8 lines.
template <bool Columnwise>
__device__ __forceinline__ void read_exponents(int32_t (&out)[8], const AnchorCodes& a, int32_t row, int32_t col) {
  const int32_t lines = Columnwise ? a.cols : a.rows, line = Columnwise ? col : row;
  const int32_t line_blocks = ((lines - 1) >> a.outer_log2) + 1, block = (Columnwise ? row : col) >> a.contraction_log2;
  const int64_t width = scale_cols(a);
  if (a.outer_log2 > 0) {  // one block covers all 8
    const int32_t which = line >> a.outer_log2;
    const int64_t i = Columnwise ? block * width + which : which * width + block;
    const uint32_t e = a.powers != nullptr ? __float_as_uint(__ldg(a.powers + i)) >> 23 & 0xFF : __ldg(a.scale + i);
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = e;
  } else if (Columnwise) {
    const uint2 v = load8(a.scale + block * width + line, line_blocks - line, a.vector_scales);
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = byte_of(v, k);
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = line + k < line_blocks ? __ldg(a.scale + (line + k) * width + block) : 0;
  }
}

// E of the tile from row0 and col0; one thread writes its scale.
__device__ __forceinline__ int32_t tile_exponent(const AnchorCodes& a, int32_t row0, int32_t col0) {
  __shared__ uint32_t of_warps[kThreads / 32];
  const int32_t row_log2 = a.columnwise ? a.contraction_log2 : a.outer_log2;
  const int32_t col_log2 = a.columnwise ? a.outer_log2 : a.contraction_log2;
  const int32_t width = scale_cols(a), rows = scale_rows(a) - (row0 >> row_log2), cols = width - (col0 >> col_log2);
  const uint8_t* const scale = a.scale + static_cast<int64_t>(row0 >> row_log2) * width + (col0 >> col_log2);
  uint32_t top = 0;
  for (int32_t i = threadIdx.x; i < (kTile >> row_log2) * (kTile >> col_log2); i += kThreads) {
    const int32_t row = i >> (7 - col_log2), col = i & ((kTile >> col_log2) - 1);
    if (row < rows && col < cols) top = max(top, static_cast<uint32_t>(__ldg(scale + static_cast<int64_t>(row) * width + col)));
  }
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) top = max(top, of_warps[w]);
  const uint32_t exponent = below(top, a);
  const int32_t line = (a.columnwise ? col0 : row0) / kTile, block = (a.columnwise ? row0 : col0) / kTile;
  if (threadIdx.x == 0) a.line_scale[static_cast<int64_t>(line) * a.scale_ld + block] = power_of_two(exponent);
  return static_cast<int32_t>(exponent);
}

template <Element E, bool TwoLevel, bool Columnwise, typename Of>
__global__ void __launch_bounds__(kThreads, 4) codes_kernel(const __grid_constant__ Of of_all) {
  const AnchorCodes a = matrix_of(of_all);
  __shared__ uint4 smem[kTile * 8];
  const Position at;
  const int32_t tile_cols = (a.cols - 1) / kTile + 1;
  const int32_t row0 = blockIdx.x / tile_cols * kTile, col0 = blockIdx.x % tile_cols * kTile;
  if (row0 >= a.rows) return;
  const int32_t row = row0 + at.row(), col = col0 + at.col();
  int32_t of_all_lines = 0;
  if (!TwoLevel && a.tiles) of_all_lines = tile_exponent(a, row0, col0);
  if (TwoLevel && blockIdx.x + threadIdx.x == 0)
    *a.line_scale = __fmul_rn(8.0f, tensor_decode_scale(__ldg(a.tensor_amax), a.tensor_max));
  const int32_t bytes = row_bytes(E, a.cols);
  uint2 v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = make_uint2(0, 0);
    if (row + i < a.rows && col < a.cols) v[i] = load_codes<E>(a.data + static_cast<int64_t>(row + i) * bytes, col, bytes, a.vector_load);
  }
  if (!TwoLevel && a.whole) of_all_lines = tensor_exponent(a);  // after the loads of codes, which take longer
  if (row < a.rows && col < a.cols) {
    int32_t own[8], line[8];
    read_exponents<Columnwise>(own, a, row, col);
    if constexpr (!TwoLevel) {
      if (a.whole || a.tiles) {
#pragma unroll
        for (int k = 0; k < 8; ++k) line[k] = of_all_lines, own[k] = a.powers != nullptr ? min(own[k], line[k]) : own[k];
      } else {
        read_line_exponents<Columnwise>(line, a, row, col);
      }
    }
    using Factor = FactorOf<E, TwoLevel>;
    Factor factor[8];  // rowwise: per row, duplicated; columnwise: four, of two columns each
#pragma unroll
    for (int k = 0; k < 8; ++k) factor[k] = Factor(TwoLevel ? own[k] : own[k] - line[k]);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (!Columnwise) factor[k] = Factor(factor[k], factor[k]);
      if (Columnwise && k < 4) factor[k] = Factor(factor[2 * k], factor[2 * k + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t pair[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) pair[k] = scaled_pair_of<E>(v[i], k, factor[Columnwise ? k : i]);
      v[i] = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    }
  }
  if (a.transposed) {
    stage_transposed<false>(v, smem, at);
    __syncthreads();
    return flush_transposed<false>(a.out, a.vector_store, row0, col0, a.rows, a.cols, smem);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (row + i >= a.rows) continue;
    uint8_t* p = a.out + static_cast<int64_t>(row + i) * a.cols + col;
    if (a.vector_store && col + 8 <= a.cols) {
      *reinterpret_cast<uint2*>(p) = v[i];
    } else {
      store_bytes(p, v[i].x, v[i].y, a.cols - col);
    }
  }
}

// Grid size of each kernel, and runs.
struct Blocks {
  int64_t exponents, tiles, runs = 1;
};

Blocks blocks_of(const AnchorCodes& a) {
  const int64_t line_blocks = (((a.columnwise ? a.cols : a.rows) - 1) >> a.outer_log2) + 1;
  const int64_t each = a.columnwise ? kTile : kThreads / kLanes;
  const int64_t tiles = static_cast<int64_t>((a.rows - 1) / kTile + 1) * ((a.cols - 1) / kTile + 1);
  const int64_t length = a.columnwise ? a.rows : a.cols;
  if (a.whole) return {kExponentParts, tiles};
  return {(line_blocks + each - 1) / each, tiles, a.run_log2 == 31 ? 1 : ((length - 1) >> a.run_log2) + 1};
}

template <Element E, bool TwoLevel = false, typename Of>
cudaError_t launch_codes(const Of& of_all, const AnchorCodes& first, dim3 tiles, cudaStream_t stream) {
  const auto kernel = first.columnwise ? codes_kernel<E, TwoLevel, true, Of> : codes_kernel<E, TwoLevel, false, Of>;
  kernel<<<tiles, kThreads, 0, stream>>>(of_all);
  return cudaGetLastError();
}

template <typename Of>
cudaError_t launch_elements(const Of& of_all, const AnchorCodes& first, dim3 tiles, cudaStream_t stream) {
  switch (first.element) {
    case Element::kE5M2:
      return launch_codes<Element::kE5M2>(of_all, first, tiles, stream);
    case Element::kE2M1:
      return launch_codes<Element::kE2M1>(of_all, first, tiles, stream);
    case Element::kE2M3:
      return launch_codes<Element::kE2M3>(of_all, first, tiles, stream);
    case Element::kE3M2:
      return launch_codes<Element::kE3M2>(of_all, first, tiles, stream);
    default:
      return launch_codes<Element::kE4M3>(of_all, first, tiles, stream);
  }
}

template <typename Of>
cudaError_t launch(const Of& of_all, const AnchorCodes& first, Blocks most, int32_t matrices, cudaStream_t stream) {
  if (most.tiles > 0x7FFFFFFF || most.runs > 0xFFFF) return cudaErrorInvalidConfiguration;
  const dim3 tiles(static_cast<unsigned>(most.tiles), matrices);
  const dim3 blocks(static_cast<unsigned>(most.exponents), matrices, static_cast<unsigned>(most.runs));
  if (first.two_level) return launch_codes<Element::kE2M1, true>(of_all, first, tiles, stream);
  if (first.tiles) return launch_elements(of_all, first, tiles, stream);
  if (first.whole) {
    tensor_exponent_kernel<<<blocks, kPartThreads, 0, stream>>>(of_all);
  } else if (first.columnwise) {
    col_exponents_kernel<<<blocks, kColumnThreads, 0, stream>>>(of_all);
  } else {
    row_exponents_kernel<<<blocks, kThreads, 0, stream>>>(of_all);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_elements(of_all, first, tiles, stream);
}

}  // namespace

cudaError_t launch_anchor_codes(const AnchorCodes& a, cudaStream_t stream) {
  return launch(a, a, blocks_of(a), a.matrices, stream);
}

cudaError_t launch_anchor_multi_tensor(const AnchorMultiTensor& group, cudaStream_t stream) {
  Blocks largest = {};
  for (int i = 0; i < group.count; ++i) {
    const Blocks own = blocks_of(group.items[i]);
    largest.exponents = own.exponents > largest.exponents ? own.exponents : largest.exponents;
    largest.tiles = own.tiles > largest.tiles ? own.tiles : largest.tiles;
    largest.runs = own.runs > largest.runs ? own.runs : largest.runs;
  }
  return launch(group, group.items[0], largest, group.count, stream);
}

}  // namespace fsdp_quant
